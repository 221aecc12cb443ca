"""One text file to one finished shard: the unit of work of a preparation, safe to repeat."""

from dataclasses import dataclass, fields
from pathlib import Path

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import Segments, ShardSettings, read_sidecar, sidecar_path
from mlperf_bert.prepare.documents import Documents, read_text, tokenize_documents
from mlperf_bert.prepare.examples import (
    ExampleArrays,
    ExampleMaker,
    compile_examples,
    pick_evenly,
)
from mlperf_bert.prepare.shard_writer import write_shard
from mlperf_bert.prepare.whole_sequences import SequenceMaker, compile_sequences
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary, make_encoder


@dataclass(frozen=True, slots=True)
class ShardJob:
    """The text, the shard to make of it, and how."""

    text_path: Path
    shard_path: Path
    vocab_path: Path
    settings: ShardSettings


def compile_maker(segments: Segments, vocabulary: AnyVocabulary) -> None:
    """Compile what `make_shard` runs, once: else all workers would, and write the same cache.

    Raises ConfigError where numba's cache cannot be used.
    """
    if segments == "single":
        compile_sequences(vocabulary)
    else:
        compile_examples(vocabulary)


def make_shard(job: ShardJob) -> None:
    """Make one shard unless it is there.

    Raises DataError for the text's or vocabulary's faults, and where memory does not suffice.
    """
    try:
        _make_shard(job)
    except MemoryError:
        remedy = "split the text, lower the dupe factor or use fewer workers"
        problem = "needs more memory than there is"
        raise DataError(str(job.text_path), problem, remedy) from None


def _make_shard(job: ShardJob) -> None:
    # The text is held no longer than it takes to split it: the examples need the memory.
    source = read_text(job.text_path)
    source_sha256 = source.sha256
    if is_finished(job, source_sha256):
        return
    settings = job.settings
    vocabulary = load_any_vocabulary(job.vocab_path)
    documents = tokenize_documents(
        source.text, make_encoder(vocabulary), split=settings.split_sentences
    )
    del source
    examples = _make_examples(job, documents, vocabulary, source_sha256)
    if settings.pick_eval is not None:
        if len(examples) < settings.pick_eval:
            problem = f"gives {len(examples)} examples where {settings.pick_eval} are to be picked"
            remedy = "pick fewer, or raise the dupe factor"
            raise DataError(str(job.text_path), problem, remedy)
        examples = pick_evenly(examples, settings.pick_eval)
    write_shard(
        job.shard_path,
        examples,
        source_name=job.text_path.name,
        source_sha256=source_sha256,
        settings=settings,
    )


def _make_examples(
    job: ShardJob, documents: Documents, vocabulary: AnyVocabulary, source_sha256: str
) -> ExampleArrays:
    settings = job.settings
    _check_documents(job.text_path, documents, 1 if settings.segments == "single" else 2)
    if settings.segments == "single":
        return SequenceMaker(
            vocabulary,
            max_seq_length=settings.max_seq_length,
            max_predictions=settings.max_predictions,
            seed=settings.seed,
            source_sha256=source_sha256,
        ).make(documents, settings.dupe_factor)
    maker = ExampleMaker(
        vocabulary,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
    )
    return maker.make(documents, settings.dupe_factor)


def _check_documents(path: Path, documents: Documents, least: int) -> None:
    # With a single document the reference would silently pair it with itself and call the second
    # segment a random other one, which teaches a wrong next-sentence label.
    if len(documents) < least:
        problem = f"has {len(documents)} documents with words, {least} are needed"
        raise DataError(str(path), problem, "separate documents by an empty line")


def is_finished(job: ShardJob, source_sha256: str | None) -> bool:
    """Whether the shard is there, whole and made this way; `None` leaves the text unchecked."""
    if not sidecar_path(job.shard_path).exists():
        return False
    try:
        sidecar = read_sidecar(job.shard_path)
    except DataError:
        return False  # a damaged sidecar vouches for nothing: make the shard again
    pairs = {
        f"setting {field.name}": (
            getattr(sidecar.settings, field.name),
            getattr(job.settings, field.name),
        )
        for field in fields(job.settings)
    }
    pairs["text sha256"] = (sidecar.source_sha256, source_sha256 or sidecar.source_sha256)
    for name, (before, now) in pairs.items():
        if before != now:
            problem = f"was finished with {name} = {before}, now it is {now}"
            remedy = "name a new directory or delete this one"
            raise DataError(str(job.shard_path), problem, remedy)
    return job.shard_path.is_file() and job.shard_path.stat().st_size == sidecar.shard_bytes

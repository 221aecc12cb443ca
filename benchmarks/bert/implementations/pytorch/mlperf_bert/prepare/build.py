"""Build a prepared set from text files, in parallel, with one shard per file.

A shard is an HDF5 file of contiguous arrays. Its sidecar is a JSON file that is written last and
marks the shard as complete. An interrupted build therefore continues with the unfinished shards.
The index is written when all shards are complete.

The evaluation set stores the context-free baseline, which a trained model must beat. The baseline
is the accuracy of a predictor that ignores the context of a masked position. If the input at the
position is a token (kept or random), the predictor outputs that token. If the input is [MASK], it
outputs the most frequent label among the set's [MASK] inputs.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.compiled import usable_cache
from mlperf_bert.data.compiled_masking import draw_masks
from mlperf_bert.data.index import (
    Baseline,
    DatasetLocation,
    Manifest,
    Segments,
    ShardEntry,
    ShardSettings,
    Sidecar,
    read_sidecar,
    sidecar_path,
    write_index,
)
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.data.shards import Shard, ShardArrays
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import file_digest, file_size, make_directory, remove_temporaries, write_file
from mlperf_bert.prepare.contents import (
    Tally,
    baseline_of,
    check_arrays,
    check_unknown,
    read_counts,
)
from mlperf_bert.prepare.documents import (
    EVAL_DUPE_FACTOR,
    Documents,
    read_text,
    tokenize_documents,
)
from mlperf_bert.prepare.examples import add_pass, make_examples, pick_evenly
from mlperf_bert.prepare.pool import run_with_progress
from mlperf_bert.prepare.verify import verify
from mlperf_bert.prepare.whole_sequences import make_sequences
from mlperf_bert.vocabulary.any_vocabulary import (
    AnyVocabulary,
    file_name,
    load_any_vocabulary,
    load_new_vocabulary,
    make_encoder,
)
from mlperf_bert.vocabulary.word_pieces import token_dtype

# Every array starts at a cache line, so that the mapped int64 tables are aligned.
ALIGNMENT_BYTES = 64
MANY_UNKNOWN = 0.01  # A larger share of [UNK] causes a warning, and MAX_UNKNOWN_SHARE an error.
_WANTED_VOCABULARY = (
    "use a vocabulary for this text's language, or a larger one (prepare: --vocab-size, pretrain: "
    "--set model.vocab_size)"
)
SURE = 0.25  # After this share of the bytes, the share of [UNK] is representative.


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A text, the shard to write for it, the vocabulary and the settings."""

    text_path: Path
    shard_path: Path
    vocab_path: Path
    settings: ShardSettings


def prepare_text(
    texts: Sequence[Path],
    vocab_path: Path,
    out_dir: Path,
    settings: ShardSettings,
    *,
    workers: int,
    with_baseline: bool = False,
    corpus: dict[str, str] | None = None,
    quiet: bool = False,
) -> Manifest:
    """Create or complete the prepared set `out_dir` from text files, and return its manifest.

    Each text becomes one shard, and the shards are ordered by file stem. documents.py describes the
    two layouts of a text. A shard that was finished with the same text and settings is kept.
    `vocab_path` is a vocabulary or a tokenizer.json, which is copied into the set. `corpus`
    describes the origin of the text, for the manifest. The context-free baseline is stored if
    `with_baseline` is True or `settings.pick_eval` is set.

    Raises ConfigError for an option out of range or an unusable numba cache. Raises DataError if a
    text or the vocabulary is not usable, if a shard was finished with other settings, or if a shard
    belongs to none of the texts.
    """
    vocabulary = load_new_vocabulary(vocab_path)
    settings = replace(settings, vocabulary_sha256=vocabulary.sha256)
    check_settings(settings, workers, len(texts))
    jobs = shard_jobs(texts, vocab_path, out_dir, settings)
    compile_maker(settings.segments, vocabulary)
    return make_set(
        jobs,
        make_shard,
        vocabulary,
        workers=workers,
        with_baseline=with_baseline or settings.pick_eval is not None,
        corpus=corpus,
        quiet=quiet,
    )


def prepare_pair(
    texts: Mapping[str, Sequence[Path]],
    vocab_path: Path,
    out_dir: Path,
    settings: ShardSettings,
    *,
    workers: int,
    corpus: dict[str, str],
    quiet: bool,
) -> dict[str, Manifest]:
    """Create the prepared sets "train" and "eval", and return their manifests.

    Only "eval" stores the context-free baseline. Raises the errors of `prepare_text`.
    """
    passes = {"train": settings.dupe_factor, "eval": EVAL_DUPE_FACTOR}
    return {
        name: prepare_text(
            paths,
            vocab_path,
            out_dir / name,
            replace(settings, dupe_factor=passes[name]),
            workers=workers,
            with_baseline=name == "eval",
            corpus=corpus,
            quiet=quiet,
        )
        for name, paths in texts.items()
    }


def make_set(
    jobs: list[ShardJob],
    make: Callable[[ShardJob], Tally],
    vocabulary: AnyVocabulary,
    *,
    workers: int,
    with_baseline: bool,
    corpus: dict[str, str] | None,
    quiet: bool,
    activity: str = "preparing texts",
) -> Manifest:
    """Write the unfinished shards of a set and then its index, and run `verify`'s fast check.

    Args:
        jobs: one job per shard, from `shard_jobs`.
        make: function that writes the shard of a job unless it is finished, and counts the tokens.
            It runs in worker processes, so it must be a module-level function, or a partial of one.
        vocabulary: the vocabulary, of which a copy is stored in the set.
        workers: number of worker processes. With 1, this process does the work.
        with_baseline: whether to measure and store the context-free baseline.
        corpus: the origin of the text, for the manifest.
        quiet: whether to print no progress.
        activity: the words with which a progress line begins.

    Returns the set's manifest. Raises DataError for the same reasons as `make`, if a shard was
    finished with other settings, if more than half of the tokens are [UNK], or if the check fails,
    for example because two texts are equal.
    """
    out_dir, settings = jobs[0].shard_path.parents[1], jobs[0].settings
    sizes = [file_size(job.text_path, "use a readable file") for job in jobs]
    _store_vocabulary(out_dir, vocabulary)
    # Check the settings of all existing shards now, because making the others may take hours.
    for job in jobs:
        is_finished(job, source_sha256=None)
    counted, done, size_of = Tally(), 0, dict(zip(jobs, sizes, strict=True))
    for job, tally in run_with_progress(
        make, jobs, workers, sizes=sizes, activity=activity, quiet=quiet
    ):
        counted += tally
        done += size_of[job]
        if done >= SURE * sum(sizes):
            check_unknown(out_dir, counted, _WANTED_VOCABULARY)
    if not quiet and counted.unknown > MANY_UNKNOWN * counted.tokens:
        share = counted.unknown / counted.tokens
        print(f"warning: {share:.1%} of the tokens are [UNK]; {_WANTED_VOCABULARY}", flush=True)
    shards = [job.shard_path for job in jobs]
    names = {path.name for shard in shards for path in (shard, sidecar_path(shard))}
    remove_temporaries(out_dir / "shards", names)
    remove_temporaries(out_dir, {file_name(vocabulary)})
    entries = [ShardEntry.of(shard) for shard in shards]
    manifest = replace(manifest_of(vocabulary, settings, entries), corpus=corpus)
    of_index = {"dataset.json", *(name for name, _ in manifest.index_arrays)}
    remove_temporaries(out_dir / "index", of_index)
    lengths, masked_counts = read_counts(out_dir, entries)
    if with_baseline:
        manifest = replace(manifest, baseline=measure_baseline(out_dir, manifest))
    manifest = write_index(out_dir, manifest, lengths, masked_counts)
    verify(out_dir, full=False, workers=1, quiet=True).raise_if_wrong()
    return manifest


def check_settings(settings: ShardSettings, workers: int, num_texts: int) -> None:
    """Raise ConfigError if a setting is out of range or does not suit the number of texts."""
    ranges = {
        "max_seq_length": (settings.max_seq_length, 8, 65_535),
        "max_predictions": (settings.max_predictions, 1, 65_535),
        "dupe_factor": (settings.dupe_factor, 1, 10_000),
        "seed": (settings.seed, 0, 2**63 - 1),
        "workers": (workers, 1, 4096),
        "pick_eval": (1 if settings.pick_eval is None else settings.pick_eval, 1, 2**31),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ConfigError(name, f"is {value}", f"use a value from {low} to {high}")
    if num_texts == 0:
        raise ConfigError("text", "has no file", "pass at least one text file")
    if settings.pick_eval is not None and num_texts != 1:
        problem = f"needs exactly one text file, but {num_texts} were passed"
        raise ConfigError("pick_eval", problem, "pass only one text file")


def shard_jobs(
    texts: Sequence[Path], vocab_path: Path, out_dir: Path, settings: ShardSettings
) -> list[ShardJob]:
    """Return one job per text file, ordered by file stem.

    Raises DataError if two files have the same stem, because both would be written to the same
    shard. Also raises DataError if the set has a shard of a file that is not in `texts`, because
    the index would not include it.
    """
    found: dict[str, Path] = {}
    for path in texts:
        if path.stem in found:
            problem = f"has the same base name as {found[path.stem]}, but each text needs a shard"
            raise DataError(str(path), problem, "rename one of these files")
        found[path.stem] = path
    for path in sorted((out_dir / "shards").glob("*.hdf5")):
        if path.stem not in found:
            remedy = "pass that file too, or use a new directory"
            raise DataError(str(path), "is the shard of a file that was not passed", remedy)
    return [
        ShardJob(found[stem], out_dir / "shards" / f"{stem}.hdf5", vocab_path, settings)
        for stem in sorted(found)
    ]


def _store_vocabulary(out_dir: Path, vocabulary: AnyVocabulary) -> None:
    make_directory(out_dir / "shards")
    copy = out_dir / file_name(vocabulary)
    if not copy.exists():
        write_file(copy, vocabulary.contents)
    elif copy.read_bytes() != vocabulary.contents:
        problem = "differs from the vocabulary that was passed"
        raise DataError(str(copy), problem, "use a new directory, or delete the old set")


def manifest_of(
    vocabulary: AnyVocabulary, settings: ShardSettings, entries: Sequence[ShardEntry] = ()
) -> Manifest:
    """Return the manifest of a set with these shards, without the entries for its index."""
    return Manifest(
        num_samples=sum(entry.num_samples for entry in entries),
        vocab_size=len(vocabulary),
        vocabulary_sha256=vocabulary.sha256,
        pad_id=vocabulary.pad_id,
        unk_id=vocabulary.unk_id,
        cls_id=vocabulary.cls_id,
        sep_id=vocabulary.sep_id,
        mask_id=vocabulary.mask_id,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
        dupe_factor=settings.dupe_factor,
        shards=tuple(entries),
        segments=settings.segments,
        vocabulary_file=file_name(vocabulary),
    )


def measure_baseline(set_dir: Path, manifest: Manifest) -> Baseline:
    """Measure the context-free baseline over the whole set.

    `mask_only_accuracy` counts [MASK] inputs only. Raises DataError if a shard has invalid samples.
    """
    tally, label_counts = Tally(), np.zeros(manifest.vocab_size, dtype=np.int64)
    for entry in manifest.shards:
        path = set_dir / "shards" / entry.file
        of_shard = check_arrays(path, Shard(path).arrays(), manifest, SHARD_REMEDY)
        tally += of_shard[0]
        label_counts += of_shard[1]
    return baseline_of(tally, label_counts)


def compile_maker(segments: Segments, vocabulary: AnyVocabulary) -> None:
    """Compile the code of `make_shard` in this process, before the workers start.

    Otherwise all workers would write numba's cache at the same time. The first call after an
    installation takes about 5 s, and later calls take a fraction of a second. Raises ConfigError if
    numba's cache is damaged or cannot be written.
    """
    settings = ShardSettings(
        max_seq_length=8, max_predictions=1, seed=0, dupe_factor=1, segments=segments
    )
    count = 0 if segments == "single" else 2
    documents = Documents(
        tokens=np.zeros(count, dtype=token_dtype(len(vocabulary))),
        sentence_offsets=np.arange(count + 1),
        document_offsets=np.arange(count + 1),
    )
    with usable_cache(draw_masks if segments == "single" else add_pass):
        _make_examples(documents, vocabulary, settings, source_sha256="")


def make_shard(job: ShardJob) -> Tally:
    """Write one shard unless it is finished, and count the tokens of its text.

    Raises DataError if the text or the vocabulary is not usable.
    """
    # The text is released once it is split, because the examples need the memory.
    source = read_text(job.text_path)
    source_sha256 = source.sha256
    settings = job.settings
    vocabulary = load_any_vocabulary(job.vocab_path)
    if is_finished(job, source_sha256):
        return _tally(Shard(job.shard_path).arrays().input_ids, vocabulary)
    encoder = make_encoder(vocabulary)
    documents = tokenize_documents(source.text, encoder)
    del source
    tally = _tally(documents.tokens, vocabulary)
    # With a single document the reference would silently pair it with itself and call the second
    # segment a random other one, which teaches a wrong next-sentence label.
    least = 1 if settings.segments == "single" else 2
    if len(documents) < least:
        problem = f"has {len(documents)} documents with words, but at least {least} are needed"
        raise DataError(str(job.text_path), problem, "put an empty line between documents")
    examples = _make_examples(documents, vocabulary, settings, source_sha256)
    wanted = settings.pick_eval
    if wanted is not None:
        num_samples = len(examples.segment_b_start)
        if num_samples < wanted:
            problem = f"gives {num_samples} examples, but {wanted} were requested"
            raise DataError(str(job.text_path), problem, "lower --pick-eval or raise --dupe-factor")
        examples = pick_evenly(examples, wanted)
    write_shard(
        job.shard_path,
        examples,
        source_name=job.text_path.name,
        source_sha256=source_sha256,
        settings=settings,
    )
    return tally


def _tally(tokens: NDArray[Any], vocabulary: AnyVocabulary) -> Tally:
    """Count the tokens [T] of a text, and how many of them are [UNK]."""
    unknown = int(np.count_nonzero(tokens == vocabulary.unk_id))
    return Tally(tokens=len(tokens), unknown=unknown)


def _make_examples(
    documents: Documents, vocabulary: AnyVocabulary, settings: ShardSettings, source_sha256: str
) -> ShardArrays:
    if settings.segments == "single":
        return make_sequences(documents, vocabulary, settings, source_sha256)
    return make_examples(documents, vocabulary, settings)


def is_finished(job: ShardJob, source_sha256: str | None) -> bool:
    """Return True if the shard of a job is complete and undamaged.

    If `source_sha256` is None, the function compares no digests. Raises DataError if the shard was
    finished with another text or other settings.
    """
    if not sidecar_path(job.shard_path).exists():
        return False
    try:
        sidecar = read_sidecar(job.shard_path)
    except DataError:
        return False  # With a damaged sidecar, the shard must be made again.
    found, wanted = asdict(sidecar.settings), asdict(job.settings)
    pairs = {f"setting {name}": (found[name], wanted[name]) for name in wanted}
    pairs["text sha256"] = (sidecar.source_sha256, source_sha256 or sidecar.source_sha256)
    for name, (before, now) in pairs.items():
        if before != now:
            problem = f"was built with {name} = {before} instead of {now}"
            remedy = "use a new directory, or delete the old set"
            raise DataError(str(job.shard_path), problem, remedy)
    path = job.shard_path
    if not path.is_file() or path.stat().st_size != sidecar.shard_bytes:
        return False
    return source_sha256 is None or file_digest(path, SHARD_REMEDY) == sidecar.shard_sha256


def write_shard(
    path: Path,
    examples: ShardArrays,
    *,
    source_name: str,
    source_sha256: str,
    settings: ShardSettings,
) -> Sidecar:
    """Write the shard `path`, then its sidecar `<path>.json`, and return the sidecar.

    Both files are written under temporary names and then renamed. Equal examples result in
    byte-identical files. Raises DataError if a file cannot be written.
    """
    # The sidecar of an earlier shard must never be next to the new file.
    sidecar_path(path).unlink(missing_ok=True)
    # HDF5 writes to memory, because libhdf5 2.0 ends the process if the disk is full.
    file = io.BytesIO()
    datasets = _write_arrays(file, path, examples)
    contents = file.getbuffer()
    write_file(path, contents)
    sidecar = Sidecar(
        shard_bytes=len(contents),
        shard_sha256=hashlib.sha256(contents).hexdigest(),
        num_samples=len(examples.segment_b_start),
        source_name=source_name,
        source_sha256=source_sha256,
        settings=settings,
        datasets=datasets,
        examples_sha256=_digest(examples),
    )
    write_file(sidecar_path(path), sidecar.to_json())
    return sidecar


def _write_arrays(
    opened: io.BytesIO, path: Path, examples: ShardArrays
) -> dict[str, DatasetLocation]:
    locations = {}
    with h5py.File(
        opened, "w", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES
    ) as file:
        for name, stored in _stored_arrays(examples):
            # Time stamps are off, because equal examples must result in equal bytes.
            dataset = file.create_dataset(name, data=stored, track_times=False)
            offset = dataset.id.get_offset()
            if offset is None:
                raise DataError(f"{path}: {name}", "has no elements", "use more text")
            locations[name] = DatasetLocation(stored.dtype.str, stored.size, offset)
    return locations


def _digest(examples: ShardArrays) -> str:
    digest = hashlib.sha256()
    for name, stored in _stored_arrays(examples):
        digest.update(f"{name} {stored.dtype.str} {stored.size}\n".encode())
        digest.update(np.ascontiguousarray(stored).data)
    return digest.hexdigest()


def _stored_arrays(examples: ShardArrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name of each array with its values in little-endian byte order."""
    for field in fields(examples):
        values: NDArray[Any] = getattr(examples, field.name)
        yield field.name, values.astype(values.dtype.newbyteorder("<"), copy=False)

"""Files of examples that others made to a prepared set: a shard each, in parallel, checked."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import file_digest
from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.prepare.build import check_settings, make_set, shard_jobs
from mlperf_bert.prepare.examples import pick_evenly
from mlperf_bert.prepare.foreign_examples import (
    check_examples,
    collect_examples,
    compile_reading,
    read_tfrecord,
)
from mlperf_bert.prepare.hdf5_rows import READING, ROWS_READER, read_hdf5
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.prepare.shard_job import ShardJob, is_finished
from mlperf_bert.prepare.shard_writer import write_shard
from mlperf_bert.prepare.verify.check import verify
from mlperf_bert.vocabulary.word_pieces import load_vocabulary

Format = Literal["tfrecord", "hdf5"]
FORMATS: dict[Format, str] = {"tfrecord": "TFRecord files", "hdf5": "HDF5 files"}


def import_set(
    files: Sequence[Path],
    vocab_path: Path,
    out_dir: Path,
    *,
    format_name: Format,
    max_seq_length: int,
    max_predictions: int,
    workers: int,
    pick_eval: int | None,
    quiet: bool = False,
) -> Manifest:
    """Make, or finish making, the prepared set `out_dir`, and verify it (fast).

    Args:
        files: one shard is made of each; shards are ordered by file stem.
        vocab_path: the vocabulary that the examples were made with.
        out_dir: created; a shard already finished with the same file and limits is kept.
        format_name: of FORMATS.
        max_seq_length: tokens of an example at most, 8 .. 65,535.
        max_predictions: masked positions of an example at most, 1 .. 255, as it was made with.
        workers: processes; 1 works in this process.
        pick_eval: take this many examples evenly out of all of the only file, and store the
            context-free baseline.
        quiet: show no progress.

    Raises:
        ConfigError: an option out of range, or numba's cache cannot be used.
        DataError: a file, the vocabulary, or a shard that was finished with other limits.
    """
    if vocab_path.suffix == ".json":
        problem = f"{vocab_path}: files of examples are read with word pieces"
        raise ConfigError("--vocab", problem, "give the vocab.txt that they were made with")
    vocabulary = load_vocabulary(vocab_path)
    settings = ShardSettings(
        vocabulary_sha256=vocabulary.sha256,
        max_seq_length=max_seq_length,
        max_predictions=max_predictions,
        seed=0,  # of whoever made the examples; it is not in these files
        dupe_factor=1,  # nor is this
        split_sentences=False,
        pick_eval=pick_eval,
    )
    check_settings(settings, workers, len(files))
    jobs = shard_jobs(files, vocab_path, out_dir, settings)
    # Once, here: all workers would compile at the same time, and write the same cache.
    compile_reading()
    with sandbox(ROWS_READER, READING) if format_name == "hdf5" else nullcontext() as running:
        manifest = make_set(
            jobs,
            partial(import_shard, running=running),
            vocabulary,
            workers=workers,
            with_baseline=pick_eval is not None,
            corpus={"examples": f"imported from {FORMATS[format_name]}"},
            quiet=quiet,
            words=("imported", "files"),
        )
    verify(out_dir, full=False, workers=1, quiet=True).raise_if_wrong()
    return manifest


def import_shard(job: ShardJob, *, running: Sandbox | None) -> None:
    """Make one shard of a file with examples unless it is there.

    `running` reads the file where it is HDF5; None: it is a TFRecord file.

    Raises DataError for the file's or vocabulary's faults, and where memory does not suffice.
    """
    try:
        _import_shard(job, running)
    except MemoryError:
        problem = "needs more memory than there is"
        raise DataError(
            str(job.text_path), problem, "split the file or use fewer workers"
        ) from None


def _import_shard(job: ShardJob, running: Sandbox | None) -> None:
    path, settings = job.text_path, job.settings
    source_sha256 = file_digest(path, "give a readable file")
    if is_finished(job, source_sha256):
        return
    vocabulary = load_vocabulary(job.vocab_path)
    lots = read_tfrecord(path) if running is None else read_hdf5(path, running)
    examples = collect_examples(path, lots, vocabulary, settings)
    check_examples(path, examples, vocabulary, settings)
    if settings.pick_eval is not None:
        if len(examples) < settings.pick_eval:
            problem = f"holds {len(examples)} examples where {settings.pick_eval} are to be picked"
            raise DataError(str(path), problem, "pick fewer")
        examples = pick_evenly(examples, settings.pick_eval)
    write_shard(
        job.shard_path,
        examples,
        source_name=path.name,
        source_sha256=source_sha256,
        settings=settings,
    )

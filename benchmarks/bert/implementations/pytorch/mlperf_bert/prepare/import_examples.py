"""Other programs' files of examples to a prepared set: one shard per file, in parallel, checked.

An HDF5 file is read in a child of the sandbox. A hostile file may control that child, so its answer
is not trusted either.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mlperf_bert.common.compiled import usable_cache
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import file_digest
from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare import tf_example
from mlperf_bert.prepare.build import (
    ShardJob,
    check_settings,
    enough_memory,
    is_finished,
    make_set,
    manifest_of,
    shard_jobs,
    store_shard,
)
from mlperf_bert.prepare.examples import joined, used_part
from mlperf_bert.prepare.foreign_rows import PROBLEMS, RIGHT, Bounds, Rows, room_for, take_rows
from mlperf_bert.prepare.hdf5_reader import ABSENT, FEATURES, MOST_ROWS, MOST_VALUES, NUM_ROWS
from mlperf_bert.prepare.sandbox import Limits, Sandbox, sandbox
from mlperf_bert.prepare.tf_example import read_records
from mlperf_bert.prepare.verify.check import verify
from mlperf_bert.prepare.verify.contents import check_arrays
from mlperf_bert.prepare.verify.full import MAX_COPIED_SHARE, rate_checks
from mlperf_bert.vocabulary.word_pieces import Vocabulary, load_vocabulary, token_dtype

_HDF5_REMEDY = "get the file again, or one with examples of BERT's pre-training"
ROWS_READER = "mlperf_bert.prepare.hdf5_reader:read_rows"
# Hundreds of rows take hundredths of a second; ten minutes are enough for millions. Damaged files
# send libhdf5 into endless loops, so no piece may take long. The child also waits for us.
READING = Limits(cpu_seconds=600, piece_cpu_seconds=10, wall_seconds=3600, answer_bytes=2**36)

_VALUE_BYTES = 4

REMEDY = "give the vocabulary and limits that it was made with, or get the file again"
# Limit of one file, which is held in memory: an official part of 500 has 80 million.
MOST_TOKENS = 2**28
Format = Literal["tfrecord", "hdf5"]
FORMATS: dict[Format, str] = {"tfrecord": "TFRecord files", "hdf5": "HDF5 files"}


def read_hdf5(path: Path, sandbox: Sandbox) -> Iterator[Rows]:
    """Yield all rows of a file, some hundreds at a time; `sandbox` runs ROWS_READER.

    Raises DataError if the file is no HDF5 file of examples, or breaks its reader.
    """
    answer = _Answer(path, sandbox.read_pieces(path, _HDF5_REMEDY))
    while head := answer.take(NUM_ROWS.size, may_end=True):
        (num_rows,) = NUM_ROWS.unpack(head)
        if not 1 <= num_rows <= MOST_ROWS:
            raise answer.error()
        shape = (num_rows, len(FEATURES))
        counts = np.frombuffer(answer.take(_VALUE_BYTES * num_rows * len(FEATURES)), "<i4")
        counts = counts.reshape(shape).astype(np.int64)
        present = np.maximum(counts, 0)
        if counts.min() < ABSENT or present.sum(axis=0).max() > MOST_VALUES:
            raise answer.error()
        # Feature after feature, each in the order of the rows.
        ends = np.cumsum(present.T).reshape(shape[::-1]).T
        values = np.frombuffer(answer.take(_VALUE_BYTES * int(present.sum())), "<i4")
        starts = np.ascontiguousarray(ends - present)
        yield Rows(values.astype(np.int32, copy=False), starts, counts)


class _Answer:
    """The bytes that a child sends, taken in portions of a given size."""

    def __init__(self, path: Path, pieces: Iterator[bytearray]) -> None:
        self._path = path
        self._pieces = pieces
        self._held = bytearray()

    def take(self, size: int, *, may_end: bool = False) -> bytearray:
        """The next `size` bytes; empty at the end of the answer, if it may end here."""
        while len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                if may_end and not self._held:
                    return bytearray()
                raise self.error()
            self._held += piece
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def error(self) -> DataError:
        """The error for a malformed answer."""
        return DataError(str(self._path), "makes its reader process answer no rows", _HDF5_REMEDY)


def compile_reading() -> None:
    """Compile the code that reads examples, or load it from the cache.

    The first use after an installation takes about 15 s, later ones a fraction of a second.
    Raises ConfigError when the cache is damaged or cannot be written.
    """
    rows = tf_example.room_for_rows(1, 0)
    with usable_cache(tf_example.parse_examples):
        no_bytes, ends = np.empty(0, np.uint8), np.zeros(2, np.int64)
        tf_example.parse_examples(no_bytes, ends, rows)
    with usable_cache(take_rows):
        take_rows(rows, Bounds(1, 0, 1, 1), room_for(rows))


def read_tfrecord(path: Path) -> Iterator[Rows]:
    """Yield the rows of a TFRecord file, one per record.

    Raises DataError like `read_records`, and if a record is no tf.train.Example of integers.
    """
    for block in read_records(path):
        rows = tf_example.room_for_rows(len(block.ends) - 1, len(block.contents))
        problem, record = tf_example.parse_examples(block.contents, block.ends, rows)
        if problem != RIGHT:
            where = f"{path}: record {block.first + record}"
            raise DataError(where, tf_example.PROBLEMS[problem], REMEDY)
        yield rows


def collect_examples(
    path: Path, lots: Iterable[Rows], vocabulary: Vocabulary, settings: ShardSettings
) -> ShardArrays:
    """The examples of all rows of the file `path`, in order; the rows come in lots.

    Raises DataError if there are none or too many, or if a row, named from 0, holds no example.
    """
    bounds = Bounds(
        len(vocabulary), vocabulary.pad_id, settings.max_seq_length, settings.max_predictions
    )
    dtype = token_dtype(len(vocabulary))
    parts: list[ShardArrays] = []
    num_rows, num_tokens = 0, 0
    for rows in lots:
        found = room_for(rows)
        count, problem, row = take_rows(rows, bounds, found)
        if problem != RIGHT:
            raise DataError(f"{path}: row {num_rows + row}", PROBLEMS[problem], REMEDY)
        part = used_part(found, count)
        # Copies, because the arrays are as long as the padded rows.
        tokens, labels = part.input_ids.astype(dtype), part.masked_lm_ids.astype(dtype)
        parts.append(replace(part, input_ids=tokens, masked_lm_ids=labels))
        num_rows += len(rows.counts)
        num_tokens += int(found.offsets[count])
        if num_tokens > MOST_TOKENS:
            problem_of_all = f"holds more than {MOST_TOKENS:,} tokens"
            raise DataError(str(path), problem_of_all, "split it into several files")
    if not num_tokens:
        raise DataError(str(path), "holds no examples", "give another file")
    return joined(parts)


def check_examples(
    path: Path, examples: ShardArrays, vocabulary: Vocabulary, limits: ShardSettings
) -> None:
    """Raise DataError if `verify --full` would refuse a shard of these examples.

    It checks the places of [CLS], [SEP] and masked positions; 15 % of the tokens masked, of these
    80 % [MASK], 10 % kept, 10 % replaced; next-sentence labels, unknown words, and copies.
    """
    manifest = manifest_of(vocabulary, limits)
    contents = check_arrays(examples, manifest)
    if contents.faults:
        raise DataError(str(path), "; also ".join(contents.faults), REMEDY)
    tally = contents.tally
    for check in rate_checks(path, manifest, {path: tally}, tally):
        for problem in check.problems:
            raise DataError(problem.args[0], problem.args[1], REMEDY)
    if contents.copied > MAX_COPIED_SHARE * tally.samples:
        problem_of_all = f"{contents.copied:,} of {tally.samples:,} examples are copies of others"
        raise DataError(str(path), problem_of_all, "get the file again: it was made wrongly")


def import_set(
    files: Sequence[Path],
    vocab_path: Path,
    out_dir: Path,
    settings: ShardSettings,
    *,
    format_name: Format,
    workers: int,
    quiet: bool = False,
) -> Manifest:
    """Make or finish the prepared set `out_dir`, and verify it (fast).

    Like `prepare_text`, but `settings` are the limits with which the examples were made, and
    `vocab_path` is the vocabulary. Raises ConfigError and DataError.
    """
    if vocab_path.suffix == ".json":
        problem = f"{vocab_path}: files of examples are read with word pieces"
        raise ConfigError("--vocab", problem, "give the vocab.txt that they were made with")
    vocabulary = load_vocabulary(vocab_path)
    settings = replace(settings, vocabulary_sha256=vocabulary.sha256)
    check_settings(settings, workers, len(files))
    jobs = shard_jobs(files, vocab_path, out_dir, settings)
    # Once, here, so that the workers do not all compile and write the same cache.
    compile_reading()
    with sandbox(ROWS_READER, READING) if format_name == "hdf5" else nullcontext() as running:
        manifest = make_set(
            jobs,
            partial(import_shard, running=running),
            vocabulary,
            workers=workers,
            with_baseline=settings.pick_eval is not None,
            corpus={"examples": f"imported from {FORMATS[format_name]}"},
            quiet=quiet,
            words=("imported", "files"),
        )
    verify(out_dir, full=False, workers=1, quiet=True).raise_if_wrong()
    return manifest


def import_shard(job: ShardJob, *, running: Sandbox | None) -> None:
    """Make one shard of a file with examples unless the shard exists.

    `running` reads an HDF5 file; None for a TFRecord file.

    Raises DataError for a faulty file or vocabulary, and if memory is short.
    """
    path, settings = job.text_path, job.settings
    with enough_memory(job, "split the file or use fewer workers"):
        source_sha256 = file_digest(path, "give a readable file")
        if is_finished(job, source_sha256):
            return
        vocabulary = load_vocabulary(job.vocab_path)
        lots = read_tfrecord(path) if running is None else read_hdf5(path, running)
        examples = collect_examples(path, lots, vocabulary, settings)
        check_examples(path, examples, vocabulary, settings)
        store_shard(job, examples, source_sha256, ("holds", "pick fewer"))

"""A TFRecord or HDF5 file of examples by others: rows in, checked arrays of one shard out."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import usable_cache
from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import Manifest, ShardSettings, special_ids
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare import tf_example
from mlperf_bert.prepare.examples import ExampleArrays
from mlperf_bert.prepare.foreign_rows import (
    PROBLEMS,
    RIGHT,
    Bounds,
    Found,
    Rows,
    room_for,
    take_rows,
)
from mlperf_bert.prepare.tfrecord import read_records
from mlperf_bert.prepare.verify.contents import check_arrays
from mlperf_bert.prepare.verify.duplicates import MAX_COPIED_SHARE
from mlperf_bert.prepare.verify.rates import (
    check_masking,
    check_next_sentence,
    check_unknown,
    check_vocabulary_size,
)
from mlperf_bert.vocabulary.word_pieces import Vocabulary
from mlperf_bert.vocabulary.wordpiece import token_dtype

IntArray = NDArray[np.int64]

REMEDY = "give the vocabulary and limits that it was made with, or get the file again"
# Of one file, whose examples are held in memory: an official part of 500 has 80 million.
MOST_TOKENS = 2**28


def compile_reading() -> None:
    """Compile what reading examples runs, or load it from the cache.

    The first use after an installation takes about 15 s, later ones a fraction of a second.
    Raises ConfigError when the cache is damaged or cannot be written.
    """
    rows = tf_example.room_for_rows(1, 0)
    with usable_cache(tf_example.parse_examples):
        no_bytes, ends = np.empty(0, np.uint8), np.zeros(2, np.int64)
        tf_example.parse_examples(no_bytes, ends, tf_example.feature_names(), rows)
    with usable_cache(take_rows):
        take_rows(rows, Bounds(1, 0, 1, 1), room_for(rows))


def read_tfrecord(path: Path) -> Iterator[Rows]:
    """The examples of a TFRecord file, one a record.

    Raises DataError as `read_records`, and where a record is no tf.train.Example of integers.
    """
    names = tf_example.feature_names()
    for block in read_records(path):
        rows = tf_example.room_for_rows(len(block.ends) - 1, len(block.contents))
        problem, record = tf_example.parse_examples(block.contents, block.ends, names, rows)
        if problem != RIGHT:
            where = f"{path}: record {block.first + record}"
            raise DataError(where, tf_example.PROBLEMS[problem], REMEDY)
        yield rows


def collect_examples(
    path: Path, lots: Iterable[Rows], vocabulary: Vocabulary, settings: ShardSettings
) -> ExampleArrays:
    """The examples of all rows of a file, in their order.

    Args:
        path: the file, for messages.
        lots: its rows, in lots; see `read_tfrecord` and hdf5_rows.py.
        vocabulary: that of the examples.
        settings: what an example may be.

    Raises:
        DataError: there are none or too many, or a row holds no example; which one, from 0.
    """
    bounds = Bounds(
        len(vocabulary), vocabulary.pad_id, settings.max_seq_length, settings.max_predictions
    )
    dtype = token_dtype(len(vocabulary))
    parts: list[ExampleArrays] = []
    num_rows, num_tokens = 0, 0
    for rows in lots:
        found = room_for(rows)
        count, problem, row = take_rows(rows, bounds, found)
        if problem != RIGHT:
            raise DataError(f"{path}: row {num_rows + row}", PROBLEMS[problem], REMEDY)
        parts.append(_used_part(found, count, dtype))
        num_rows += len(rows.counts)
        num_tokens += int(found.offsets[count])
        if num_tokens > MOST_TOKENS:
            problem_of_all = f"holds more than {MOST_TOKENS:,} tokens"
            raise DataError(str(path), problem_of_all, "split it into several files")
    if not any(map(len, parts)):
        raise DataError(str(path), "holds no examples", "give another file")
    return _joined(parts)


def check_examples(
    path: Path, examples: ExampleArrays, vocabulary: Vocabulary, limits: ShardSettings
) -> None:
    """Raise DataError where `verify --full` would refuse a shard of these examples by itself.

    Its checks: [CLS], [SEP] and masked positions where they belong, 15 % of the tokens masked, of
    these 80 % [MASK], 10 % kept, 10 % replaced; next-sentence labels, unknown words, copies.
    """
    arrays = ShardArrays(
        **{field.name: getattr(examples, field.name) for field in fields(examples)}
    )
    manifest = Manifest(
        num_samples=len(examples),
        vocab_size=len(vocabulary),
        vocabulary_sha256=vocabulary.sha256,
        pad_id=vocabulary.pad_id,
        unk_id=vocabulary.unk_id,
        cls_id=vocabulary.cls_id,
        sep_id=vocabulary.sep_id,
        mask_id=vocabulary.mask_id,
        max_seq_length=limits.max_seq_length,
        max_predictions=limits.max_predictions,
        seed=limits.seed,
        dupe_factor=limits.dupe_factor,
        shards=(),
    )
    contents = check_arrays(arrays, manifest)
    if contents.faults:
        raise DataError(str(path), "; also ".join(contents.faults), REMEDY)
    tally = contents.tally
    for check in (
        check_masking({path: tally}, tally, len(vocabulary)),
        check_vocabulary_size({path: tally}, tally, len(vocabulary), special_ids(manifest)),
        check_next_sentence({path: tally}, tally),
        check_unknown(path, tally),
    ):
        for problem in check.problems:
            raise DataError(problem.args[0], problem.args[1], REMEDY)
    if contents.copied > MAX_COPIED_SHARE * len(examples):
        problem_of_all = f"{contents.copied:,} of {len(examples):,} examples are copies of others"
        raise DataError(str(path), problem_of_all, "get the file again: it was made wrongly")


def _used_part(found: Found, count: int, dtype: np.dtype[Any]) -> ExampleArrays:
    num_tokens, num_masked = found.offsets[count], found.masked_lm_offsets[count]
    # Copies: the arrays are as long as the padded rows.
    return ExampleArrays(
        input_ids=found.input_ids[:num_tokens].astype(dtype),
        offsets=found.offsets[: count + 1].copy(),
        segment_b_start=found.segment_b_start[:count].copy(),
        masked_lm_positions=found.masked_lm_positions[:num_masked].copy(),
        masked_lm_ids=found.masked_lm_ids[:num_masked].astype(dtype),
        masked_lm_offsets=found.masked_lm_offsets[: count + 1].copy(),
        next_sentence_label=found.next_sentence_label[:count].copy(),
    )


def _joined(parts: list[ExampleArrays]) -> ExampleArrays:
    return ExampleArrays(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        offsets=_joined_offsets([part.offsets for part in parts]),
        segment_b_start=np.concatenate([part.segment_b_start for part in parts]),
        masked_lm_positions=np.concatenate([part.masked_lm_positions for part in parts]),
        masked_lm_ids=np.concatenate([part.masked_lm_ids for part in parts]),
        masked_lm_offsets=_joined_offsets([part.masked_lm_offsets for part in parts]),
        next_sentence_label=np.concatenate([part.next_sentence_label for part in parts]),
    )


def _joined_offsets(parts: list[IntArray]) -> IntArray:
    lengths = np.concatenate([np.diff(offsets) for offsets in parts])
    return np.concatenate(([0], np.cumsum(lengths)))

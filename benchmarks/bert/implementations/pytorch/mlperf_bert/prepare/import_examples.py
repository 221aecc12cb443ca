"""Import HDF5 files of published submissions as a prepared set, with one shard per file.

The files have the layout of MLPerf's and NVIDIA's BERT, in which each row is an example padded with
zeros. The shapes are [n, S] for input_ids, input_mask and segment_ids, [n, P] for
masked_lm_positions and masked_lm_ids, and [n] or [n, 1] for next_sentence_labels. Other datasets in
the files are ignored. All examples are checked. The files are imported in parallel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.index import Manifest, ShardSettings
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import file_digest
from mlperf_bert.prepare.build import (
    ShardJob,
    check_settings,
    is_finished,
    make_set,
    manifest_of,
    shard_jobs,
    write_shard,
)
from mlperf_bert.prepare.contents import (
    MIN_LENGTH,
    Tally,
    check_arrays,
    check_labels,
    check_unknown,
)
from mlperf_bert.prepare.examples import joined
from mlperf_bert.vocabulary.word_pieces import Vocabulary, load_vocabulary, token_dtype

REMEDY = "use the vocabulary and limits of the original examples, or download the file again"
_HDF5_REMEDY = "download it again, or use a file that contains examples for BERT pre-training"
_OF_TOKENS = ("input_ids", "input_mask", "segment_ids")
_OF_MASKS = ("masked_lm_positions", "masked_lm_ids")
_NEXT = "next_sentence_labels"
_ROWS_AT_A_TIME = 4096
_CACHE_BYTES = 32 * 2**20  # per dataset, so that each chunk is only unpacked once

Rows = dict[str, NDArray[Any]]  # name of a dataset -> some of its rows


def read_examples(path: Path, vocabulary: Vocabulary, settings: ShardSettings) -> ShardArrays:
    """Read all examples of an HDF5 file, in the order of its rows.

    Raises DataError if the file has another layout, or if a row is not a valid example for this
    vocabulary within the limits of `settings`. The error counts rows from 0.
    """
    parts: list[ShardArrays] = []
    try:
        with h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES) as file:
            first = 0
            for rows in _pieces(file):
                parts.append(_convert(path, first, rows, vocabulary, settings))
                first += len(rows["input_ids"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(str(path), f"cannot be read ({error})", _HDF5_REMEDY) from None
    if not parts:
        raise DataError(str(path), "has no examples", "use another file")
    return joined(parts)


def _pieces(file: h5py.File) -> Iterator[Rows]:
    """Yield the rows of a file, up to 4,096 at a time.

    Raises ValueError if the layout is wrong.
    """
    datasets = {name: file[name] for name in (*_OF_TOKENS, *_OF_MASKS, _NEXT)}
    for name, dataset in datasets.items():
        if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in "iu":
            raise ValueError(f"{name} is not an array of integers")
    shapes = {name: dataset.shape for name, dataset in datasets.items()}
    for names in (_OF_TOKENS, _OF_MASKS):
        expected = shapes[names[0]]
        for name in names:
            if len(shapes[name]) != 2 or shapes[name] != expected:
                problem = f"{name} has the shape {shapes[name]} and {names[0]} has {expected}"
                raise ValueError(f"{problem}, but both must have the same shape [rows, length]")
    num_rows = shapes["input_ids"][0]
    if shapes["masked_lm_ids"][0] != num_rows or shapes[_NEXT] not in ((num_rows,), (num_rows, 1)):
        raise ValueError(f"masked_lm_ids, {_NEXT} and input_ids differ in their number of rows")
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        end = first + _ROWS_AT_A_TIME
        yield {name: dataset[first:end] for name, dataset in datasets.items()}


def _convert(
    path: Path, first: int, rows: Rows, vocabulary: Vocabulary, settings: ShardSettings
) -> ShardArrays:
    """Check and convert consecutive rows of a file. `first` is the number of the first row.

    Raises DataError for a row that is not a valid example.
    """
    ids, mask, segments = (rows[name] for name in _OF_TOKENS)  # [n, S]
    positions, labels = (rows[name] for name in _OF_MASKS)  # [n, P]
    next_labels = rows[_NEXT].reshape(-1)
    lengths = (mask != 0).sum(axis=1)
    counts = (positions != 0).sum(axis=1)  # Position 0 is [CLS], which is never masked.
    starts_of_b = ((mask != 0) & (segments == 0)).sum(axis=1)
    columns = np.arange(ids.shape[1])
    is_token = columns < lengths[:, None]
    is_masked = np.arange(positions.shape[1]) < counts[:, None]
    is_padding = (ids == 0) | (ids == vocabulary.pad_id)
    problems = {
        "has input_ids outside the vocabulary": (ids < 0) | (ids >= len(vocabulary)),
        "has an input_mask that is not ones and then zeros": mask != is_token,
        "has values other than zeros where input_mask is zero": ~is_token
        & ~(is_padding & (segments == 0)),
        "has values other than zeros after its masked positions": ~is_masked
        & ((positions != 0) | (labels != 0)),
        f"has an example with fewer than {MIN_LENGTH} tokens": lengths < MIN_LENGTH,
        "has an example with more tokens than --max-seq-length": lengths > settings.max_seq_length,
        "has an example without masked positions": counts == 0,
        "has an example with more masked positions than --max-predictions": (
            counts > settings.max_predictions
        ),
        "has segment_ids that are not zeros and then ones": (
            is_token & (segments != (columns >= starts_of_b[:, None]))
        ),
        "has masked_lm_ids outside the vocabulary": (labels < 0) | (labels >= len(vocabulary)),
        "has masked_lm_positions outside the example": (
            is_masked & ((positions < 0) | (positions >= lengths[:, None]))
        ),
        "has next_sentence_labels other than 0 and 1": (next_labels < 0) | (next_labels > 1),
    }
    for problem, is_wrong in problems.items():
        wrong_rows = np.flatnonzero(is_wrong.reshape(len(ids), -1).any(axis=1))
        if len(wrong_rows):
            raise DataError(f"{path}: row {first + wrong_rows[0]}", problem, REMEDY)
    dtype = token_dtype(len(vocabulary))
    return ShardArrays(
        input_ids=ids[is_token].astype(dtype),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        segment_b_start=starts_of_b.astype(np.uint16),
        masked_lm_positions=positions[is_masked].astype(np.uint16),
        masked_lm_ids=labels[is_masked].astype(dtype),
        masked_lm_offsets=np.concatenate(([0], np.cumsum(counts))),
        next_sentence_label=next_labels.astype(np.uint8),
    )


def import_set(
    files: Sequence[Path],
    vocab_path: Path,
    out_dir: Path,
    settings: ShardSettings,
    *,
    workers: int,
    quiet: bool = False,
) -> Manifest:
    """Create or complete the prepared set `out_dir` from HDF5 files, and return its manifest.

    The function works like `prepare_text`, except that `settings` and `vocab_path` are the limits
    and the vocabulary with which the examples were made. Raises ConfigError or DataError for
    unsuitable arguments or files.
    """
    if vocab_path.suffix == ".json":
        problem = f"{vocab_path} is not a word-piece vocabulary"
        raise ConfigError("--vocab", problem, "pass the vocab.txt that the examples were made with")
    vocabulary = load_vocabulary(vocab_path)
    settings = replace(settings, vocabulary_sha256=vocabulary.sha256)
    check_settings(settings, workers, len(files))
    jobs = shard_jobs(files, vocab_path, out_dir, settings)
    return make_set(
        jobs,
        import_shard,
        vocabulary,
        workers=workers,
        with_baseline=False,
        corpus={"examples": "imported from HDF5 files"},
        quiet=quiet,
        activity="importing files",
    )


def import_shard(job: ShardJob) -> Tally:
    """Write one shard from a file with examples unless it exists, and count its tokens.

    The function runs the checks of `verify --full`: the positions of [CLS], [SEP] and masked
    tokens, the number of masked tokens (15%), both next-sentence labels, and the share of unknown
    words. Raises DataError if a check fails, or if the file or the vocabulary is not usable.
    """
    path, settings = job.text_path, job.settings
    source_sha256 = file_digest(path, "use a readable file")
    if is_finished(job, source_sha256):
        return Tally()
    vocabulary = load_vocabulary(job.vocab_path)
    examples = read_examples(path, vocabulary, settings)
    tally, _ = check_arrays(path, examples, manifest_of(vocabulary, settings), REMEDY)
    check_labels(path, tally, REMEDY)
    check_unknown(path, tally, REMEDY)
    write_shard(
        job.shard_path,
        examples,
        source_name=path.name,
        source_sha256=source_sha256,
        settings=settings,
    )
    return tally

"""Read samples from memory-mapped shards without the HDF5 library.

The sidecar of a shard contains the offsets of its arrays. No sample is read before the first call
of `read`, because MLPerf forbids reading samples before the run starts.

Shape letters: n requested samples, T tokens in total, P masked positions in total.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.index import SIDECAR_REMEDY, Manifest, Sidecar, read_sidecar
from mlperf_bert.errors import DataError
from mlperf_bert.files import check_size, map_file

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardArrays:
    """The memory-mapped, read-only arrays of one shard. The sidecar defines their dtypes."""

    input_ids: NDArray[Any]  # flat
    offsets: IntArray  # [n + 1]
    segment_b_start: NDArray[np.uint16]  # [n]
    masked_lm_positions: NDArray[np.uint16]  # flat, ascending within each sample
    masked_lm_ids: NDArray[Any]  # flat
    masked_lm_offsets: IntArray  # [n + 1]
    next_sentence_label: NDArray[np.uint8]  # [n], 1 if segment B is random, 0 if it follows A


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """n samples, whose arrays are concatenated in the order of the requested ids.

    All arrays are int64, unless the samples were received from another process
    (data/token_packets.py).
    """

    input_ids: IntArray  # [T]
    lengths: IntArray  # [n]
    segment_b_start: IntArray  # [n]: start of segment B, or the length if there is none
    masked_positions: IntArray  # [P]: positions within their sample
    masked_ids: IntArray  # [P]
    masked_counts: IntArray  # [n]
    next_sentence_label: IntArray  # [n]


class Shard:
    """One shard file, which is mapped into memory on first use.

    The constructor raises DataError if the sidecar is missing or invalid, or if the file has
    another size than the sidecar states.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sidecar: Sidecar = read_sidecar(path)
        self._arrays: ShardArrays | None = None
        check_size(path, self.sidecar.shard_bytes, SIDECAR_REMEDY)

    def arrays(self) -> ShardArrays:
        """Return the arrays of the shard.

        The first call maps the file, and checks the first and last entries of both offset tables.
        """
        if self._arrays is None:
            self._arrays = self._map()
        return self._arrays

    def lengths(self) -> IntArray:
        """Return the number of tokens per sample, int64 [n].

        Raises DataError if a number is outside 1 .. max_seq_length.
        """
        limit = self.sidecar.settings.max_seq_length
        return self._spans("offsets", self.arrays().offsets, limit)

    def masked_counts(self) -> IntArray:
        """Return the number of masked positions per sample, int64 [n].

        Raises DataError if a number is outside 1 .. max_predictions.
        """
        limit = self.sidecar.settings.max_predictions
        return self._spans("masked_lm_offsets", self.arrays().masked_lm_offsets, limit)

    def _spans(self, name: str, offsets: IntArray, limit: int) -> IntArray:
        spans = np.diff(offsets)
        if spans.min() < 1 or spans.max() > limit:
            problem = f"contains samples with less than 1 or more than {limit} entries"
            raise DataError(f"{self.path}: {name}", problem, SIDECAR_REMEDY)
        return spans

    def _map(self) -> ShardArrays:
        file = map_file(self.path, self.sidecar.shard_bytes, SIDECAR_REMEDY)
        raw = np.frombuffer(file, dtype=np.uint8)
        views = {}
        for name, location in self.sidecar.datasets.items():
            view = raw[location.offset : location.end].view(location.dtype)
            # HDF5 aligns only arrays of at least 64 bytes.
            views[name] = np.require(view, requirements="A")
            views[name].flags.writeable = False
        for name, into in (("offsets", "input_ids"), ("masked_lm_offsets", "masked_lm_ids")):
            first, last, total = views[name][0], views[name][-1], len(views[into])
            if first != 0 or last != total:
                problem = f"must start with 0 and end with {total}, not with {first} and {last}"
                raise DataError(f"{self.path}: {name}", problem, SIDECAR_REMEDY)
        return ShardArrays(**views)


class SampleReader:
    """A reader of a prepared set's samples by their ids (0 .. num_samples - 1), in any order.

    The constructor reads only sidecars. It raises DataError if a shard is missing, has the wrong
    size, or does not match the manifest.
    """

    def __init__(self, set_dir: Path, manifest: Manifest) -> None:
        self.set_dir = set_dir
        self.manifest = manifest
        self.shards = [Shard(set_dir / "shards" / entry.file) for entry in manifest.shards]
        for shard, entry in zip(self.shards, manifest.shards, strict=True):
            _check_entry(shard, entry.num_samples, entry.sha256, manifest)
        counts = [entry.num_samples for entry in manifest.shards]
        self._first_ids = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def sidecars(self) -> dict[str, Sidecar]:
        """Return the sidecar of each shard, with the shard's file name as key."""
        return {shard.path.name: shard.sidecar for shard in self.shards}

    def locate(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return the number of each sample's shard and its index in that shard, both int64 [n].

        Raises DataError if `ids` is empty, or if an id is out of range.
        """
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self.manifest.num_samples:
            problem = f"sample ids {ids.min(initial=0)} .. {ids.max(initial=-1)} do not exist"
            remedy = f"request ids in 0 .. {self.manifest.num_samples - 1}"
            raise DataError(str(self.set_dir), problem, remedy)
        numbers = np.searchsorted(self._first_ids, ids, side="right") - 1
        return numbers, ids - self._first_ids[numbers]

    def read(self, ids: IntArray) -> Samples:
        """Read the samples with the given ids, int64 [n], in the order of the ids.

        Raises DataError if an id is out of range, or if the contents of a shard contradict the
        manifest.
        """
        numbers, rows = self.locate(ids)
        samples = self._collect(numbers, rows)
        # Check all values here. Otherwise a value out of range would cause an illegal memory access
        # on a GPU much later.
        for name, is_wrong in _out_of_range(samples, self.manifest).items():
            if is_wrong.any():
                first = int(is_wrong.argmax())
                where = f"{self.shards[numbers[first]].path}: {name}"
                problem = f"sample {rows[first]} has a value that is out of range"
                raise DataError(where, problem, SIDECAR_REMEDY)
        return samples

    def _collect(self, numbers: IntArray, rows: IntArray) -> Samples:
        tokens, positions, labels = [], [], []
        starts_of_b, next_labels = [], []
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            shard = self.shards[number]
            arrays = shard.arrays()
            span = _span(shard, arrays.offsets, row, self.manifest.max_seq_length)
            masked = _span(shard, arrays.masked_lm_offsets, row, self.manifest.max_predictions)
            tokens.append(arrays.input_ids[span])
            positions.append(arrays.masked_lm_positions[masked])
            labels.append(arrays.masked_lm_ids[masked])
            starts_of_b.append(arrays.segment_b_start[row])
            next_labels.append(arrays.next_sentence_label[row])
        return Samples(
            input_ids=np.concatenate(tokens, dtype=np.int64),
            lengths=np.array([len(part) for part in tokens], dtype=np.int64),
            segment_b_start=np.array(starts_of_b, dtype=np.int64),
            masked_positions=np.concatenate(positions, dtype=np.int64),
            masked_ids=np.concatenate(labels, dtype=np.int64),
            masked_counts=np.array([len(part) for part in labels], dtype=np.int64),
            next_sentence_label=np.array(next_labels, dtype=np.int64),
        )


def _out_of_range(samples: Samples, manifest: Manifest) -> dict[str, NDArray[np.bool_]]:
    """Find samples with values outside their valid range.

    Returns a dictionary from the name of each array to a bool [n], which is True for samples with
    an invalid value.
    """
    lengths, counts = samples.lengths, samples.masked_counts
    vocab_size, starts_of_b = manifest.vocab_size, samples.segment_b_start
    return {
        "input_ids": _largest(samples.input_ids, lengths) >= vocab_size,
        "masked_lm_ids": _largest(samples.masked_ids, counts) >= vocab_size,
        "segment_b_start": (
            starts_of_b >= lengths if manifest.segments == "pair" else starts_of_b != lengths
        ),
        "masked_lm_positions": _largest(samples.masked_positions, counts) >= lengths,
        "next_sentence_label": samples.next_sentence_label > 1,
    }


def _largest(values: IntArray, counts: IntArray) -> IntArray:
    """Return the largest value of each sample, int64 [n]. Every sample has at least one value."""
    largest: IntArray = np.maximum.reduceat(values, np.cumsum(counts) - counts)
    return largest


def size_error(set_dir: Path) -> DataError:
    """Return the error for a sample whose size differs from the plan of its step."""
    problem = "the sizes of samples do not match the set's index"
    remedy = "check this set with `mlperf_bert verify --full`, and prepare it again"
    return DataError(str(set_dir), problem, remedy)


def _span(shard: Shard, offsets: IntArray, row: int, limit: int) -> slice:
    start, end = offsets[row : row + 2].tolist()
    # The end of the table was checked when it was mapped. The start must be checked, too, because
    # the entries of a damaged table may not be in ascending order.
    if not 0 <= start < end <= offsets[-1] or end - start > limit:
        problem = f"sample {row} has the invalid range {start} to {end}"
        raise DataError(str(shard.path), problem, SIDECAR_REMEDY)
    return slice(start, end)


def _check_entry(shard: Shard, num_samples: int, sha256: str, manifest: Manifest) -> None:
    sidecar = shard.sidecar
    pairs = {
        "num_samples": (sidecar.num_samples, num_samples),
        "shard_sha256": (sidecar.shard_sha256, sha256),
        "vocabulary_sha256": (sidecar.settings.vocabulary_sha256, manifest.vocabulary_sha256),
        "max_seq_length": (sidecar.settings.max_seq_length, manifest.max_seq_length),
        "max_predictions": (sidecar.settings.max_predictions, manifest.max_predictions),
    }
    for key, (in_sidecar, in_manifest) in pairs.items():
        if in_sidecar != in_manifest:
            problem = f"{in_sidecar} does not match the set's manifest, which has {in_manifest}"
            raise DataError(f"{shard.path}.json: {key}", problem, SIDECAR_REMEDY)

"""Read and write the index of a prepared set, and the sidecar of each of its shards.

`DIR/index/` contains `lengths.u16`, `masked_counts.u8`, `order_by_length.u32` (little endian, one
element per sample) and the manifest `dataset.json`. The manifest is written last, so a set without
a manifest is incomplete. It contains a digest of every other file of the set. Its last key is a
digest of the manifest itself.

Sets whose samples may have more than 255 masked positions have format version 3 and
`masked_counts.u16`. All other sets have version 2. Version 1 had no digests of the sidecars or of
the manifest itself. `prepare` replaces a manifest of version 1 and keeps the shards.

A sidecar is a JSON file next to a shard. It describes the shard's arrays, their offsets in the
file, and the text from which they were generated.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.errors import DataError
from mlperf_bert.files import (
    bare_name,
    check_version,
    file_digest,
    in_brief,
    make_directory,
    map_file,
    parse,
    read_json,
    reading,
    without_defaults,
    write_file,
    write_json,
)
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES, VocabularyFile

SHARD_FORMAT_VERSION = 1

# Kinds of example: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without a next sentence.
Segments = Literal["pair", "single"]
SEGMENTS: tuple[Segments, ...] = get_args(Segments)  # a file without this key means the first

SIDECAR_REMEDY = "prepare this shard again with `mlperf_bert prepare`"

# Dataset name -> allowed dtypes, little endian. Token ids have 16 bits if the vocabulary is small.
DATASET_DTYPES = (
    ("input_ids", ("<u2", "<u4")),
    ("offsets", ("<i8",)),
    ("segment_b_start", ("<u2",)),
    ("masked_lm_positions", ("<u2",)),
    ("masked_lm_ids", ("<u2", "<u4")),
    ("masked_lm_offsets", ("<i8",)),
    ("next_sentence_label", ("|u1",)),
)

REMEDY = (
    "delete index/dataset.json and run the same `mlperf_bert prepare` command again "
    "(finished shards are kept)"
)
MISSING_REMEDY = "create the set with `mlperf_bert prepare`, or pass an existing one's directory"

OWN_DIGEST = "manifest_sha256"  # digest of the manifest's JSON without this key

# The manifest omits keys that have these values.
_DEFAULTS = {"segments": SEGMENTS[0], "vocabulary_file": VOCABULARY_FILES[0]}

# Format version -> file name and dtype of each of the three arrays.
INDEX_ARRAYS = {
    2: (("lengths.u16", "<u2"), ("masked_counts.u8", "|u1"), ("order_by_length.u32", "<u4")),
    3: (("lengths.u16", "<u2"), ("masked_counts.u16", "<u2"), ("order_by_length.u32", "<u4")),
}
MaskedCounts = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class DatasetLocation:
    """The dtype, the number of elements and the offset in bytes of an array in a shard."""

    dtype: str
    count: int
    offset: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the array, in bytes."""
        return self.offset + self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """Settings that, together with the text, determine the examples of a shard.

    `prepare` compares these settings to find out whether it can keep an existing shard.
    """

    vocabulary_sha256: str = ""  # empty until the vocabulary is known
    max_seq_length: int
    max_predictions: int
    seed: int
    dupe_factor: int
    pick_eval: int | None = None
    segments: Segments = "pair"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """The contents of a sidecar, which is sufficient for training to map a shard without HDF5.

    `examples_sha256` is a digest of the arrays without the rest of the shard file, so that results
    of two machines can be compared.
    """

    shard_bytes: int
    shard_sha256: str
    num_samples: int
    source_name: str
    source_sha256: str
    settings: ShardSettings
    datasets: dict[str, DatasetLocation]
    examples_sha256: str

    def to_json(self) -> bytes:
        """Return the contents of the sidecar file as JSON."""
        values = {"format_version": SHARD_FORMAT_VERSION, **asdict(self)}
        values["settings"] = without_defaults(values["settings"], {"segments": SEGMENTS[0]})
        return write_json(values)


def examples_digest(sidecars: Iterable[Sidecar]) -> str:
    """Combine the digests of the shards' examples, in order, into one digest."""
    digests = "\n".join(sidecar.examples_sha256 for sidecar in sidecars)
    return hashlib.sha256(digests.encode()).hexdigest()


def sidecar_path(shard_path: Path) -> Path:
    """Return the path of a shard's sidecar, which is `<shard>.json` next to the shard."""
    return shard_path.with_name(shard_path.name + ".json")


def read_sidecar(shard_path: Path) -> Sidecar:
    """Parse and check the sidecar of `shard_path` without opening the shard itself.

    Raises DataError if a key is missing or has a wrong value, or if the arrays do not fit into the
    file.
    """
    path = sidecar_path(shard_path)
    missing = "the shard's sidecar is missing"
    values = read_json(path, missing=missing, remedy=SIDECAR_REMEDY)
    with reading(path, SIDECAR_REMEDY):
        check_version(values, SHARD_FORMAT_VERSION)
        sidecar = parse(
            Sidecar,
            values,
            settings=parse(ShardSettings, values["settings"]),
            datasets={
                name: parse(DatasetLocation, values["datasets"][name]) for name, _ in DATASET_DTYPES
            },
        )
        _check_arrays(sidecar)
    return sidecar


def _check_arrays(sidecar: Sidecar) -> None:
    """Raise ValueError if the sidecar's arrays contradict each other or the size of the shard."""
    count = {name: location.count for name, location in sidecar.datasets.items()}
    expected = {
        "offsets": sidecar.num_samples + 1,
        "segment_b_start": sidecar.num_samples,
        "masked_lm_offsets": sidecar.num_samples + 1,
        "next_sentence_label": sidecar.num_samples,
        "masked_lm_ids": count["masked_lm_positions"],
    }
    for name, wanted in expected.items():
        if count[name] != wanted:
            raise ValueError(f"{name} has {count[name]} elements instead of {wanted}")
    for name, dtypes in DATASET_DTYPES:
        location = sidecar.datasets[name]
        if location.dtype not in dtypes:
            allowed = " or ".join(dtypes)
            raise ValueError(f"{name} must have dtype {allowed}, not {in_brief(location.dtype)}")
        if location.end > sidecar.shard_bytes:
            raise ValueError(
                f"{name} ends at byte {location.end}, but the shard has {sidecar.shard_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The manifest's entry for a shard, with its file name, number of samples, and digests.

    The file name is relative to `shards/`. One digest is that of the shard, and the other is that
    of its sidecar.
    """

    file: str
    num_samples: int
    sha256: str
    sidecar_sha256: str

    @classmethod
    def of(cls, shard_path: Path) -> Self:
        """Create the manifest's entry for a finished shard.

        Raises DataError if the shard's sidecar is missing or invalid.
        """
        sidecar = read_sidecar(shard_path)
        digest = file_digest(sidecar_path(shard_path), REMEDY)
        return cls(shard_path.name, sidecar.num_samples, sidecar.shard_sha256, digest)


@dataclass(frozen=True, slots=True)
class IndexFile:
    """The file name in `index/`, the size in bytes and the digest of an array file of the index."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Accuracy of the context-free baseline on a set's masked positions (prepare/build.py)."""

    context_free_accuracy: float
    mask_only_accuracy: float
    masked_tokens: int
    mask_inputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The manifest `index/dataset.json`, which describes the contents and settings of a set.

    Sample ids number the samples of all shards consecutively, in the order of `shards`.
    `length_histogram[k]` is the number of samples with k tokens, k = 0 .. max_seq_length.
    """

    num_samples: int
    vocab_size: int
    vocabulary_sha256: str
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    max_seq_length: int
    max_predictions: int
    seed: int
    dupe_factor: int
    shards: tuple[ShardEntry, ...]
    length_histogram: tuple[int, ...] = ()
    index_files: tuple[IndexFile, ...] = ()
    baseline: Baseline | None = None
    corpus: dict[str, str] | None = None
    segments: Segments = "pair"
    vocabulary_file: VocabularyFile = "vocab.txt"

    @classmethod
    def load(cls, set_dir: Path) -> Self:
        """Read the manifest `set_dir/index/dataset.json`.

        Raises DataError if the file is missing, or if it was changed after its preparation.
        """
        path = set_dir / "index" / "dataset.json"
        missing = f"no such file, so {set_dir} is not a prepared set"
        remedy = REMEDY if os.path.exists(path) else MISSING_REMEDY
        values = read_json(path, missing=missing, remedy=remedy)
        with reading(path, remedy):
            check_version(values, *INDEX_ARRAYS)
            rest = {key: value for key, value in values.items() if key != OWN_DIGEST}
            if values[OWN_DIGEST] != _digest_of(rest):
                raise ValueError(
                    f"{OWN_DIGEST} does not match the contents, so the file was changed"
                )
            for entry in (*values["shards"], *values["index_files"]):
                bare_name(entry["file"])
            for key, known in (("vocabulary_file", VOCABULARY_FILES), ("segments", SEGMENTS)):
                if values.get(key, known[0]) not in known:
                    allowed = " or ".join(known)
                    raise ValueError(f"{key} must be {allowed}, not {in_brief(values[key])}")
            baseline = values.get("baseline")
            return parse(
                cls,
                values,
                shards=tuple(parse(ShardEntry, entry) for entry in values["shards"]),
                length_histogram=tuple(values["length_histogram"]),
                index_files=tuple(parse(IndexFile, item) for item in values["index_files"]),
                baseline=baseline and parse(Baseline, baseline),
            )

    @property
    def format_version(self) -> int:
        """Format version of the set, which depends on the largest number of masked positions."""
        return 2 if self.max_predictions <= 255 else 3

    @property
    def index_arrays(self) -> tuple[tuple[str, str], ...]:
        """File name and dtype of each of the three arrays of the index."""
        return INDEX_ARRAYS[self.format_version]

    def to_json(self) -> bytes:
        """Return the contents of the manifest file as JSON."""
        values = {"format_version": self.format_version, **asdict(self)}
        values = without_defaults(values, _DEFAULTS)
        return write_json({**values, OWN_DIGEST: _digest_of(values)})


@dataclass(frozen=True, slots=True)
class LengthIndex:
    """The index of a set of N samples. All ranks of a node share one read-only memory map."""

    manifest: Manifest
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: MaskedCounts  # [N]
    order_by_length: NDArray[np.uint32]  # [N]: sample ids by ascending length, then by id

    @classmethod
    def open(cls, set_dir: Path) -> Self:
        """Map the index of a prepared set into memory.

        Raises DataError if a file is missing or truncated.
        """
        manifest = Manifest.load(set_dir)
        arrays = []
        for name, dtype in manifest.index_arrays:
            size = manifest.num_samples * np.dtype(dtype).itemsize
            mapped = map_file(set_dir / "index" / name, size, REMEDY)
            arrays.append(np.frombuffer(mapped, dtype))
        return cls(manifest, *arrays)


def manifest_sha256(set_dir: Path) -> str:
    """Compute the digest of the manifest file. Raises DataError if the file cannot be read."""
    path = set_dir / "index" / "dataset.json"
    return file_digest(path, REMEDY if path.exists() else MISSING_REMEDY)


def sets_sha256(*set_dirs: Path) -> str:
    """Combine the digests of the manifests of several sets into one digest.

    Raises DataError if a manifest cannot be read.
    """
    return hashlib.sha256(" ".join(map(manifest_sha256, set_dirs)).encode()).hexdigest()


def write_index(
    set_dir: Path,
    manifest: Manifest,
    lengths: NDArray[np.uint16],
    masked_counts: MaskedCounts,
) -> Manifest:
    """Write the arrays of the index and then the manifest, which marks the set as complete.

    `lengths` and `masked_counts` are [N]. Returns the manifest with `length_histogram` and
    `index_files` filled in. Raises DataError if a file cannot be written, or if the set has too
    many samples for 32-bit ids.
    """
    num_samples = manifest.num_samples
    if not len(lengths) == len(masked_counts) == num_samples <= 2**32:
        problem = f"got {len(lengths)} lengths and {len(masked_counts)} masked counts"
        raise DataError(str(set_dir), problem, f"pass {num_samples} of each, at most 2**32")
    index_dir = set_dir / "index"
    make_directory(index_dir)
    # Remove the manifest first, so that no manifest is left if a crash leaves old and new arrays.
    (index_dir / "dataset.json").unlink(missing_ok=True)
    order = np.argsort(lengths, kind="stable")
    arrays: tuple[NDArray[Any], ...] = (lengths, masked_counts, order)
    files = []
    for (name, dtype), values in zip(manifest.index_arrays, arrays, strict=True):
        contents = values.astype(dtype).tobytes()
        write_file(index_dir / name, contents)
        files.append(IndexFile(name, len(contents), hashlib.sha256(contents).hexdigest()))
    histogram = np.bincount(lengths, minlength=manifest.max_seq_length + 1)
    complete = replace(
        manifest, length_histogram=tuple(histogram.tolist()), index_files=tuple(files)
    )
    write_file(index_dir / "dataset.json", complete.to_json())
    return complete


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(write_json(values)).hexdigest()


def masked_count_table(
    max_seq_length: int, max_predictions: int, rate: float
) -> NDArray[np.uint16]:
    """Return the number of masked positions for each length, uint16 [max_seq_length + 1].

    The formula is the MLPerf reference's: min(max_predictions, max(1, round(rate * length))). The
    length includes special tokens, and round() rounds half to even. With this table, every rank
    computes the number of masked positions of all other ranks without communication and without
    reading samples.
    """
    counts = [
        min(max_predictions, max(1, round(rate * length))) for length in range(max_seq_length + 1)
    ]
    return np.array(counts, dtype=np.uint16)


class CountsByLength:
    """The number of masked positions of each sample, computed from its length on access."""

    def __init__(self, lengths: NDArray[np.uint16], table: NDArray[np.uint16]) -> None:
        """Prepare to look up the masked counts of samples by their length.

        `lengths` is [N] and may be a memory map. `table` is the result of `masked_count_table`.
        """
        self._lengths = lengths
        self._table = table

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the number of masked positions of the samples `ids` [n], uint16 [n]."""
        counts: NDArray[np.uint16] = self._table[self._lengths[ids]]
        return counts


def special_ids(manifest: Manifest) -> NDArray[np.int64]:
    """Return the distinct ids of special tokens in ascending order, int64.

    Special tokens represent no text, so they are never masked or inserted. [UNK] is not among them,
    because it represents text that the vocabulary lacks. The original BERT also treats [UNK] as an
    ordinary token.
    """
    ids = (manifest.pad_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    return np.unique(np.array(ids, dtype=np.int64))

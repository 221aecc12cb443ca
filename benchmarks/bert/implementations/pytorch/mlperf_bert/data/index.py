"""The index of a prepared set: manifest, lengths, masked counts and order by length.

`DIR/index/` holds `lengths.u16`, `masked_counts.u8`, `order_by_length.u32` (little endian, one
element a sample) and `dataset.json`, the manifest, written last: a set without it is incomplete.
The manifest holds a digest of every other file of the set and, as its last key, of itself. Version
1 had no digests of sidecars and of itself; `prepare` writes it anew and keeps the shards.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import Record, read_record, without_defaults, write_json
from mlperf_bert.common.untrusted import MAX_JSON_BYTES, read_regular_file
from mlperf_bert.data.file_checks import map_file
from mlperf_bert.data.sidecar import SEGMENTS, Segments, read_sidecar, sidecar_path

INDEX_FORMAT_VERSION = 2
REMEDY = "delete index/dataset.json and run the same `mlperf_bert prepare` again: shards are kept"
MISSING_REMEDY = "make the set with `mlperf_bert prepare`, or give its directory"

OWN_DIGEST = "manifest_sha256"  # of the manifest's JSON without this key

# What holds the vocabulary of a set: word pieces, or a tokenizer as `tokenizers` saves it.
VocabularyFile = Literal["vocab.txt", "tokenizer.json"]
VOCABULARY_FILES: tuple[VocabularyFile, ...] = ("vocab.txt", "tokenizer.json")
# Keys of the manifest that are left out where they have these values.
_DEFAULTS = {"segments": SEGMENTS[0], "vocabulary_file": VOCABULARY_FILES[0]}

# File name -> dtype of the three arrays.
INDEX_ARRAYS = (("lengths.u16", "<u2"), ("masked_counts.u8", "|u1"), ("order_by_length.u32", "<u4"))


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard of the set: bare file name under `shards/`, samples, digests of both its files."""

    file: str
    num_samples: int
    sha256: str
    sidecar_sha256: str

    @classmethod
    def of(cls, shard_path: Path) -> Self:
        """The entry of a finished shard, from its sidecar. Raises DataError when that is wrong."""
        sidecar = read_sidecar(shard_path)
        path = sidecar_path(shard_path)
        try:
            digest = hashlib.sha256(read_regular_file(path, MAX_JSON_BYTES)).hexdigest()
        except OSError as error:
            raise DataError(str(path), error.strerror or "cannot be read", REMEDY) from None
        return cls(shard_path.name, sidecar.num_samples, sidecar.shard_sha256, digest)


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One array file of the index: bare file name under `index/`, bytes, digest."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a model without context reaches on the set's masked positions; see prepare/build."""

    context_free_accuracy: float
    mask_only_accuracy: float
    masked_tokens: int
    mask_inputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`index/dataset.json`: what the set holds and what it was made with.

    Sample ids run over the shards in the order of `shards`. `length_histogram[k]` counts the
    samples of k tokens, k = 0 .. max_seq_length.
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
        """Parse `set_dir/index/dataset.json`. Raises DataError naming the file and the key."""
        path = set_dir / "index" / "dataset.json"
        missing = f"is missing, so {set_dir} is not a prepared set"
        remedy = REMEDY if os.path.exists(path) else MISSING_REMEDY
        record = read_record(path, missing=missing, remedy=remedy)
        record.check_version(INDEX_FORMAT_VERSION)
        vocab_size = record.integer("vocab_size", low=6, high=2**31 - 1)
        names = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
        manifest = cls(
            num_samples=record.integer("num_samples", low=1, high=2**32),
            vocab_size=vocab_size,
            vocabulary_sha256=record.text("vocabulary_sha256"),
            **{name: record.integer(name, high=vocab_size - 1) for name in names},
            max_seq_length=record.integer("max_seq_length", low=1, high=65_535),
            max_predictions=record.integer("max_predictions", low=1, high=255),
            seed=record.integer("seed"),
            dupe_factor=record.integer("dupe_factor", low=1),
            shards=tuple(_parse_shard(entry) for entry in record.records("shards")),
            length_histogram=record.integers("length_histogram"),
            index_files=tuple(_parse_index_file(item) for item in record.records("index_files")),
            baseline=_parse_baseline(record),
            corpus=_parse_corpus(record),
            segments=record.choice("segments", SEGMENTS),
            vocabulary_file=record.choice("vocabulary_file", VOCABULARY_FILES),
        )
        _check_manifest(record, manifest)
        return manifest

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {"format_version": INDEX_FORMAT_VERSION, **asdict(self)}
        values = without_defaults(values, _DEFAULTS)
        return write_json({**values, OWN_DIGEST: _digest_of(values)})


@dataclass(frozen=True, slots=True)
class LengthIndex:
    """The mapped index: N samples; the arrays are read-only and shared by the ranks of a node."""

    manifest: Manifest
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: NDArray[np.uint8]  # [N]
    order_by_length: NDArray[np.uint32]  # [N]: sample ids by length, ties by id

    @classmethod
    def open(cls, set_dir: Path) -> Self:
        """Map the index of a prepared set. Raises DataError when a file is missing or cut short."""
        manifest = Manifest.load(set_dir)
        arrays = []
        for name, dtype in INDEX_ARRAYS:
            size = manifest.num_samples * np.dtype(dtype).itemsize
            mapped = map_file(set_dir / "index" / name, size, REMEDY)
            arrays.append(np.frombuffer(mapped, dtype))
        return cls(manifest, *arrays)


def write_index(
    set_dir: Path,
    manifest: Manifest,
    lengths: NDArray[np.uint16],
    masked_counts: NDArray[np.uint8],
) -> Manifest:
    """Write the three arrays, then the manifest that completes the set.

    Args:
        set_dir: the prepared set; `index/` is created.
        manifest: `length_histogram` and `index_files` are filled in here.
        lengths: uint16 [N], tokens of every sample.
        masked_counts: uint8 [N], masked positions of every sample.

    Returns:
        The manifest as written.

    Raises:
        DataError: a file cannot be written, or there are more samples than 32 bits can number.
    """
    num_samples = manifest.num_samples
    if not len(lengths) == len(masked_counts) == num_samples <= 2**32:
        problem = f"has {len(lengths)} lengths and {len(masked_counts)} masked counts"
        raise DataError(str(set_dir), problem, f"give {num_samples} of each, at most 2**32")
    index_dir = set_dir / "index"
    make_directory(index_dir)
    # First, so that a crash between two arrays cannot leave a manifest over a mixture.
    (index_dir / "dataset.json").unlink(missing_ok=True)
    order = np.argsort(lengths, kind="stable")
    arrays: tuple[NDArray[Any], ...] = (lengths, masked_counts, order)
    files = []
    for (name, dtype), values in zip(INDEX_ARRAYS, arrays, strict=True):
        contents = values.astype(dtype).tobytes()
        write_file(index_dir / name, contents)
        files.append(IndexFile(name, len(contents), hashlib.sha256(contents).hexdigest()))
    histogram = np.bincount(lengths, minlength=manifest.max_seq_length + 1)
    complete = replace(
        manifest, length_histogram=tuple(histogram.tolist()), index_files=tuple(files)
    )
    write_file(index_dir / "dataset.json", complete.to_json())
    return complete


def _parse_shard(entry: Record) -> ShardEntry:
    return ShardEntry(
        entry.file_name("file"),
        entry.integer("num_samples", low=1),
        entry.text("sha256"),
        entry.text("sidecar_sha256"),
    )


def _parse_index_file(entry: Record) -> IndexFile:
    return IndexFile(entry.file_name("file"), entry.integer("size_bytes"), entry.text("sha256"))


def _parse_baseline(record: Record) -> Baseline | None:
    if not record.has("baseline"):
        return None
    entry = record.record("baseline")
    return Baseline(
        context_free_accuracy=entry.number("context_free_accuracy"),
        mask_only_accuracy=entry.number("mask_only_accuracy"),
        masked_tokens=entry.integer("masked_tokens"),
        mask_inputs=entry.integer("mask_inputs"),
    )


def _parse_corpus(record: Record) -> dict[str, str] | None:
    if not record.has("corpus"):
        return None
    entry = record.record("corpus")
    return {key: entry.text(key) for key in entry.values}


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(write_json(values)).hexdigest()


def _check_manifest(record: Record, manifest: Manifest) -> None:
    if len({entry.file for entry in manifest.shards}) != len(manifest.shards):
        raise record.error("shards", "lists a shard twice")
    in_shards = sum(entry.num_samples for entry in manifest.shards)
    if in_shards != manifest.num_samples:
        raise record.error("num_samples", f"is {manifest.num_samples}, the shards hold {in_shards}")
    histogram = manifest.length_histogram
    if len(histogram) != manifest.max_seq_length + 1 or sum(histogram) != manifest.num_samples:
        raise record.error("length_histogram", "does not count every sample once")
    sizes = {entry.file: entry.size_bytes for entry in manifest.index_files}
    for name, dtype in INDEX_ARRAYS:
        if sizes.get(name) != manifest.num_samples * np.dtype(dtype).itemsize:
            raise record.error("index_files", f"does not list {name} with its right size")
    # Last, as the checks above say what is wrong: this one finds what they cannot see.
    values = {key: value for key, value in record.values.items() if key != OWN_DIGEST}
    try:
        digest = _digest_of(values)
    except RecursionError:  # writing gives up before reading does
        problem = "cannot be checked: the file is nested too deeply"
        raise record.error(OWN_DIGEST, problem) from None
    if record.text(OWN_DIGEST) != digest:
        raise record.error(OWN_DIGEST, "is not that of the contents, so the file was changed")

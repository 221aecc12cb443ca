"""Index of a prepared set: manifest, lengths, order by length, and each shard's sidecar.

`DIR/index/` holds `lengths.u16`, `masked_counts.u8`, `order_by_length.u32` (little endian, one
element a sample) and `dataset.json`, the manifest, written last: a set without it is incomplete.
The manifest holds a digest of every other file of the set and, as its last key, of itself. A set
whose samples may have more than 255 masked positions has version 3, with `masked_counts.u16`; all
others have version 2, as ever. Version 1 had no digests of sidecars and of itself; `prepare` writes
it anew and keeps the shards.

A sidecar describes its shard's contents, their places in the file, and their source.
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
SEGMENTS: tuple[Segments, ...] = get_args(Segments)  # the first is the default of a file

SIDECAR_REMEDY = "prepare this shard again with `mlperf_bert prepare`"

# Dataset name -> dtypes it may have, little endian. Token ids are 16 bits wide where they fit.
DATASET_DTYPES = (
    ("input_ids", ("<u2", "<u4")),
    ("offsets", ("<i8",)),
    ("segment_b_start", ("<u2",)),
    ("masked_lm_positions", ("<u2",)),
    ("masked_lm_ids", ("<u2", "<u4")),
    ("masked_lm_offsets", ("<i8",)),
    ("next_sentence_label", ("|u1",)),
)

REMEDY = "delete index/dataset.json and run the same `mlperf_bert prepare` again: shards are kept"
MISSING_REMEDY = "make the set with `mlperf_bert prepare`, or give its directory"

OWN_DIGEST = "manifest_sha256"  # digest of the manifest's JSON without this key

# Keys that the manifest leaves out at these values.
_DEFAULTS = {"segments": SEGMENTS[0], "vocabulary_file": VOCABULARY_FILES[0]}

# Format version -> file name and dtype of each of the three arrays.
INDEX_ARRAYS = {
    2: (("lengths.u16", "<u2"), ("masked_counts.u8", "|u1"), ("order_by_length.u32", "<u4")),
    3: (("lengths.u16", "<u2"), ("masked_counts.u16", "<u2"), ("order_by_length.u32", "<u4")),
}
MaskedCounts = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class DatasetLocation:
    """One contiguous array inside the shard: numpy dtype, elements, offset in bytes."""

    dtype: str
    count: int
    offset: int

    @property
    def end(self) -> int:
        """The first byte after the array."""
        return self.offset + self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSettings:
    """Settings that decide a shard's examples besides its text; compared at a restart."""

    vocabulary_sha256: str = ""  # empty until the vocabulary is known
    max_seq_length: int
    max_predictions: int
    seed: int
    dupe_factor: int
    split_sentences: bool = False
    pick_eval: int | None = None
    segments: Segments = "pair"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """Everything training needs to map a shard without opening HDF5.

    `examples_sha256` is the digest of the arrays alone, independent of the file around them, so
    that two machines can compare their results. Older shards have none.
    """

    shard_bytes: int
    shard_sha256: str
    num_samples: int
    source_name: str
    source_sha256: str
    settings: ShardSettings
    datasets: dict[str, DatasetLocation]
    examples_sha256: str | None = None

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {"format_version": SHARD_FORMAT_VERSION, **asdict(self)}
        values["settings"] = without_defaults(values["settings"], {"segments": SEGMENTS[0]})
        return write_json(without_defaults(values, {"examples_sha256": None}))


def examples_digest(sidecars: Iterable[Sidecar]) -> str | None:
    """The digest of all examples of shards, in their order; None if one of them has none."""
    digests = [sidecar.examples_sha256 for sidecar in sidecars]
    known = [digest for digest in digests if digest is not None]
    if len(known) < len(digests):
        return None
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


def sidecar_path(shard_path: Path) -> Path:
    """`<shard>.json` beside the shard."""
    return shard_path.with_name(shard_path.name + ".json")


def read_sidecar(shard_path: Path) -> Sidecar:
    """Parse and check the sidecar of `shard_path`; the shard itself is not touched.

    Raises DataError if a key is missing or wrong, or if the arrays do not fit into the file.
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
    """Raise ValueError unless the arrays fit each other and the shard."""
    count = {name: place.count for name, place in sidecar.datasets.items()}
    expected = {
        "offsets": sidecar.num_samples + 1,
        "segment_b_start": sidecar.num_samples,
        "masked_lm_offsets": sidecar.num_samples + 1,
        "next_sentence_label": sidecar.num_samples,
        "masked_lm_ids": count["masked_lm_positions"],
    }
    for name, wanted in expected.items():
        if count[name] != wanted:
            raise ValueError(f"{name} has {count[name]} elements where {wanted} belong")
    for name, dtypes in DATASET_DTYPES:
        place = sidecar.datasets[name]
        if place.dtype not in dtypes:
            raise ValueError(f"{name} is {in_brief(place.dtype)}, not {' or '.join(dtypes)}")
        if place.end > sidecar.shard_bytes:
            raise ValueError(f"{name} ends at byte {place.end} of a shard of {sidecar.shard_bytes}")


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
        digest = file_digest(sidecar_path(shard_path), REMEDY)
        return cls(shard_path.name, sidecar.num_samples, sidecar.shard_sha256, digest)


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One array file of the index: bare file name under `index/`, bytes, digest."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The accuracy of a model without context on the set's masked positions; see prepare/build."""

    context_free_accuracy: float
    mask_only_accuracy: float
    masked_tokens: int
    mask_inputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`index/dataset.json`: the contents of the set and the settings that made it.

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
        """Parse `set_dir/index/dataset.json`. Raises DataError if it is not as it was written."""
        path = set_dir / "index" / "dataset.json"
        missing = f"is missing, so {set_dir} is not a prepared set"
        remedy = REMEDY if os.path.exists(path) else MISSING_REMEDY
        values = read_json(path, missing=missing, remedy=remedy)
        with reading(path, remedy):
            check_version(values, *INDEX_ARRAYS)
            rest = {key: value for key, value in values.items() if key != OWN_DIGEST}
            if values[OWN_DIGEST] != _digest_of(rest):
                raise ValueError(
                    f"{OWN_DIGEST} is not that of the contents, so the file was changed"
                )
            for entry in (*values["shards"], *values["index_files"]):
                bare_name(entry["file"])
            for key, known in (("vocabulary_file", VOCABULARY_FILES), ("segments", SEGMENTS)):
                if values.get(key, known[0]) not in known:
                    raise ValueError(f"{key} is {in_brief(values[key])}, not {' or '.join(known)}")
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
        """The version in which a set of so many masked positions is written."""
        return 2 if self.max_predictions <= 255 else 3

    @property
    def index_arrays(self) -> tuple[tuple[str, str], ...]:
        """File name and dtype of each of the three arrays of the index."""
        return INDEX_ARRAYS[self.format_version]

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {"format_version": self.format_version, **asdict(self)}
        values = without_defaults(values, _DEFAULTS)
        return write_json({**values, OWN_DIGEST: _digest_of(values)})


@dataclass(frozen=True, slots=True)
class LengthIndex:
    """The mapped index: N samples; the arrays are read-only and shared by the ranks of a node."""

    manifest: Manifest
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: MaskedCounts  # [N]
    order_by_length: NDArray[np.uint32]  # [N]: sample ids by length, ties by id

    @classmethod
    def open(cls, set_dir: Path) -> Self:
        """Map the index of a prepared set. Raises DataError when a file is missing or cut short."""
        manifest = Manifest.load(set_dir)
        arrays = []
        for name, dtype in manifest.index_arrays:
            size = manifest.num_samples * np.dtype(dtype).itemsize
            mapped = map_file(set_dir / "index" / name, size, REMEDY)
            arrays.append(np.frombuffer(mapped, dtype))
        return cls(manifest, *arrays)


def manifest_sha256(set_dir: Path) -> str:
    """Digest of the manifest file. Raises DataError when it cannot be read."""
    return file_digest(set_dir / "index" / "dataset.json", REMEDY)


def sets_sha256(*set_dirs: Path) -> str:
    """Digest of several sets, by their manifests. Raises DataError when one cannot be read."""
    return hashlib.sha256(" ".join(map(manifest_sha256, set_dirs)).encode()).hexdigest()


def write_index(
    set_dir: Path,
    manifest: Manifest,
    lengths: NDArray[np.uint16],
    masked_counts: MaskedCounts,
) -> Manifest:
    """Write the arrays by sample, both [N], then the manifest that completes the set; return it.

    `length_histogram` and `index_files` are filled in here. Raises DataError if a file cannot be
    written, or there are more samples than 32 bits can number.
    """
    num_samples = manifest.num_samples
    if not len(lengths) == len(masked_counts) == num_samples <= 2**32:
        problem = f"has {len(lengths)} lengths and {len(masked_counts)} masked counts"
        raise DataError(str(set_dir), problem, f"give {num_samples} of each, at most 2**32")
    index_dir = set_dir / "index"
    make_directory(index_dir)
    # Remove it first, so that a crash between two arrays cannot leave a manifest over a mixture.
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
    """Masked positions by length, uint16 [max_seq_length + 1]: the MLPerf reference's formula.

    min(max_predictions, max(1, round(rate * length))), where length counts special tokens and
    round() is half to even. So every rank knows the masked positions of all others without reading
    a sample or communicating.
    """
    counts = [
        min(max_predictions, max(1, round(rate * length))) for length in range(max_seq_length + 1)
    ]
    return np.array(counts, dtype=np.uint16)


class CountsByLength:
    """The masked counts of an index, computed on access."""

    def __init__(self, lengths: NDArray[np.uint16], table: NDArray[np.uint16]) -> None:
        """Look up `lengths` [N], which may be a memory map, in `table`, which is by length."""
        self._lengths = lengths
        self._table = table

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Masked positions of some samples, uint16 [n]."""
        counts: NDArray[np.uint16] = self._table[self._lengths[ids]]
        return counts


def special_ids(manifest: Manifest) -> NDArray[np.int64]:
    """Ids that stand for no text, int64, ascending, each once: never masked, never inserted.

    [UNK] stands for text that the vocabulary lacks, so it counts as an ordinary token, as in BERT.
    """
    ids = (manifest.pad_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    return np.unique(np.array(ids, dtype=np.int64))

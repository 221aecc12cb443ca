"""What a prepared set says of itself: manifest, lengths, order by length, and each shard's sidecar.

`DIR/index/` holds `lengths.u16`, `masked_counts.u8`, `order_by_length.u32` (little endian, one
element a sample) and `dataset.json`, the manifest, written last: a set without it is incomplete.
The manifest holds a digest of every other file of the set and, as its last key, of itself. Version
1 had no digests of sidecars and of itself; `prepare` writes it anew and keeps the shards.

A sidecar says what its shard holds, where in the file, and what it was made from.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import Record, read_record, without_defaults, write_json
from mlperf_bert.common.untrusted import MAX_JSON_BYTES, in_brief, map_file, read_regular_file
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES, VocabularyFile

SHARD_FORMAT_VERSION = 1

# What an example is: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] and nothing to say of a next sentence.
Segments = Literal["pair", "single"]
SEGMENTS: tuple[Segments, ...] = ("pair", "single")  # the first where a file does not say

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

INDEX_FORMAT_VERSION = 2
REMEDY = "delete index/dataset.json and run the same `mlperf_bert prepare` again: shards are kept"
MISSING_REMEDY = "make the set with `mlperf_bert prepare`, or give its directory"

OWN_DIGEST = "manifest_sha256"  # of the manifest's JSON without this key

# Keys of the manifest that are left out where they have these values.
_DEFAULTS = {"segments": SEGMENTS[0], "vocabulary_file": VOCABULARY_FILES[0]}

# File name -> dtype of the three arrays.
INDEX_ARRAYS = (("lengths.u16", "<u2"), ("masked_counts.u8", "|u1"), ("order_by_length.u32", "<u4"))


@dataclass(frozen=True, slots=True)
class DatasetPlace:
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
    """What decides the examples of a shard besides its text; compared when a run is restarted."""

    vocabulary_sha256: str = ""  # until the vocabulary is known
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

    `examples_sha256` is the digest of the arrays alone, which the file around them does not change:
    by it two machines can compare what they made. Shards of before have none.
    """

    shard_bytes: int
    shard_sha256: str
    num_samples: int
    source_name: str
    source_sha256: str
    settings: ShardSettings
    datasets: dict[str, DatasetPlace]
    examples_sha256: str | None = None

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {"format_version": SHARD_FORMAT_VERSION, **asdict(self)}
        values["settings"] = without_defaults(values["settings"], {"segments": SEGMENTS[0]})
        return write_json(without_defaults(values, {"examples_sha256": None}))


def examples_digest(sidecars: Iterable[Sidecar]) -> str | None:
    """The digest of all examples of shards, in their order; None where one of them has none."""
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

    Raises DataError where a key is missing or wrong, or where the arrays do not fit into the file.
    """
    path = sidecar_path(shard_path)
    record = read_record(path, missing="the shard's sidecar is missing", remedy=SIDECAR_REMEDY)
    record.check_version(SHARD_FORMAT_VERSION)
    sidecar = Sidecar(
        shard_bytes=record.integer("shard_bytes", low=1),
        shard_sha256=record.text("shard_sha256"),
        num_samples=record.integer("num_samples", low=1),
        source_name=record.text("source_name"),
        source_sha256=record.text("source_sha256"),
        settings=_parse_settings(record.record("settings")),
        datasets=_parse_datasets(record.record("datasets")),
        examples_sha256=record.text("examples_sha256") if record.has("examples_sha256") else None,
    )
    _check_counts(path, sidecar)
    return sidecar


def _parse_settings(record: Record) -> ShardSettings:
    return ShardSettings(
        vocabulary_sha256=record.text("vocabulary_sha256"),
        max_seq_length=record.integer("max_seq_length", low=1, high=65_535),
        max_predictions=record.integer("max_predictions", low=1, high=255),
        seed=record.integer("seed"),
        dupe_factor=record.integer("dupe_factor", low=1),
        split_sentences=record.flag("split_sentences"),
        pick_eval=record.optional_integer("pick_eval", low=1),
        segments=record.choice("segments", SEGMENTS),
    )


def _parse_datasets(record: Record) -> dict[str, DatasetPlace]:
    places = {}
    for name, dtypes in DATASET_DTYPES:
        entry = record.record(name)
        dtype = entry.text("dtype")
        if dtype not in dtypes:
            raise entry.error("dtype", f"is {in_brief(dtype)}, not {' or '.join(dtypes)}")
        # The limit keeps count * itemsize far below where an int64 offset would wrap around.
        places[name] = DatasetPlace(
            dtype, entry.integer("count", low=1, high=2**48), entry.integer("offset", high=2**48)
        )
    return places


def _check_counts(path: Path, sidecar: Sidecar) -> None:
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
            problem = f"has {count[name]} elements where {wanted} belong"
            raise DataError(f"{path}: {name}", problem, SIDECAR_REMEDY)
    for name, place in sidecar.datasets.items():
        if place.end > sidecar.shard_bytes:
            problem = f"ends at byte {place.end} of a shard of {sidecar.shard_bytes}"
            raise DataError(f"{path}: {name}", problem, SIDECAR_REMEDY)


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


def masked_count_table(max_seq_length: int, max_predictions: int, rate: float) -> NDArray[np.uint8]:
    """Masked positions by length, uint8 [max_seq_length + 1]: the MLPerf reference's formula.

    min(max_predictions, max(1, round(rate * length))), where length counts special tokens and
    round() is half to even. `max_predictions` is 255 at most. So every rank knows the masked
    positions of all others without reading a sample or asking.
    """
    counts = [
        min(max_predictions, max(1, round(rate * length))) for length in range(max_seq_length + 1)
    ]
    return np.array(counts, dtype=np.uint8)


class CountsByLength:
    """What an index holds as masked counts, computed where it is asked for."""

    def __init__(self, lengths: NDArray[np.uint16], table: NDArray[np.uint8]) -> None:
        """Of samples with `lengths` [N], which may be a memory map; `table` is by length."""
        self._lengths = lengths
        self._table = table

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Masked positions of some samples, uint8 [n]."""
        counts: NDArray[np.uint8] = self._table[self._lengths[ids]]
        return counts


def special_ids(manifest: Manifest) -> NDArray[np.int64]:
    """Ids that stand for no text, int64, ascending, each once: never masked, nor put in for a word.

    [UNK] stands for text that the vocabulary lacks, so it is a token as others are, as in BERT.
    """
    ids = (manifest.pad_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    return np.unique(np.array(ids, dtype=np.int64))

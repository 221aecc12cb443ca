"""The sidecar of a shard: what the shard holds, where in the file, and what it was made from."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import Record, read_record, without_defaults, write_json
from mlperf_bert.common.untrusted import in_brief

SHARD_FORMAT_VERSION = 1

# What an example is: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] and nothing to say of a next sentence.
Segments = Literal["pair", "single"]
SEGMENTS: tuple[Segments, ...] = ("pair", "single")  # the first where a file does not say
REMEDY = "prepare this shard again with `mlperf_bert prepare`"

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

    vocabulary_sha256: str
    max_seq_length: int
    max_predictions: int
    seed: int
    dupe_factor: int
    split_sentences: bool
    pick_eval: int | None
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
    record = read_record(path, missing="the shard's sidecar is missing", remedy=REMEDY)
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
            raise DataError(f"{path}: {name}", problem, REMEDY)
    for name, place in sidecar.datasets.items():
        if place.end > sidecar.shard_bytes:
            problem = f"ends at byte {place.end} of a shard of {sidecar.shard_bytes}"
            raise DataError(f"{path}: {name}", problem, REMEDY)

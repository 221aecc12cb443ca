"""Checks of a prepared set that read no sample: at the start of training, and by `verify`.

Sidecars, vocabulary and index are held against the manifest and each other. Nothing is trusted:
names and counts may be hostile. Each check raises the DataError it finds, or returns all of them.

`stage.json` of a staged set says whether all of its samples are there, or those of one plan only.
Such a partial stage serves the ranks of one node in runs with the same seed and batches, so it
names every setting that the plan of a step depends on.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    check_digest,
    check_size,
    in_brief,
    read_regular_file,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.index import (
    INDEX_ARRAYS,
    IndexFile,
    LengthIndex,
    Manifest,
    ShardEntry,
    Sidecar,
    sidecar_path,
)
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY

SHARD_REMEDY = (
    "delete this shard, its sidecar and index/dataset.json, then run the same "
    "`mlperf_bert prepare` command again; other finished shards are kept"
)
VOCABULARY_REMEDY = "put the vocabulary back that the set was made with, or prepare a new set"
MIXED_REMEDY = "keep the shards of one preparation only: prepare the set in a new directory"
PAIR_REMEDY = "prepare both with the same vocabulary, from different texts"
STAGE_FILE = "stage.json"
STAGE_FORMAT_VERSION = 1
STAGE_REMEDY = "stage the data again with `mlperf_bert stage-data`, into a new directory"

NOT_STAGED = 255  # as next_sentence_label: out of range, so that reading such a sample is refused


def check_sidecar_digest(set_dir: Path, entry: ShardEntry) -> None:
    """Raise DataError where a shard's sidecar is not the one that the manifest names."""
    path = sidecar_path(set_dir / "shards" / entry.file)
    check_digest(path, entry.sidecar_sha256, SHARD_REMEDY)


def check_vocabulary_digest(set_dir: Path, manifest: Manifest) -> None:
    """Raise DataError where a set's vocabulary file is not the one that it was made with."""
    check_digest(set_dir / manifest.vocabulary_file, manifest.vocabulary_sha256, VOCABULARY_REMEDY)


def check_index_file(set_dir: Path, file: IndexFile) -> None:
    """Raise DataError where an index file has not the size and digest of the manifest."""
    path = set_dir / "index" / file.file
    check_size(path, file.size_bytes, INDEX_REMEDY)
    check_digest(path, file.sha256, INDEX_REMEDY)


def check_index_ranges(set_dir: Path, index: LengthIndex) -> None:
    """Raise DataError where a number of the index is one that no right index holds.

    Planning and evaluation look samples up by these numbers before anything is read.
    """
    manifest = index.manifest
    limits: tuple[tuple[NDArray[Any], int, int], ...] = (
        (index.lengths, 1, manifest.max_seq_length),
        (index.masked_counts, 1, manifest.max_predictions),
        (index.order_by_length, 0, manifest.num_samples - 1),
    )
    for (name, _), (values, low, high) in zip(INDEX_ARRAYS, limits, strict=True):
        if values.min() < low or values.max() > high:
            problem = f"holds numbers outside {low} .. {high}"
            raise DataError(str(set_dir / "index" / name), problem, INDEX_REMEDY)


def wrong_settings(
    set_dir: Path, manifest: Manifest, sidecars: Mapping[str, Sidecar]
) -> list[DataError]:
    """Shards that were not made as the manifest says: of another preparation.

    A setting that the manifest does not hold must be what most shards have. `sidecars` are by the
    shard's file name, at least one.
    """
    names = [field.name for field in fields(next(iter(sidecars.values())).settings)]
    wanted = {}
    for name in names:
        values = Counter(getattr(sidecar.settings, name) for sidecar in sidecars.values())
        wanted[name] = getattr(manifest, name, values.most_common(1)[0][0])
    problems = []
    for file, sidecar in sidecars.items():
        differing = [
            f"{name} = {getattr(sidecar.settings, name)} (not {wanted[name]})"
            for name in names
            if getattr(sidecar.settings, name) != wanted[name]
        ]
        if differing:
            problem = f"was made with {', '.join(differing)}"
            problems.append(DataError(str(set_dir / "shards" / file), problem, MIXED_REMEDY))
    return problems


def repeated_texts(set_dir: Path, sidecars: Mapping[str, Sidecar]) -> list[DataError]:
    """Shards of the same text, or with the same examples, as one before them, copies among them."""
    before: dict[str, str] = {}
    problems = []
    for file, sidecar in sidecars.items():
        problem = _shared(sidecar, before)
        if problem is not None:
            remedy = "prepare the set in a new directory, with each text once"
            problems.append(DataError(str(set_dir / "shards" / file), problem, remedy))
        for digest in _digests(sidecar):
            before.setdefault(digest, file)
    return problems


def shared_texts(
    eval_dir: Path, train: Mapping[str, Sidecar], held_out: Mapping[str, Sidecar]
) -> list[DataError]:
    """Shards of the held-out set of a text, or with just the examples, that is trained on."""
    trained_on = {
        digest: f"train's {file}" for file, sidecar in train.items() for digest in _digests(sidecar)
    }
    found = [(file, _shared(sidecar, trained_on)) for file, sidecar in held_out.items()]
    return [
        DataError(str(eval_dir / "shards" / file), problem, PAIR_REMEDY)
        for file, problem in found
        if problem is not None
    ]


def _digests(sidecar: Sidecar) -> dict[str, str]:
    """What a shard can share with another -> how to say so.

    Files of others hold the same examples in several forms, which have digests of their own.
    """
    said = {sidecar.source_sha256: "was made from the same text as"}
    if sidecar.examples_sha256 is not None:
        said.setdefault(sidecar.examples_sha256, "holds the same examples as")
    return said


def _shared(sidecar: Sidecar, others: Mapping[str, str]) -> str | None:
    for digest, said in _digests(sidecar).items():
        if digest in others:
            return f"{said} {others[digest]}"
    return None


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Which samples a partial stage holds: those that a node's ranks read in the first steps."""

    node: int
    steps: int
    settings: dict[str, Any]  # "section.field" -> value, of `plan_settings`


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a staged set was copied from, and how much of it; `part` is None for all of it."""

    manifest_sha256: str  # of the bytes of index/dataset.json
    part: StagedPart | None

    @classmethod
    def load(cls, set_dir: Path) -> Self:
        """Parse `set_dir/stage.json`. Raises DataError naming the file and the key."""
        path = set_dir / STAGE_FILE
        record = read_record(path, missing="is missing", remedy=STAGE_REMEDY)
        record.check_version(STAGE_FORMAT_VERSION)
        part = None
        if record.has("part"):
            entry = record.record("part")
            part = StagedPart(
                entry.integer("node"),
                entry.integer("steps", low=1),
                dict(entry.record("settings").values),
            )
        return cls(record.text("manifest_sha256"), part)

    def to_json(self) -> bytes:
        """The file's contents."""
        return write_json({"format_version": STAGE_FORMAT_VERSION, **asdict(self)})


def manifest_sha256(set_dir: Path) -> str:
    """Digest of the manifest file. Raises DataError when it cannot be read."""
    path = set_dir / "index" / "dataset.json"
    try:
        return hashlib.sha256(read_regular_file(path, MAX_JSON_BYTES)).hexdigest()
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", STAGE_REMEDY) from None


def is_partial(set_dir: Path) -> bool:
    """Whether this is a partial stage. Raises DataError for a damaged `stage.json`."""
    return _is_staged(set_dir) and StageRecord.load(set_dir).part is not None


def plan_settings(config: RunConfig) -> dict[str, Any]:
    """Every setting that decides which samples a rank reads in which step."""
    data, parallel = config.data, config.parallel
    cost_a, cost_b = config.cost_coefficients
    return {
        "run.seed": config.run.seed,
        "data.sampler": data.sampler,
        "data.quantiles": data.quantiles,
        "data.balance": data.balance,
        "data.deal": data.deal,
        "data.counts_per_rank": data.counts_per_rank,
        "data.balance_model": data.balance_model,
        "data.cost_a": cost_a,
        "data.cost_b": cost_b,
        "data.exchange_window_steps": data.exchange_window_steps,  # so far ahead readers read
        "parallel.nodes": parallel.nodes,
        "parallel.ranks_per_node": parallel.ranks_per_node,
        "parallel.local_batch_size": parallel.local_batch_size,
        "parallel.grad_accum_steps": parallel.grad_accum_steps,
    }


def check_stage(set_dir: Path, config: RunConfig, rank: int) -> None:
    """Refuse a partial stage that lacks samples which this rank would read.

    Raises ConfigError naming the setting that differs, DataError for another node's part or a
    stage of another set. A set without `stage.json` was not staged, and holds everything.
    """
    if not _is_staged(set_dir):
        return
    record = StageRecord.load(set_dir)
    if record.manifest_sha256 != manifest_sha256(set_dir):
        raise DataError(str(set_dir / STAGE_FILE), "was written for another set", STAGE_REMEDY)
    if record.part is None:
        return
    _check_settings(record.part.settings, plan_settings(config), set_dir)
    if config.max_steps > record.part.steps:
        raise ConfigError(
            "run.max_steps",
            f"is {config.max_steps}, the stage in {set_dir} holds {record.part.steps} steps",
            "lower it, or stage the data again",
        )
    node = rank // config.parallel.ranks_per_node
    if node != record.part.node:
        problem = f"holds the part of node {record.part.node}, rank {rank} runs on node {node}"
        raise DataError(str(set_dir), problem, f"run `mlperf_bert stage-data --node {node}` there")


def _is_staged(set_dir: Path) -> bool:
    return os.path.lexists(set_dir / STAGE_FILE)  # a link to nothing too: then it was one


def _check_settings(staged: Mapping[str, Any], asked: Mapping[str, Any], set_dir: Path) -> None:
    for field, value in asked.items():
        if staged.get(field) != value:
            problem = f"is {value!r}, the stage in {set_dir} holds the samples of "
            problem += f"{in_brief(staged.get(field))} only"
            raise ConfigError(field, problem, "train with that, or stage the data again")

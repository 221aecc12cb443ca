"""`stage.json` of a staged set: whether all of its samples are there, or those of one plan only.

A partial stage serves the ranks of one node in runs with the same seed and batches, so it names
every setting that the plan of a step depends on.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.common.untrusted import MAX_JSON_BYTES, in_brief, read_regular_file
from mlperf_bert.config.run_config import RunConfig

STAGE_FILE = "stage.json"
STAGE_FORMAT_VERSION = 1
REMEDY = "stage the data again with `mlperf_bert stage-data`, into a new directory"

NOT_STAGED = 255  # as next_sentence_label: out of range, so that reading such a sample is refused


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
        record = read_record(path, missing="is missing", remedy=REMEDY)
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
        raise DataError(str(path), error.strerror or "cannot be read", REMEDY) from None


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
        raise DataError(str(set_dir / STAGE_FILE), "was written for another set", REMEDY)
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

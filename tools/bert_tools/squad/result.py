"""What `squad_result.json` says of a run: everything that was measured, with the settings."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from bert_tools.squad.bubble import StageEvent, bubble_by_formula, measured_bubble, timeline
from bert_tools.squad.inputs import Prepared
from bert_tools.squad.loop import TrainingLog
from bert_tools.squad.measures import Usage, squad_flops
from bert_tools.squad.microbatches import UpdatePlan
from bert_tools.squad.model import parameter_shapes
from bert_tools.squad.record import SCHEMA_VERSION
from bert_tools.squad.settings import EngineName, SquadSettings
from mlperf_bert.common.machine import read_machine

OfRank = tuple[Usage, list[list[StageEvent]]]


def to_plain(usage: Usage, clocked: list[list[StageEvent]]) -> list[Any]:
    """What a rank measured, as JSON can hold it."""
    events = [[asdict(event) for event in update] for update in clocked]
    return [{**asdict(usage), "cpus": sorted(usage.cpus)}, events]


def of_rank(plain: list[Any]) -> OfRank:
    """The inverse of `to_plain`."""
    usage, clocked = plain
    events = [[StageEvent(**event) for event in update] for update in clocked]
    return Usage(**{**usage, "cpus": frozenset(usage["cpus"])}), events


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of reading and building, of training, of evaluation; on rank 0."""

    start: float
    train: float
    evaluate: float

    @property
    def end_to_end(self) -> float:
        """All of them; writing the weights is left out."""
        return self.start + self.train + self.evaluate


def make_record(
    settings: SquadSettings,
    prepared: Prepared,
    plan: UpdatePlan,
    log: TrainingLog,
    of_ranks: Sequence[OfRank],
    seconds: Seconds,
    evaluated: dict[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """The record; `of_ranks` is what each rank measured, in their order."""
    rate = log.samples_per_s(settings.global_batch) or plan.num_samples / seconds.train
    lengths = prepared.train_windows.lengths[plan.windows.ravel()]
    per_sample = squad_flops(prepared.start.model, lengths.tolist()) / plan.num_samples
    return {
        "schema_version": SCHEMA_VERSION,
        **_who(settings, device),
        "model": _model(prepared),
        "init": prepared.start.origin,
        "data": _data(prepared),
        "settings": _settings(settings, prepared, plan),
        "updates": plan.num_updates,
        "samples": plan.num_samples,
        "tokens": int(plan.tokens.sum()),
        "losses": [_finite(loss) for loss in log.losses],
        "grad_norms": [_finite(norm) for norm in log.grad_norms],
        "skipped_updates": log.skipped,
        "seconds": {
            "start": seconds.start,
            "train": seconds.train,
            "evaluate": seconds.evaluate,
            "end_to_end": seconds.end_to_end,
        },
        "step_seconds": log.step_seconds,
        "samples_per_s": {"train": rate, "end_to_end": plan.num_samples / seconds.end_to_end},
        **evaluated,
        "noise": log.noise,
        "noise_scale": log.noise_scale.value,
        "plain_noise_scale": log.plain_noise_scale.value,
        **_usage([usage for usage, _ in of_ranks]),
        "model_flops_per_sample": per_sample,
        "model_flops_per_s": per_sample * rate,
        "mfu": None,
        **_bubble(settings, [clocked for _, clocked in of_ranks]),
    }


def _who(settings: SquadSettings, device: torch.device) -> dict[str, Any]:
    name = settings.engine
    machine = read_machine()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "engine": str(name),
        "schedule": name.schedule,
        "ranks": name.ranks,
        "stages": name.stages,
        "replicas": name.replicas,
        "seed": settings.seed,
        "precision": settings.precision,
        "device": device.type,
        "processor": gpu or machine.cpu_model or "unknown",
    }


def _model(prepared: Prepared) -> dict[str, Any]:
    model = prepared.start.model
    return {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "vocabulary": model.vocab_size,
        "parameters": sum(math.prod(shape) for shape in parameter_shapes(model).values()),
    }


def _data(prepared: Prepared) -> dict[str, Any]:
    return {
        "train_sha256": prepared.train.sha256,
        "dev_sha256": prepared.dev.sha256,
        "train_questions": len(prepared.train),
        "dev_questions": len(prepared.dev),
        "train_windows": len(prepared.train_windows),
        "dev_windows": len(prepared.dev_windows),
    }


def _settings(settings: SquadSettings, prepared: Prepared, plan: UpdatePlan) -> dict[str, Any]:
    """As they were in effect: numbers in the place of what was left open."""
    model = prepared.start.model
    return settings.to_record() | {
        "updates": plan.num_updates,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "capacity_tokens": plan.capacity(settings.max_length),
    }


def _usage(of_ranks: Sequence[Usage]) -> dict[str, Any]:
    return {
        "peak_memory_bytes": [usage.peak_memory_bytes for usage in of_ranks],
        "cpu_seconds": [usage.cpu_seconds for usage in of_ranks],
        "core_wait_seconds": [usage.core_wait_seconds for usage in of_ranks],
        "device_utilisation": [usage.utilisation for usage in of_ranks],
        "device_utilisation_means": of_ranks[0].means,
        # Of all ranks together: each may be bound to some of them.
        "cores": len(frozenset[int]().union(*(usage.cpus for usage in of_ranks))),
    }


def _bubble(settings: SquadSettings, of_ranks: Sequence[list[list[StageEvent]]]) -> dict[str, Any]:
    """Median over the updates with a clock, and the last of them event by event."""
    updates = [
        [event for rank in of_ranks for event in rank[number]] for number in range(len(of_ranks[0]))
    ]
    name: EngineName = settings.engine
    if name.schedule is None or not updates:
        return {"bubble": None, "timeline": []}
    of_pipeline = settings.microbatches // name.replicas
    return {
        "bubble": {
            "measured": median(measured_bubble(update) for update in updates),
            "formula": bubble_by_formula(name.schedule, name.stages, of_pipeline),
        },
        "timeline": timeline(updates[-1]),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

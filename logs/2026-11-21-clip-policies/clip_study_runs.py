"""One run of the study of clip policies: a few virtual ranks, one after the other in one process.

Every forward of an update stands for one rank: its gradient is limited as that rank would limit it,
with the functions and the bucket plan that training uses, and what they would send is added up.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlperf_bert.config.files import config_to_tables, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.loader import DirectSource
from mlperf_bert.data.set_checks import RunData, open_data
from mlperf_bert.distributed.bucket_plan import plan_in_reverse
from mlperf_bert.distributed.clipping import (
    combine_norms,
    gradient_norm,
    limit_before_allreduce,
    limit_factor,
)
from mlperf_bert.evaluation.evaluate import Evaluator, tokens_per_micro_batch
from mlperf_bert.model.bert import make_model
from mlperf_bert.model.layers import pretraining_loss
from mlperf_bert.optim.optimizers import make_optimizer_alone
from mlperf_bert.optim.schedule import learning_rate
from mlperf_bert.step.eager import training_loss_sums

WARM_UP_SAMPLES = 4096
QUARTILES = torch.tensor([0.25, 0.5, 0.75])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What one run of the study is about."""

    policy: str
    optimizer: str
    global_batch_size: int
    seed: int
    learning_rate: float
    max_norm: float
    bucket_cap_mb: float
    bucket_limit: str = "by_size"

    @property
    def name(self) -> str:
        """Of the run's file, without its ending."""
        cap = f"-cap{self.bucket_cap_mb:g}" if self.policy == "bucket_before_allreduce" else ""
        cap += "-equal" if self.bucket_limit == "equal_share" else ""
        return (
            f"{self.policy}{cap}-{self.optimizer}-{self.global_batch_size}"
            f"-lr{self.learning_rate:g}-norm{self.max_norm:g}-seed{self.seed}"
        )


def make_config(path: Path, cell: Cell, max_samples: int) -> RunConfig:
    """The config of a run: the file, and what the cell changes.

    After the warm-up the learning rate stays where it is, so that a slow run is not held back
    further by a decay that goes on meanwhile.
    """
    ranks = load_config(path).parallel.world_size
    steps = max_samples // cell.global_batch_size
    settings = {
        "run.seed": cell.seed,
        "run.max_steps": steps,
        "parallel.local_batch_size": cell.global_batch_size // ranks,
        "parallel.bucket_cap_mb": cell.bucket_cap_mb,
        "optim.name": cell.optimizer,
        "optim.learning_rate": cell.learning_rate,
        "schedule.warmup_steps": min(WARM_UP_SAMPLES // cell.global_batch_size, steps - 1),
        "schedule.decay_steps": steps,
        "schedule.end_learning_rate": cell.learning_rate,
        "clip.policy": cell.policy,
        "clip.max_norm": cell.max_norm,
        "clip.bucket_limit": cell.bucket_limit,
    }
    return load_config(path, [f"{name}={value}" for name, value in settings.items()])


@dataclass(frozen=True, slots=True)
class Reduction:
    """What was found in one update."""

    local_norms: list[float]  # of each virtual rank's gradient, before it is limited
    mean_norm: float  # of what an all-reduce would return: their mean, limited before or not
    clipped: list[float]  # of each bucket the share of ranks; else one number for all together

    @property
    def clipped_fraction(self) -> float:
        """Share of all that was held against a limit, 0 without one."""
        return sum(self.clipped) / len(self.clipped)


class VirtualRanks:
    """The gradient of an update by N ranks under a clip policy."""

    def __init__(
        self, clip: ClipSection, model: nn.Module, num_ranks: int, bucket_cap_mb: float
    ) -> None:
        """Plan the buckets of `model`, whose parameters are all trained and all get a gradient."""
        self._clip = clip
        self._num_ranks = num_ranks
        self._parameters = list(model.parameters())
        self._numel_total = sum(each.numel() for each in self._parameters)
        named = dict(model.named_parameters())
        element_bytes = max(each.element_size() for each in self._parameters)
        numels = {name: each.numel() for name, each in named.items()}
        plan = plan_in_reverse(numels, element_bytes, bucket_cap_mb)
        self._buckets = [[named[name] for name in names] for names in plan]
        self.bucket_sizes = [sum(numels[name] for name in names) for names in plan]

    def __call__(self, backwards: Sequence[Callable[[], object]]) -> Reduction:
        """Leave the update's gradient in `.grad`.

        Args:
            backwards: one for each rank; adds the gradient of that rank's own loss to `.grad`.
                The ranks' mean is the gradient of the whole batch's loss.
        """
        sums = [torch.zeros_like(each) for each in self._parameters]
        norms, clipped = [], []
        for backward in backwards:
            for parameter in self._parameters:
                parameter.grad = None
            backward()
            norm, over = self._limit_and_divide()
            norms.append(norm)
            clipped.append(over)
            torch._foreach_add_(sums, _gradients(self._parameters))
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
        shares = torch.stack(clipped).float().mean(dim=0)
        if self._clip.policy == "after_allreduce":
            mean_norm = _limit(sums, self._clip.max_norm, num_ranks=1)
            shares = (mean_norm > self._clip.max_norm).float().view(1)
        else:
            mean_norm = gradient_norm(sums)
        return Reduction(torch.stack(norms).tolist(), float(mean_norm), shares.tolist())

    def _limit_and_divide(self) -> tuple[Tensor, Tensor]:
        """What one rank does to its gradient before it is sent: its norm before, what was over."""
        if self._clip.policy in ("none", "after_allreduce"):
            gradients = _gradients(self._parameters)
            norm = gradient_norm(gradients)
            torch._foreach_div_(gradients, self._num_ranks)
            return norm, torch.zeros(1)
        whole = self._clip.policy == "whole_before_allreduce"
        norms, over = [], []
        for parameters in [self._parameters] if whole else self._buckets:
            numel = sum(each.numel() for each in parameters)
            limit = limit_before_allreduce(self._clip, numel, self._numel_total)
            if self._clip.bucket_limit == "equal_share":  # with this plan's buckets, not 22
                limit = self._clip.max_norm / math.sqrt(len(self._buckets))
            norms.append(_limit(_gradients(parameters), limit, self._num_ranks))
            over.append(norms[-1] > limit)
        return combine_norms(norms), torch.stack(over)


def _limit(gradients: list[Tensor], limit: float, num_ranks: int) -> Tensor:
    """Limit their norm and divide by the ranks, in place; the norm before."""
    norm = gradient_norm(gradients)
    torch._foreach_mul_(gradients, limit_factor(norm, limit) / num_ranks)
    return norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


class Updater:
    """The one place that knows the optimizer."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self._optimizer = make_optimizer_alone(config.optim, model)
        self._config = config

    def __call__(self, step: int) -> None:
        """Update the model with the gradients in `.grad`, as step number `step` from 1."""
        config = self._config
        rate = learning_rate(step, config.schedule, config.optim.learning_rate)
        self._optimizer.step(
            torch.tensor(rate, dtype=torch.float64),
            gradient_factor=torch.ones(()),
            skip=torch.zeros(()),
        )
        self._optimizer.zero_grad()


def run_cell(cell: Cell, config_path: Path, data_dir: Path, max_samples: int) -> dict[str, Any]:
    """Train until the target, `max_samples` or a gradient that is not finite; what was found.

    `samples_to_target` lies where the line between two evaluations crosses the target; None where
    it was not reached.
    """
    started = time.perf_counter()
    config = make_config(config_path, cell, max_samples)
    data = open_data(config, data_dir, checks_files=True)
    model = make_model(config, cell.seed, torch.device("cpu"))
    ranks = VirtualRanks(
        config.clip, model, config.parallel.world_size, config.parallel.bucket_cap_mb
    )
    curve = _train(config, data, model, ranks)
    baseline = data.held_out.manifest.baseline
    return {
        "schema_version": 1,
        "samples_to_target": samples_to_target(curve, config.eval.target_accuracy),
        "best_accuracy": max((point["accuracy"] for point in curve), default=0.0),
        "guess": baseline.context_free_accuracy if baseline else None,
        "bucket_sizes": ranks.bucket_sizes,
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 1),
        "config": config_to_tables(config),
    }


def _train(
    config: RunConfig, data: RunData, model: nn.Module, ranks: VirtualRanks
) -> list[dict[str, Any]]:
    """The curve: accuracy of each evaluation, and norms of the updates since the one before."""
    num_ranks = config.parallel.world_size
    planner = make_planner(config, data.train, int(config.run.seed))
    sources = [DirectSource(data.train_reader, rank) for rank in range(num_ranks)]
    device = torch.device("cpu")
    evaluator = Evaluator(
        data.held_out,
        data.held_out_reader,
        tokens_per_micro_batch=tokens_per_micro_batch(data.held_out, 1, device),
        rank=0,
        world_size=1,
        device=device,
        precision="fp32",
    )
    update = Updater(model, config)
    curve: list[dict[str, Any]] = []
    found: list[Reduction] = []
    for step in range(1, config.max_steps + 1):
        plan = planner.plan(step)
        found.append(ranks([_backward(model, each.micro_batches(plan)[0]) for each in sources]))
        if not math.isfinite(found[-1].mean_norm):
            break
        update(step)
        samples = step * config.parallel.global_batch_size
        if samples % config.eval_interval_samples == 0 or step == config.max_steps:
            accuracy = evaluator(model)
            curve.append(
                {
                    "samples": samples,
                    "accuracy": accuracy.mlm_accuracy,
                    "mask_only_accuracy": accuracy.mask_only_accuracy,
                    **_summary(found),
                }
            )
            found = []
            if accuracy.mlm_accuracy >= config.eval.target_accuracy:
                break
    return curve


def _backward(model: nn.Module, batch: UnpaddedBatch) -> Callable[[], object]:
    def run() -> None:
        loss = pretraining_loss(training_loss_sums(model, batch, "fp32"), batch)
        loss.backward()  # type: ignore[no-untyped-call]

    return run


def _summary(found: Sequence[Reduction]) -> dict[str, Any]:
    """Norms and clipped shares of some updates."""
    local = torch.tensor([each.local_norms for each in found])
    mean = torch.tensor([each.mean_norm for each in found])
    clipped = torch.tensor([each.clipped for each in found])
    return {
        "local_norm_quartiles": _rounded(local.quantile(QUARTILES)),
        "mean_norm_quartiles": _rounded(mean.quantile(QUARTILES)),
        "clipped_fraction": sum(each.clipped_fraction for each in found) / len(found),
        "clipped_by_bucket": _rounded(clipped.mean(dim=0)),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def samples_to_target(curve: Sequence[dict[str, Any]], target: float) -> float | None:
    """Where the line between two neighbours of the curve first reaches `target`, or None."""
    before = {"samples": 0, "accuracy": 0.0}
    for point in curve:
        if point["accuracy"] >= target:
            rise = (target - before["accuracy"]) / (point["accuracy"] - before["accuracy"])
            return float(before["samples"] + rise * (point["samples"] - before["samples"]))
        before = point
    return None

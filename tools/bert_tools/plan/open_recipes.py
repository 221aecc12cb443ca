"""The open recipes as config sections for any global batch (docs/hyperparameters.md). No torch.

`open_adam` is Samsung's (MLPerf v2.0), `open_adamw` MosaicML's (v2.1), each published at one batch:
below it the schedule keeps its samples and the rate goes with the batch's square root, above it
both stay. `open_hypothesis` lies on straight lines of logarithms through the two, and beyond them
has the values of the nearer one.
"""

import math
from typing import Any

from bert_tools.plan.samples_to_target import Recipe, samples_points, samples_to_target

Sections = dict[str, dict[str, Any]]

_ADAM = {
    "learning_rate": 3.9299421615882676e-4,
    "beta_1": 0.8003575444254268,
    "beta_2": 0.8174653681457493,
    "epsilon": 1e-9,
    "weight_decay": 2.8861703130042965e-3,
}
_ADAM_END_RATE = 4.94549100544884e-5
_ADAM_STEPS, _ADAM_WARM_UP, _ADAM_START, _ADAM_MOST_STEPS = 179, 82, -16, 299
# MosaicML's decay is not times the rate, as ours is: 1e-5 a step at a rate of 1e-4 is 0.1 here.
_ADAMW = {
    "learning_rate": 1e-4,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-6,
    "weight_decay": 0.1,
}
_ADAMW_STEPS, _ADAMW_WARM_UP, _ADAMW_EVALUATION_STEPS = 2800, 80, 55
_DIGITS = 2  # of the hypothesis: its lines are no better than that


def open_sections(recipe: Recipe, global_batch_size: int, local_batch_size: int) -> Sections:
    """Sections optim, schedule, clip, data and what else the recipe decides."""
    if recipe == "open_adam":
        return _adam(global_batch_size, local_batch_size)
    if recipe == "open_adamw":
        return _adamw(global_batch_size)
    return _hypothesis(global_batch_size)


def _adam(batch: int, local_batch: int) -> Sections:
    ratio = min(1.0, batch / samples_points("open_adam")[0].global_batch_size)
    root = math.sqrt(ratio)
    return {
        "run": {"max_steps": round(_ADAM_MOST_STEPS / ratio)},
        "data": {"sampler": _strata(batch, local_batch), "balance": "presort_local"},
        "optim": {
            "name": "adamw",
            **_ADAM,
            "learning_rate": _ADAM["learning_rate"] * root,
            "loss_normalization": "per_rank",
        },
        "schedule": {
            "form": "published",
            "warmup_steps": round(_ADAM_WARM_UP / ratio),
            "start_warmup_step": round(_ADAM_START / ratio),
            "decay_steps": round(_ADAM_STEPS / ratio),
            "end_learning_rate": _ADAM_END_RATE * root,
        },
        "clip": {
            "policy": "bucket_before_allreduce",
            "max_norm": 1.0,
            "bucket_limit": "equal_share",
            "bucket_count": 22,
        },
    }


def _strata(batch: int, local_batch: int) -> str:
    """The published draw of a rank's batch where it comes out even; else quantiles, unbiased."""
    for group, name in ((16, "strata_6_3_2_5"), (12, "strata_4_2_2_4")):
        if local_batch % group == 0:
            return name
    return "strata_6_3_2_5" if batch % 16 == 0 else "quantile"


def _adamw(batch: int) -> Sections:
    ratio = min(1.0, batch / samples_points("open_adamw")[0].global_batch_size)
    return {
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "optim": {
            "name": "adamw",
            **_ADAMW,
            "learning_rate": _ADAMW["learning_rate"] * math.sqrt(ratio),
        },
        "schedule": {
            "warmup_steps": round(_ADAMW_WARM_UP / ratio),
            "decay_steps": round(_ADAMW_STEPS / ratio),
        },
        "clip": {"policy": "none"},
        "eval": {"interval_samples": round(_ADAMW_EVALUATION_STEPS / ratio) * batch},
    }


def _hypothesis(batch: int) -> Sections:
    small, large = samples_points("open_hypothesis")
    width = math.log(large.global_batch_size / small.global_batch_size)
    share = min(1.0, max(0.0, math.log(batch / small.global_batch_size) / width))

    def between(a: float, b: float) -> float:
        return _rounded(a * (b / a) ** share)

    steps = max(2, round(samples_to_target(batch, "open_hypothesis").samples / batch))
    rate = between(_ADAMW["learning_rate"], _ADAM["learning_rate"])
    return {
        "run": {"max_steps": math.ceil(steps * _ADAM_MOST_STEPS / _ADAM_STEPS)},
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": {"sampler": "quantile"},
        "optim": {
            "name": "adamw",
            "learning_rate": rate,
            "beta_1": round(1 - between(1 - _ADAMW["beta_1"], 1 - _ADAM["beta_1"]), 4),
            "beta_2": round(1 - between(1 - _ADAMW["beta_2"], 1 - _ADAM["beta_2"]), 4),
            "epsilon": 1e-6,
            "weight_decay": between(_ADAMW["weight_decay"], _ADAM["weight_decay"]),
        },
        "schedule": {
            "warmup_steps": min(_ADAMW_WARM_UP, steps // 2),
            "decay_steps": steps,
            "end_learning_rate": _rounded(rate * _ADAM_END_RATE / _ADAM["learning_rate"]),
        },
        "clip": {"policy": "none"},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")

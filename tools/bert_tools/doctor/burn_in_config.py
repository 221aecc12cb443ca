"""What a burn-in trains: the config given, or what suits the device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.run_config import RunConfig

SEED = 1
_STEPS = 1000  # of the schedule, which begins again behind them
_GIB = 2**30
_LARGEST_BATCH = 448  # the global batch of the published runs on one node
# Of BERT-large in 16 bits: weights, moments and kernels' own; then what a sequence of the mean
# length keeps for its backward. By arithmetic, with room to spare; what does not fit is halved.
_FIXED_BYTES = 10 * _GIB
_SEQUENCE_BYTES = 0.28 * _GIB
_CPU_BATCH = 8


def candidates(
    given: RunConfig | None, device: torch.device, free_bytes: int
) -> Iterator[RunConfig]:
    """Configs of one rank to try in turn, until one runs and fits. `free_bytes`: of the GPU.

    One that was given is the only one, as one rank of it.
    """
    if given is not None:
        yield _one_rank(given)
        return
    if device.type == "cpu":
        yield _config(_small(), precision="fp32", step_mode="eager", batch=_CPU_BATCH)
        return
    precision = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    batch = batch_for(free_bytes)
    while batch:
        for step_mode in ("captured", "eager"):
            yield _config({}, precision=precision, step_mode=step_mode, batch=batch)
        batch //= 2


def _one_rank(given: RunConfig) -> RunConfig:
    data = given.data
    if data.sampler.startswith("strata"):  # which one rank's batch may be too small for
        data = replace(data, sampler="uniform")
    parallel = replace(given.parallel, nodes=1, ranks_per_node=1)
    return replace(given, parallel=parallel, data=data, run=replace(given.run, seed=SEED))


def batch_for(free_bytes: int) -> int:
    """Sequences of BERT-large in 16 bits that should fit, a multiple of 8 where there are 8."""
    batch = int((free_bytes - _FIXED_BYTES) / _SEQUENCE_BYTES)
    batch = max(1, min(_LARGEST_BATCH, batch))
    return batch - batch % 8 if batch >= 8 else batch


def _small() -> dict[str, Any]:
    """A model whose step takes a CPU a second or so."""
    return {
        "model.num_layers": 4,
        "model.hidden_size": 256,
        "model.num_heads": 4,
        "model.intermediate_size": 1024,
    }


def _config(changes: dict[str, Any], *, precision: str, step_mode: str, batch: int) -> RunConfig:
    values = {
        "run.seed": SEED,
        "run.step_mode": step_mode,
        "model.precision": precision,
        "parallel.local_batch_size": batch,
        "optim.name": "lamb",
        "optim.learning_rate": 1e-4,
        "schedule.decay_steps": _STEPS,
        "eval.target_accuracy": 0.72,
        **changes,
    }
    tables: dict[str, dict[str, Any]] = {}
    for setting, value in values.items():
        section, _, field = setting.partition(".")
        tables.setdefault(section, {})[field] = value
    return config_from_tables(tables, "burn-in")

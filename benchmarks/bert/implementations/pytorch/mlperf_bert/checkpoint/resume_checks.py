"""Which settings a run may change when it goes on, and which would make it another run."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from mlperf_bert.checkpoint.state import CheckpointState
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.common.health import Health
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import CLIPPED_TOGETHER

# What decides which samples a step trains on, and the shapes of all that is saved.
_FIXED = {
    "model.vocab_size",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_position_embeddings",
    "model.type_vocab_size",
    "model.objective",
    "data.corpus",
    "data.max_seq_length",
    "data.max_predictions",
    "data.masking",
    "data.masking_rate",
    "data.dupe_factor",
    "data.sampler",
    "data.quantiles",
}
# What has a say in the numbers that a step computes, or in when a run ends.
_EXACT_SECTIONS = {"model", "optim", "schedule", "clip"}
_EXACT = {"parallel.allreduce_dtype", "eval.target_accuracy", "eval.interval_samples"}
_ROUNDING = {"model.attention", "model.kernels", "model.head", "optim.implementation"}
# What matters to them where a result depends on which rank has which samples.
_WHO_HAS_WHAT = {
    "data.balance",
    "data.deal",
    "data.counts_per_rank",
    "parallel.bucket_cap_mb",
    "parallel.grad_accum_steps",
    "parallel.local_batch_size",
    "parallel.nodes",
    "parallel.ranks_per_node",
}


def check_same(state: CheckpointState, old: RunConfig, new: RunConfig) -> None:
    """Raise ConfigError where the rest of a run would not be what it had been."""
    _check_fixed(state, old, new)
    check_seed(state.seed, new)
    for name, before, now in _differences(old, new):
        raise ConfigError(
            name,
            f"is {now!r}, the run to go on with has {before!r}",
            "set it back, or begin another run with --resume CHECKPOINT",
        )


def check_seed(seed: int, config: RunConfig) -> None:
    """Raise ConfigError where a config has another seed than the run to go on with."""
    if config.run.seed not in ("random", seed):
        problem = f"is {config.run.seed}, the run to go on with has {seed}"
        raise ConfigError("run.seed", problem, "leave it out, or set it to that")


def allowed_differences(state: CheckpointState, old: RunConfig, new: RunConfig) -> list[str]:
    """What is not as it was where another run goes on from a checkpoint.

    Raises ConfigError where it cannot go on with the new settings at all.
    """
    _check_fixed(state, old, new)
    return [f"{name} was {before!r} and is {now!r}" for name, before, now in _differences(old, new)]


def _check_fixed(state: CheckpointState, old: RunConfig, new: RunConfig) -> None:
    batches = (old.parallel.global_batch_size, new.parallel.global_batch_size)
    remedy = "set it back, or begin anew from its weights with --init-checkpoint"
    if batches[0] != batches[1]:
        problem = f"makes a global batch of {batches[1]:,}, the checkpoint's is {batches[0]:,}"
        raise ConfigError("parallel.local_batch_size", problem, remedy)
    for name, before, now in _unequal(old, new):
        if name in _FIXED:
            raise ConfigError(name, f"is {now!r}, the checkpoint's is {before!r}", remedy)
    if state.step >= new.max_steps:
        problem = f"is {new.max_steps:,}, the checkpoint is of step {state.step:,}"
        raise ConfigError("run.max_steps", problem, "raise it above that step")
    try:
        Health(None).restore(state.health)  # before anything is written
    except CheckpointError as error:
        _, problem, remedy = error.args
        raise CheckpointError(f"step {state.step}: health", problem, remedy) from None


def _differences(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Settings that matter to the numbers and are not the same: name, before, now."""
    by_rank = new.clip.policy not in CLIPPED_TOGETHER or new.optim.loss_normalization == "per_rank"
    exact = _EXACT | _WHO_HAS_WHAT if by_rank else _EXACT
    for name, before, now in _unequal(old, new):
        in_section = name.split(".")[0] in _EXACT_SECTIONS and name not in _ROUNDING
        if in_section or name in exact:
            yield name, before, now


def _unequal(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    for section in fields(old):
        ours, theirs = getattr(new, section.name), getattr(old, section.name)
        for field in fields(ours):
            before, now = getattr(theirs, field.name), getattr(ours, field.name)
            if before != now:
                yield f"{section.name}.{field.name}", before, now

"""What test_sharded_optimizer.py runs on N ranks at once: `shard_job.py CONFIG OUTPUT`.

Every rank writes OUTPUT/ranks_<N>/rank_<n>.pt: what short runs of a small BERT left. Every number
of ranks trains on the same MICRO_BATCHES an update. Four ranks leave checkpoints in OUTPUT, with
which two go on.
"""

import copy
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import CPU, MICRO_BATCHES, Run, start
from torch import Tensor

from mlperf_bert.checkpoint.load import load_checkpoint
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.distributed.flat_reducer import ShardGroup
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.step.warm_up import warm_up

STEPS = 50
RULES = {  # and rates that learn something in STEPS
    "adamw": ("optim.name=adamw", "optim.learning_rate=3e-3"),
    "lamb": ("optim.name=lamb", "optim.learning_rate=1e-2"),
}
DTYPES = {"float64": torch.float64, "fp32": torch.float32}
POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")
BUCKETS = "clip.policy=bucket_before_allreduce"
EACH_FORWARD = "clip.accumulation=each_forward"
BUCKET_STEPS = 10  # those of runs that clip bucket by bucket
SAVED_AT, LAST = 4, 8
VOCABULARY = "ab"
SPOILT_BY = {2: float("nan"), 3: float("inf"), 5: 1e30}  # by step; the last: its square overflows
SPOILT_STEPS = max(SPOILT_BY) + 1


def modes(info: RankInfo) -> tuple[str, ...]:
    """Those that are not the same on so many ranks and nodes."""
    by_node = ("shard_node",) if info.local_world_size < info.world_size else ()
    return ("flat", "shard_world", *by_node)


def trained_cases(mode: str) -> list[tuple[str, str]]:
    """Rule and dtype of its long runs: `flat` shares its parts with the others, and has one."""
    return [("adamw", "float64")] if mode == "flat" else list(product(RULES, DTYPES))


def trained(run: Run, last: int) -> dict[str, Any]:
    """What steps 1 to `last` leave."""
    found: dict[str, Any] = run.steps(1, last)
    return {
        **found,
        "weights": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
    }


def state_elements(optimizer: FlatOptimizer) -> int:
    """Of the state that this rank holds beside the model's own weights."""
    owned = (optimizer.shard.masters, *optimizer.flat_state().values())
    return sum(tensor.numel() for tensor in owned)


def spoilt(config: Path, info: RankInfo, overrides: Sequence[str]) -> dict[str, Any]:
    """A run in which the last rank's gradient is bad: one tensor's, in a step's first forward.

    The tensor is of the bucket with the most padding, so that a shard of four has padding alone.
    """
    run = start(config, info, overrides)
    buckets = run.optimizer._buffers.layout.buckets
    bucket = max(buckets, key=lambda each: each.stop - each.tensors[-1].stop)
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        step, forward = divmod(calls, run.config.parallel.grad_accum_steps)
        calls += 1
        bad = SPOILT_BY.get(step + 1) if forward == 0 else None
        return gradient if bad is None else torch.full_like(gradient, bad)

    if info.rank == info.world_size - 1:
        run.model.get_parameter(bucket.tensors[0].name).register_hook(hook)
    return trained(run, SPOILT_STEPS)


def warmed_up_and_skipped(config: Path, info: RankInfo, overrides: Sequence[str]) -> dict[str, Any]:
    """Weights at the start, after the warm-up, and after a skipped step."""
    run = start(config, info, overrides)
    found = {"at first": copy.deepcopy(run.model.state_dict())}
    warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    found["warmed up"] = copy.deepcopy(run.model.state_dict())
    found["updates"] = run.optimizer.scalar_state()["updates"].clone()
    bias = run.model.get_parameter("bert.pooler.dense.bias")
    bias.register_hook(lambda gradient: gradient * torch.nan)
    found["skip"] = run.steps(1, 1)["skipped"]
    run.optimizer.settle()
    found["skipped"] = copy.deepcopy(run.model.state_dict())
    return found


def order_of_events(run: Run) -> list[str]:
    """In one update: "ready" for each gradient that becomes whole, "sent" for each bucket."""
    events: list[str] = []
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: events.append("ready"))
    reduce = ShardGroup.reduce

    def recording(group: ShardGroup, whole: Tensor, piece: Tensor) -> None:
        events.append("sent")
        reduce(group, whole, piece)

    ShardGroup.reduce = recording  # type: ignore[method-assign]
    try:
        run.steps(1, 1)
    finally:
        ShardGroup.reduce = reduce  # type: ignore[method-assign]
    return events


def waits(run: Run) -> list[int | str]:
    """In the forward after an update: buckets waited for, and "embeddings" when they have run."""
    run.steps(1, 1)
    events: list[int | str] = []
    wait_for = ShardGroup.wait_for

    def recording(group: ShardGroup, number: int) -> None:
        if number in group._gathering:
            events.append(number)
        wait_for(group, number)

    embeddings = dict(run.model.named_modules())["bert.embeddings"]
    handle = embeddings.register_forward_hook(lambda *_: events.append("embeddings"))
    ShardGroup.wait_for = recording  # type: ignore[method-assign]
    try:
        run.step(2, run.micro_batches(2))
    finally:
        ShardGroup.wait_for = wait_for  # type: ignore[method-assign]
        handle.remove()
    run.optimizer.settle()
    return events


def save(run: Run, directory: Path) -> dict[str, Any]:
    """Train to SAVED_AT, save there, and go on."""
    run.steps(1, SAVED_AT)
    state = CheckpointState(
        step=SAVED_AT, samples=0, seed=1, mlm_accuracy=None, vocabulary_sha256=VOCABULARY
    )
    if run.info.rank == 0:
        directory.mkdir()
    dist.barrier()
    torch.manual_seed(run.info.rank)
    writer = CheckpointWriter(directory, run.optimizer, run.config, run.info, CPU)
    writer.begin(state)
    writer.finish()
    return go_on(run) | {"stream": torch.get_rng_state()}


def load_and_go_on(run: Run, directory: Path) -> dict[str, Any]:
    """With a checkpoint in place of the run's own beginning."""
    state = load_checkpoint(run.optimizer, directory, VOCABULARY, run.info)
    assert state.step == SAVED_AT
    return go_on(run)


def go_on(run: Run) -> dict[str, Any]:
    """From SAVED_AT to LAST, and what there was at first."""
    return {
        "saved": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
        "losses": run.steps(SAVED_AT + 1, LAST)["losses"],
        "weights": run.optimizer.exact_weights(),
    }


SAVED = {  # by directory: rule, config options, dtype
    **{rule: (options, torch.float64) for rule, options in RULES.items()},
    "bf16": (("model.precision=bf16",), torch.float32),
}


def all_cases(config: Path, output: Path, info: RankInfo) -> dict[str, Any]:
    """Everything that test_sharded_optimizer.py looks at."""
    seen: dict[str, Any] = {}
    for mode in ("ddp", *modes(info)):
        for rule, name in trained_cases(mode):
            options = (f"parallel.data_parallel={mode}", *RULES[rule])
            run = start(config, info, options, DTYPES[name])
            seen[f"{mode} {rule} {name}"] = trained(run, STEPS)
        seen[f"{mode} state"] = state_elements(run.optimizer)
        seen[f"{mode} parts"] = len(run.optimizer.parts)
    for mode in modes(info):
        parallel = f"parallel.data_parallel={mode}"
        for name, options in (("buckets", (BUCKETS,)), ("forwards", (BUCKETS, EACH_FORWARD))):
            run = start(config, info, (parallel, *options), torch.float64)
            seen[f"{mode} {name}"] = trained(run, BUCKET_STEPS)
        for precision in ("bf16", "fp16"):
            options = (parallel, f"model.precision={precision}")
            seen[f"{mode} {precision} skip"] = warmed_up_and_skipped(config, info, options)
        for policy in POLICIES:
            clip = f"clip.policy={policy}"
            seen[f"{mode} {policy} events"] = order_of_events(start(config, info, (parallel, clip)))
            for accumulation, forwards in accumulations(policy).items():
                options = (parallel, clip, accumulation, forwards)
                seen[f"{mode} {policy} {accumulation} spoilt"] = spoilt(config, info, options)
        seen[f"{mode} waits"] = waits(start(config, info, (parallel,)))
        seen |= saved_or_loaded(config, output, info, mode)
    return seen


def saved_or_loaded(config: Path, output: Path, info: RankInfo, mode: str) -> dict[str, Any]:
    """Four ranks save, and go on; fewer go on from there."""
    seen = {}
    for name, (options, dtype) in SAVED.items():
        case = (f"parallel.data_parallel={mode}", *options)
        if info.world_size < MICRO_BATCHES:
            run = start(config, info, case, dtype, seed=2)
            seen[f"{mode} {name} loaded"] = load_and_go_on(run, output / name)
        elif mode == "shard_world":
            run = start(config, info, case, dtype)
            seen[f"{mode} {name} saved"] = save(run, output / name)
    return seen


def accumulations(policy: str) -> dict[str, str]:
    """What of an update a policy may clip, and of how many forwards."""
    accumulated = {"clip.accumulation=accumulated": "parallel.grad_accum_steps=1"}
    each = {EACH_FORWARD: "parallel.grad_accum_steps=2"} if policy in POLICIES[2:] else {}
    return accumulated | each


def main(config: Path, output: Path) -> int:
    """Do everything one after the other, in one process group."""

    def work(info: RankInfo, device: torch.device) -> int:
        seen = all_cases(config, output, info)
        folder = output / f"ranks_{info.world_size}"
        folder.mkdir(exist_ok=True)
        torch.save(seen, folder / f"rank_{info.rank}.pt")
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

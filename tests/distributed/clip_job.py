"""What test_clip_policies.py runs on N ranks at once: `clip_job.py CONFIG DATA OUTPUT`.

Every rank writes OUTPUT/rank_<n>.pt: gradients of small models, local and clipped. Then whole runs,
in which one rank's gradient is spoilt, leave their own directories there.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clipping import ClipState, clip_hook, make_clipping, plain_wire
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from mlperf_bert.parts.build import Run, build
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.train import train

FORWARDS = 2
BUCKET_CAP_MB = 0.0002  # three buckets, of a layer each
BEFORE = ("whole_before_allreduce", "bucket_before_allreduce")
POLICIES = ("none", "after_allreduce", *BEFORE)
CASES = {
    **{policy: ClipSection(policy=policy) for policy in POLICIES},
    **{
        f"{policy} each_forward": ClipSection(policy=policy, accumulation="each_forward")
        for policy in BEFORE
    },
    "equal_share": ClipSection(
        policy="bucket_before_allreduce", bucket_limit="equal_share", bucket_count=5
    ),
}
# Loss scales: all gradients far below the limit of 1, some buckets above theirs, all far above.
SCALES = {"under": 1e-4, "mixed": 0.07, "over": 1e4}
SPOILT_BY = {3: float("nan"), 5: float("inf"), 7: 1e30}  # by step; the last: its square overflows
SPOILT_STEPS = f"run.max_steps={max(SPOILT_BY) + 2}"
WARM_UP_STEPS = 3  # run.warm_up_steps' default: the hook is called in them too
RUNS = {
    **{policy: (f"clip.policy={policy}", SPOILT_STEPS) for policy in BEFORE},
    "each_forward": (
        f"clip.policy={BEFORE[1]}",
        "clip.accumulation=each_forward",
        "parallel.grad_accum_steps=2",
        SPOILT_STEPS,
    ),
    "after_allreduce": ("clip.policy=after_allreduce", SPOILT_STEPS),
    "ten in a row": (f"clip.policy={BEFORE[1]}", "run.max_steps=20"),
}
FIRST_OF_TEN = 4


def make_model() -> nn.Module:
    """The same on every rank; bucket sizes differ."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def loss_of(model: nn.Module, rank: int, forward: int, scale: float) -> Tensor:
    """A loss that differs between ranks and forwards, in size too."""
    generator = torch.Generator().manual_seed(10 * rank + forward)
    inputs = torch.randn(6, 8, generator=generator)
    return scale * (1 + rank) * model(inputs).square().sum()


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all gradients."""
    named = model.named_parameters()
    return {name.removeprefix("module."): each.grad.clone() for name, each in named}  # type: ignore[union-attr]


def local_gradients(rank: int, scale: float) -> list[dict[str, Tensor]]:
    """This rank's gradients, of each forward alone."""
    found = []
    for forward in range(FORWARDS):
        model = make_model()
        loss_of(model, rank, forward, scale).backward()
        found.append(named_gradients(model))
    return found


def wrapped(**options: Any) -> DistributedDataParallel:
    """A model of several buckets once rebuilt."""
    return DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_CAP_MB, **options)


def bucket_names(rank: int) -> list[list[str]]:
    """Parameter names of the rebuilt buckets, by torch's own hook."""
    ddp = wrapped()
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    found: list[list[str]] = []

    def record(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            found.clear()
        found.append([names[parameter] for parameter in bucket.parameters()])
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, record)
    for _ in range(2):
        loss_of(ddp, rank, 0, 1.0).backward()
    return found


def clipped(clip: ClipSection, rank: int, scale: float, **options: Any) -> dict[str, Any]:
    """Gradients and outcome of the second update, on rebuilt buckets, and what was sent then."""
    ddp = wrapped(**options)
    clipping = make_clipping(clip, ddp, plain_wire(torch.device("cpu")), forwards=FORWARDS)
    for _ in range(2):
        sent: list[Tensor] = []
        ddp.zero_grad()
        with recorded(sent):
            for forward in range(FORWARDS):
                with clipping.forward(is_last=forward == FORWARDS - 1):
                    loss_of(ddp, rank, forward, scale).backward()
        outcome = clipping.finish()
    factor = outcome.gradient_factor
    return {
        "gradients": {name: factor * each for name, each in named_gradients(ddp).items()},
        "sent": sent,
        "grad_norm": float(outcome.grad_norm),
        "clipped_fraction": float(outcome.clipped_fraction),
        "skip": float(outcome.skip),
    }


@contextmanager
def recorded(sent: list[Tensor]) -> Iterator[None]:
    """Keep a copy of all that Python code gives to all_reduce meanwhile."""
    all_reduce = dist.all_reduce

    def recording(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.clone())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = recording
    try:
        yield
    finally:
        dist.all_reduce = all_reduce


def several_updates(
    rank: int, prepare: Callable[[DistributedDataParallel], Any], view: bool
) -> Any:
    """Weights after five updates under limits that nothing reaches."""
    ddp = wrapped(gradient_as_bucket_view=view)
    state = prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for number in range(5):
        optimizer.zero_grad()
        loss_of(ddp, rank, number, 1.0).backward()
        if state is not None:
            assert state.finish().skip == 0
        optimizer.step()
    return copy.deepcopy(ddp.module.state_dict())


def with_hook(policy: Any) -> Callable[[DistributedDataParallel], ClipState]:
    """Registers the hook by itself, as docs/clip_hook.md does."""

    def prepare(ddp: DistributedDataParallel) -> ClipState:
        clip = ClipSection(policy=policy, max_norm=1e6)
        state = ClipState(clip, ddp.parameters(), dist.get_world_size())
        ddp.register_comm_hook(state, clip_hook)
        return state

    return prepare


def spoil(model: nn.Module, name: str, forwards: int) -> None:
    """Make gradients of one tensor bad from now on, in the steps that a run of this name says."""
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        step = (calls - 1) // forwards + 1 - WARM_UP_STEPS
        if name == "ten in a row":
            return gradient * float("nan") if step >= FIRST_OF_TEN else gradient
        return torch.full_like(gradient, SPOILT_BY[step]) if step in SPOILT_BY else gradient

    next(p for n, p in model.named_parameters() if n.endswith("LayerNorm.weight")).register_hook(
        hook
    )


def run(
    name: str, config: Path, data: Path, output: Path, info: RankInfo, device: torch.device
) -> Any:
    """A run in which the last rank's gradient is spoilt; the final weights."""
    sizes = (f"parallel.ranks_per_node={info.world_size}", "parallel.local_batch_size=4")
    others = (
        "checkpoint.save=never",
        "eval.interval_samples=1000000",
        "parallel.bucket_cap_mb=0.02",
    )
    case = load_config(config, (*sizes, *others, *RUNS[name]))
    seed, directory = int(case.run.seed), RunDirectory(output / name, 0)
    parts = build(
        Run(config=case, seed=seed, info=info, device=device, data_dir=data, directory=directory)
    )
    if info.rank == info.world_size - 1:
        spoil(parts.model, name, case.parallel.grad_accum_steps)
    with parts.reporter, closing(parts.metrics_file), closing(parts.log):
        outcome = train(parts)
    return {
        "steps": outcome.steps,
        "updates": int(parts.optimizer.scalar_state()["updates"]),
        "weights": copy.deepcopy(parts.model.state_dict()),
    }


def main(config: Path, data: Path, output: Path) -> int:
    """Do everything one after the other, in one process group."""

    def work(info: RankInfo, device: torch.device) -> int:
        rank = info.rank
        seen: dict[str, Any] = {"buckets": bucket_names(rank)}
        for size, scale in SCALES.items():
            seen[f"local {size}"] = local_gradients(rank, scale)
            for name, clip in CASES.items():
                seen[f"{name} {size}"] = clipped(clip, rank, scale, gradient_as_bucket_view=True)
        for view in (True, False):
            seen[f"plain {view}"] = several_updates(rank, lambda ddp: None, view)
            for policy in BEFORE:
                seen[f"{policy} {view}"] = several_updates(rank, with_hook(policy), view)
        for name in RUNS:
            seen[f"run {name}"] = run(name, config, data, output, info, device)
        torch.save(seen, output / f"rank_{rank}.pt")
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

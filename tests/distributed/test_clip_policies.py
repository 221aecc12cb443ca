"""Clip policies on two and four real ranks: formulas in float64, plain DDP, spoilt gradients."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clipping import ClipState, clip_hook, make_clipping, plain_wire
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.parts.build import Run, build
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.train import MAX_SKIPPED_IN_A_ROW, train

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


# Relative to the largest element of a gradient: fp32 sums of four ranks and a factor.
TOLERANCE = 1e-6

Array = NDArray[np.float64]
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def job(
    request: pytest.FixtureRequest,
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Seen]:
    """Where the ranks left their runs, and what they saw; they are started once for all tests."""
    output = tmp_path_factory.mktemp("clip")
    seen = what_ranks_saw(__file__, (tiny_config, synthetic_data), request.param, output)
    return output, seen


@pytest.fixture(scope="module")
def seen(job: tuple[Path, Seen]) -> Seen:
    return job[1]


def limited(gradient: Array, limit: float) -> Array:
    return gradient * min(1.0, limit / float(np.linalg.norm(gradient)))


def joined(gradients: dict[str, torch.Tensor], names: list[str]) -> Array:
    return np.concatenate([gradients[name].double().numpy().ravel() for name in names])


class Formula:
    """What the policies say, in float64, with every rank's local gradients at hand."""

    def __init__(self, seen: Seen, size: str) -> None:
        self.buckets = seen[0]["buckets"]
        self.names = [name for bucket in self.buckets for name in bucket]
        # By rank and forward: the gradient's parts, by bucket.
        self.local = [
            [[joined(of_forward, bucket) for bucket in self.buckets] for of_forward in rank]
            for rank in (one[f"local {size}"] for one in seen)
        ]
        self.numel = sum(self.local[0][0][b].size for b in range(len(self.buckets)))
        assert sorted(self.names) == sorted(seen[0][f"local {size}"][0])

    def gradient(self, case: str) -> Array:
        clip = CASES[case]
        mean = np.mean([self.contribution(case, rank) for rank in range(len(self.local))], axis=0)
        return limited(mean, clip.max_norm) if clip.policy == "after_allreduce" else mean

    def contribution(self, case: str, rank: int) -> Array:
        """A rank's part of the mean, not divided by the ranks."""
        forwards = self.local[rank]
        if CASES[case].accumulation == "each_forward":
            return np.sum([self.clipped(case, parts, 1 / FORWARDS) for parts in forwards], axis=0)
        return self.clipped(case, [np.sum(each, axis=0) for each in zip(*forwards, strict=True)], 1)

    def clipped(self, case: str, parts: list[Array], share: float) -> Array:
        clip = CASES[case]
        if clip.policy == "whole_before_allreduce":
            return limited(np.concatenate(parts), share * clip.max_norm)
        if clip.policy == "bucket_before_allreduce":
            limits = [share * self.limit(case, part.size) for part in parts]
            return np.concatenate(list(map(limited, parts, limits)))
        return np.concatenate(parts)

    def limit(self, case: str, numel: int) -> float:
        clip = CASES[case]
        if clip.bucket_limit == "equal_share":
            return clip.max_norm / clip.bucket_count**0.5
        return clip.max_norm * (numel / self.numel) ** 0.5


@pytest.mark.parametrize("size", SCALES)
@pytest.mark.parametrize("case", CASES)
def test_each_policy_equals_its_formula(seen: Seen, case: str, size: str) -> None:
    formula = Formula(seen, size)
    expected = formula.gradient(case)
    for rank in seen:
        found = joined(rank[f"{case} {size}"]["gradients"], formula.names)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert rank[f"{case} {size}"]["skip"] == 0


def test_policies_differ_where_some_is_above_its_limit(seen: Seen) -> None:
    formula = Formula(seen, "mixed")
    gradients = [formula.gradient(case) for case in CASES]
    for number, one in enumerate(gradients):
        for other in gradients[:number]:
            assert np.abs(one - other).max() > 100 * TOLERANCE * np.abs(one).max()
    assert len(formula.buckets) > 2


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("policy", BEFORE)
def test_under_the_limit_training_is_plain_ddp_bit_for_bit(
    seen: Seen, policy: str, view: bool
) -> None:
    for rank in seen:
        plain, hooked = rank[f"plain {view}"], rank[f"{policy} {view}"]
        assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].policy in BEFORE])
def test_no_rank_sends_more_than_its_share(seen: Seen, case: str) -> None:
    formula = Formula(seen, "over")
    for rank in seen:
        sent = [bucket.double().numpy() for bucket in rank[f"{case} over"]["sent"]]
        assert [bucket.size for bucket in sent] == [part.size for part in formula.local[0][0]]
        most = CASES[case].max_norm / len(seen) * (1 + TOLERANCE)
        if CASES[case].policy == "whole_before_allreduce":
            sent = [np.concatenate(sent)]
        elif CASES[case].bucket_limit == "by_size":
            assert np.linalg.norm(np.concatenate(sent)) <= most
        for part in sent:
            limit = formula.limit(case, part.size) / len(seen)
            assert np.linalg.norm(part) <= limit * (1 + TOLERANCE)


@pytest.mark.parametrize("policy", BEFORE)
def test_clipped_share_and_own_norm_are_counted(seen: Seen, policy: str) -> None:
    formula = Formula(seen, "mixed")
    shares = []
    for number, rank in enumerate(seen):
        parts = [np.sum(each, axis=0) for each in zip(*formula.local[number], strict=True)]
        norm = np.linalg.norm(np.concatenate(parts))
        over = [bool(np.linalg.norm(p) > formula.limit(policy, p.size)) for p in parts]
        expected = float(norm > 1) if policy == "whole_before_allreduce" else np.mean(over)
        found = rank[f"{policy} mixed"]
        assert found["clipped_fraction"] == pytest.approx(expected)
        assert found["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        shares += over
        assert rank[f"{policy} under"]["clipped_fraction"] == 0
        assert rank[f"{policy} over"]["clipped_fraction"] == 1
    assert 0 < sum(shares) < len(shares)


def records(output: Path, name: str) -> list[dict[str, Any]]:
    lines = (output / name / "run_0" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "ten in a row"])
def test_all_ranks_skip_the_step_in_which_one_is_spoilt(job: tuple[Path, Seen], name: str) -> None:
    output, seen = job
    steps = max(SPOILT_BY) + 2
    skipped = [record["skipped_steps"] for record in records(output, name)]
    assert skipped == [int(step in SPOILT_BY) for step in range(1, steps + 1)]
    first = seen[0][f"run {name}"]
    for rank in seen:
        run = rank[f"run {name}"]
        assert run["steps"] == steps
        assert run["updates"] == steps - len(SPOILT_BY)  # what bias correction goes by
        for key, weight in run["weights"].items():
            assert torch.isfinite(weight).all()
            assert torch.equal(weight, first["weights"][key])


def test_ten_skipped_steps_in_a_row_stop_the_run(job: tuple[Path, Seen]) -> None:
    output, seen = job
    last = FIRST_OF_TEN + MAX_SKIPPED_IN_A_ROW - 1
    assert {rank["run ten in a row"]["steps"] for rank in seen} == {last}
    log = (output / "ten in a row" / "run_0" / "stdout.log").read_text().splitlines()
    said = [line for line in log if "in a row" in line and "stopped" in line]
    assert len(said) == 1
    assert f"{MAX_SKIPPED_IN_A_ROW} steps" in said[0] and "optim.learning_rate" in said[0]


def all_cases(config: Path, data: Path, output: Path, info: RankInfo) -> dict[str, Any]:
    """Gradients of small models, local and clipped; then whole runs, which leave directories."""
    rank = info.rank
    found: dict[str, Any] = {"buckets": bucket_names(rank)}
    for size, scale in SCALES.items():
        found[f"local {size}"] = local_gradients(rank, scale)
        for name, clip in CASES.items():
            found[f"{name} {size}"] = clipped(clip, rank, scale, gradient_as_bucket_view=True)
    for view in (True, False):
        found[f"plain {view}"] = several_updates(rank, lambda ddp: None, view)
        for policy in BEFORE:
            found[f"{policy} {view}"] = several_updates(rank, with_hook(policy), view)
    for name in RUNS:
        found[f"run {name}"] = run(name, config, data, output, info, torch.device("cpu"))
    return found


if __name__ == "__main__":
    places = [Path(each) for each in sys.argv[1:]]
    as_rank(lambda info: all_cases(*places, info), places[-1])

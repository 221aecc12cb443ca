"""Measurements of steps on one and two ranks: the gradients' noise, and slow ranks.

Noise is held against gradients computed apart. A rank whose own work is slow is named by all ranks,
though all have the same step time.
"""

import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.run.stragglers import StragglerWatch
from mlperf_bert.step.eager import training_loss_sums
from small_runs import CPU, Run, start

STEPS, INTERVAL = 4, 2
# Names of cases, and their settings; every number of ranks trains on the same forwards.
CASES = {
    "ddp adamw": (),
    "ddp unclipped before": ("clip.policy=bucket_before_allreduce", "clip.max_norm=1000"),
    "ddp clipped before": ("clip.policy=whole_before_allreduce", "clip.max_norm=0.01"),
    "ddp clipped after": ("clip.max_norm=0.01",),
    "flat unclipped": ("parallel.data_parallel=flat", "clip.policy=none"),
    "shard_world lamb": ("parallel.data_parallel=shard_world", "optim.name=lamb"),
}
WATCHED_STEPS = 3
SHORT_S, LONG_S = 0.01, 0.15
MODES = ("ddp", "flat", "shard_world")
EQUAL, UNEQUAL = (100, 100), (100, round(100 * LONG_S / SHORT_S))  # tokens of the ranks, as planned


def trained(run: Run) -> dict[str, Any]:
    """Measurements of STEPS steps, [measurements, 3], and the resulting weights."""
    found = [run.step(step, run.micro_batches(step)).noise for step in range(1, STEPS + 1)]
    assert [each is not None for each in found] == [
        step % INTERVAL == 0 and bool(run.config.run.noise_interval_steps)
        for step in range(1, STEPS + 1)
    ]
    measured = [each for each in found if each is not None]
    return {
        "measured": torch.stack(measured) if measured else None,
        "weights": run.optimizer.exact_weights(),
    }


def watched(run: Run, sleep_s: float, tokens: tuple[int, int]) -> dict[str, Any]:
    """Steps whose forwards sleep on this rank; the planned tokens need not be the real ones."""
    model = cast(BertForPretraining, run.model)
    watch = StragglerWatch(run.config.run, run.info, model, CPU)
    plan = SimpleNamespace(num_tokens=np.array(tokens)[:, None])
    batch = cast(StepBatch, SimpleNamespace(plan=plan, wait_ms=0.0))
    run.steps(1, 1)  # warm-up: none of it counts
    model.bert.encoder.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    for step in range(2, WATCHED_STEPS + 2):
        watch.step_begins(batch)
        run.step(step, run.micro_batches(step))
    run.optimizer.settle()
    return {
        "lines": watch.compare((0.0, 1)),
        "slowest": watch.slowest_over_median,
        "then": watch.compare((0.0, 1)),
    }


RANKS = 2
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
CLIPPED_BEFORE = "ddp clipped before"

Gradient = dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of each of two ranks in every case."""
    return what_ranks_saw(__file__, (tiny_config,), RANKS, tmp_path_factory.mktemp("noise"))


def gradients_of(run: Run, batches: tuple[UnpaddedBatch, ...]) -> list[Gradient]:
    """Each forward's, by autograd alone, before the step that is to measure them."""
    names, parameters = zip(*run.model.named_parameters(), strict=True)
    found = []
    for batch in batches:
        loss = pretraining_loss(training_loss_sums(run.model, batch, "fp32"), batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(names, gradients, strict=True)
        found.append({name: each for name, each in pairs if each is not None})
    return found


def square(gradient: Gradient) -> float:
    return float(sum(each.square().sum() for each in gradient.values()))


def mean(gradients: list[Gradient]) -> Gradient:
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in gradients[0]}


def test_forwards_of_an_update_are_measured_as_defined(tiny_config: Path) -> None:
    settings = (f"run.noise_interval_steps={INTERVAL}",)
    run = start(tiny_config, ONE_RANK, settings, torch.float64)
    for step in range(1, 5):
        batches = run.micro_batches(step)
        # Four forwards' gradients add up to the update's: each times four is one of its own.
        forwards = [
            {name: each * len(batches) for name, each in gradient.items()}
            for gradient in gradients_of(run, batches)
        ]
        measured = run.step(step, batches).noise
        if step % INTERVAL:
            assert measured is None
            continue
        assert measured is not None
        expected = [sum(map(square, forwards)) / len(forwards), square(mean(forwards)), 1.0]
        assert measured.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("interval", [1, 3])
def test_one_forward_an_update_is_measured_by_two_updates(tiny_config: Path, interval: int) -> None:
    settings = (f"run.noise_interval_steps={interval}", "parallel.grad_accum_steps=1")
    run = start(tiny_config, ONE_RANK, settings, torch.float64)
    before: Gradient = {}
    for step in range(1, 7):
        batches = run.micro_batches(step)
        (gradient,) = gradients_of(run, batches)
        measured = run.step(step, batches).noise
        if step % interval or step == 1:
            assert measured is None
        else:
            pair = [before, gradient]
            expected = [sum(map(square, pair)) / 2, square(mean(pair)), 1.0]
            assert measured is not None
            assert measured.tolist() == pytest.approx(expected, rel=1e-9)
        before = gradient


def test_made_up_steps_are_not_compared_with_the_first(tiny_config: Path) -> None:
    settings = ("run.noise_interval_steps=1", "parallel.grad_accum_steps=1")
    run = start(tiny_config, ONE_RANK, settings)
    run.step(3, run.micro_batches(3))
    with run.step as step:
        assert step(4, run.micro_batches(4)).noise is None
        assert step(5, run.micro_batches(5)).noise is not None


@pytest.mark.parametrize("case", CASES)
def test_measuring_changes_no_bit_of_the_weights(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        on, off = (rank[f"{case} {switch}"]["weights"] for switch in ("on", "off"))
        assert on.keys() == off.keys()
        assert all(torch.equal(on[name], off[name]) for name in on)
        assert rank[f"{case} off"]["measured"] is None


@pytest.mark.parametrize("case", [case for case in CASES if case != CLIPPED_BEFORE])
def test_two_ranks_measure_what_one_rank_does(
    ranks: list[dict[str, Any]], tiny_config: Path, case: str
) -> None:
    """Whoever computes an update's four forwards; averaged over the ranks, as metrics do it."""
    settings = (*CASES[case], "parallel.data_parallel=ddp", f"run.noise_interval_steps={INTERVAL}")
    alone = trained(start(tiny_config, ONE_RANK, settings, torch.float64))["measured"]
    found = torch.stack([rank[f"{case} on"]["measured"] for rank in ranks]).mean(0)
    assert found.shape == (STEPS // INTERVAL, 3)
    torch.testing.assert_close(found, alone, rtol=1e-8, atol=0)
    assert bool((found[:, 2] == 1).all())
    assert bool((found[:, 0] > found[:, 1]).all())  # four forwards are noisier than their mean


def test_updates_that_were_clipped_before_they_were_averaged_do_not_count(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert bool((rank[f"{CLIPPED_BEFORE} on"]["measured"][:, 2] == 0).all())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_autocast"])
def test_16_bit_gradients_are_measured_without_their_scale(
    tiny_config: Path, precision: str
) -> None:
    """The loss scale of fp16 is 2^10 here; what rounding leaves is within 2 %."""
    same = (f"run.noise_interval_steps={STEPS}", "optim.initial_loss_scale=1024")
    measured = []
    for each in ("fp32", precision):
        run = start(tiny_config, ONE_RANK, (*same, f"model.precision={each}"))
        measured.append(trained_last(run))
    assert measured[1].tolist() == pytest.approx(measured[0].tolist(), rel=0.02)


def trained_last(run: Run) -> Tensor:
    *_, last = (run.step(step, run.micro_batches(step)).noise for step in range(1, STEPS + 1))
    assert last is not None
    return last


def test_an_update_that_is_skipped_does_not_count(tiny_config: Path) -> None:
    run = start(tiny_config, ONE_RANK, ("run.noise_interval_steps=1",))
    run.step(1, run.micro_batches(1))
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    measured = run.step(2, run.micro_batches(2)).noise
    assert measured is not None and measured[2] == 0


class HostReads(TorchDispatchMode):
    """Counts what reads a value back to the host, for which a GPU's work would be waited for."""

    found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero")
        self.found += func.overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("forwards", [1, 4])
def test_measuring_reads_nothing_back(tiny_config: Path, forwards: int) -> None:
    reads = []
    for interval in (0, 1):
        settings = (f"run.noise_interval_steps={interval}", f"parallel.grad_accum_steps={forwards}")
        run = start(tiny_config, ONE_RANK, settings)
        with HostReads() as counted:
            for step in (1, 2):
                measured = run.step(step, run.micro_batches(step)).noise
        assert (measured is None) == (interval == 0)
        reads.append(counted.found)
    assert reads[1] == reads[0]
    with HostReads() as counted:
        assert measured is not None
        measured.sum().item()
    assert counted.found == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_rank_that_sleeps_is_named(ranks: list[dict[str, Any]], mode: str) -> None:
    one, other = (each[mode] for each in ranks)
    assert one == other
    (line,) = one["lines"]
    assert line.startswith(f"rank 1 on {socket.gethostname()} is slow: ")
    assert line.endswith("(run.straggler_factor 1.5)")
    assert float(line.split("is slow: ")[1].split(" s")[0]) >= LONG_S
    assert one["slowest"] > 1.5


def test_a_rank_with_more_tokens_is_not_named(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["more tokens"]["lines"] == []
        assert each["more tokens"]["slowest"] < 1.5


def test_steps_before_a_comparison_do_not_count_in_the_next(ranks: list[dict[str, Any]]) -> None:
    assert all(each[mode]["then"] == [] for each in ranks for mode in MODES)


def all_cases(config: Path, info: RankInfo) -> dict[str, Any]:
    """Measurements and weights for each way to reduce gradients, measuring on and off.

    And who is slow: rank 1 sleeps longer.
    """
    found = {}
    for name, settings in CASES.items():
        for interval in (INTERVAL, 0):
            case = (*settings, f"run.noise_interval_steps={interval}")
            run = start(config, info, case, torch.float64)
            found[f"{name} {'on' if interval else 'off'}"] = trained(run)
    sleep_s = LONG_S if info.rank == 1 else SHORT_S
    for mode in MODES:
        run = start(config, info, (f"parallel.data_parallel={mode}",))
        found[mode] = watched(run, sleep_s, EQUAL)
    return found | {"more tokens": watched(start(config, info, ()), sleep_s, UNEQUAL)}


if __name__ == "__main__":
    as_rank(lambda info: all_cases(Path(sys.argv[1]), info), Path(sys.argv[2]))

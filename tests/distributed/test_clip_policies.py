"""Clip policies on two and four real ranks: formulas in float64, plain DDP, spoilt gradients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_job import BEFORE, CASES, FIRST_OF_TEN, FORWARDS, RUNS, SCALES, SPOILT_BY
from numpy.typing import NDArray

from forked_ranks import run_ranks
from mlperf_bert.train import MAX_SKIPPED_IN_A_ROW

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
) -> Path:
    """The directory that the job wrote into; its ranks are started once for all tests."""
    output = tmp_path_factory.mktemp("clip")
    script = Path(__file__).with_name("clip_job.py")
    statuses, printed = run_ranks(script, (tiny_config, synthetic_data, output), request.param)
    assert statuses == [0] * request.param, printed
    return output


@pytest.fixture(scope="module")
def seen(job: Path) -> Seen:
    paths = sorted(job.glob("rank_*.pt"))
    return [torch.load(path, weights_only=True) for path in paths]


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


def records(job: Path, name: str) -> list[dict[str, Any]]:
    lines = (job / name / "run_0" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "ten in a row"])
def test_all_ranks_skip_the_step_in_which_one_is_spoilt(job: Path, seen: Seen, name: str) -> None:
    steps = max(SPOILT_BY) + 2
    skipped = [record["skipped_steps"] for record in records(job, name)]
    assert skipped == [int(step in SPOILT_BY) for step in range(1, steps + 1)]
    first = seen[0][f"run {name}"]
    for rank in seen:
        run = rank[f"run {name}"]
        assert run["steps"] == steps
        assert run["updates"] == steps - len(SPOILT_BY)  # what bias correction goes by
        for key, weight in run["weights"].items():
            assert torch.isfinite(weight).all()
            assert torch.equal(weight, first["weights"][key])


def test_ten_skipped_steps_in_a_row_stop_the_run(job: Path, seen: Seen) -> None:
    last = FIRST_OF_TEN + MAX_SKIPPED_IN_A_ROW - 1
    assert {rank["run ten in a row"]["steps"] for rank in seen} == {last}
    log = (job / "ten in a row" / "run_0" / "stdout.log").read_text().splitlines()
    said = [line for line in log if "in a row" in line and "stopped" in line]
    assert len(said) == 1
    assert f"{MAX_SKIPPED_IN_A_ROW} steps" in said[0] and "optim.learning_rate" in said[0]

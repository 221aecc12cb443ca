"""The flat reducer and DDP's hook on two and four ranks: policies and dtypes against formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_job import CASES, POLICIES, SCALES
from reducer_job import WIRES
from test_clip_policies import TOLERANCE, Array, Formula

from forked_ranks import run_ranks
from mlperf_bert.distributed.clipping import DTYPES

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    output = tmp_path_factory.mktemp("reducer")
    script = Path(__file__).with_name("reducer_job.py")
    statuses, printed = run_ranks(script, (output,), request.param)
    assert statuses == [0] * request.param, printed
    return [torch.load(path, weights_only=True) for path in sorted(output.glob("rank_*.pt"))]


def modes(seen: Seen) -> tuple[str, ...]:
    return ("flat", "shard_world", *(["shard_node"] if len(seen) > 2 else []))


def formula_of(seen: Seen, dtype: str, size: str) -> Formula:
    local = f"local {dtype} {size}"
    names = ({"buckets": rank[f"buckets {dtype}"], f"local {size}": rank[local]} for rank in seen)
    return Formula(list(names), size)


def found_by(seen: Seen, case: str, formula: Formula) -> list[Array]:
    """The gradient that each rank has a part of: its own part, and the others' from elsewhere."""
    whole = {}
    for rank in seen:
        for name, (first, values) in rank[case]["gradients"].items():
            part = slice(first, first + len(values))
            own = whole.setdefault(name, np.full(size_of(seen, name), np.nan))
            assert np.isnan(own[part]).all() or np.array_equal(own[part], values)
            own[part] = values
    return np.concatenate([whole[name] for name in formula.names])


def size_of(seen: Seen, name: str) -> int:
    return int(seen[0]["local fp32 mixed"][0][name].numel())


@pytest.mark.parametrize("size", SCALES)
@pytest.mark.parametrize("case", CASES)
def test_each_policy_equals_its_formula(seen: Seen, case: str, size: str) -> None:
    formula = formula_of(seen, "fp32", size)
    expected = formula.gradient(case)
    assert len(formula.buckets) > 2
    for mode in modes(seen):
        found = found_by(seen, f"{mode} {case} {size}", formula)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
        for rank in seen:
            assert rank[f"{mode} {case} {size}"]["skip"] == 0


def unit(*dtypes: str) -> float:
    """Largest relative error of rounding to the coarsest of them."""
    return max(torch.finfo(DTYPES[dtype]).eps for dtype in dtypes) / 2


def assert_within_roundings(
    seen: Seen, case: str, formula: Formula, policy: str, roundings: float
) -> None:
    """Elements are off by so many units of the largest that a rank sends at most."""
    contributions = [formula.contribution(policy, rank) for rank in range(len(seen))]
    largest = max(float(np.abs(each).max()) for each in contributions)
    found = found_by(seen, case, formula)
    assert np.abs(found - formula.gradient(policy)).max() <= roundings * largest
    for rank in seen:
        assert rank[case]["skip"] == 0


@pytest.mark.parametrize(("dtype", "wire"), WIRES)
@pytest.mark.parametrize("policy", POLICIES)
def test_dtypes_of_gradients_and_wire(seen: Seen, policy: str, dtype: str, wire: str) -> None:
    formula = formula_of(seen, dtype, "mixed")
    sent_in = dtype if wire == "as_gradients" else wire
    # The sum of two forwards, what is sent, a sum for each rank, and the result are rounded.
    roundings = (3 + len(seen)) * unit(dtype, sent_in)
    of_ddp = () if policy == "bucket_before_allreduce" else ("ddp",)  # its buckets are others
    for mode in (*of_ddp, *modes(seen)):
        case = f"{mode} {policy} {dtype} {wire} mixed"
        assert_within_roundings(seen, case, formula, policy, roundings)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fp16_keeps_tiny_gradients(seen: Seen, policy: str, dtype: str) -> None:
    formula = formula_of(seen, dtype, "tiny")
    exact = formula.contribution(policy, 0) / len(seen)
    unscaled = exact.astype(np.float16).astype(np.float64)
    roundings = (3 + len(seen)) * unit(dtype, "fp16")
    assert np.abs(unscaled - exact).max() > 5 * roundings * np.abs(exact).max()
    of_ddp = () if policy == "bucket_before_allreduce" else ("ddp",)
    for mode in (*of_ddp, *modes(seen)):
        assert_within_roundings(
            seen, f"{mode} {policy} {dtype} fp16 tiny", formula, policy, roundings
        )

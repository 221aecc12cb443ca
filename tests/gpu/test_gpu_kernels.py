"""Update kernels on a GPU: equal to the readable updates, repeatable, and part of a CUDA graph."""

import pytest

from graph_cases import captured as capture
from kernel_cases import (
    CHECKS,
    DTYPES,
    RULES,
    assert_equal,
    make_case,
    make_scalars,
    set_gradients,
    update,
)

DEVICE = "cuda"
SCALARS = ("learning_rate", "correction_1", "correction_2", "gradient_factor", "skip")


@pytest.fixture
def kernels(triton):
    from mlperf_bert.optim import triton_kernels

    return triton_kernels


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(kernels, check, rule, dtypes):
    check(kernels, rule, dtypes, DEVICE)


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_captured_update_follows_its_scalars(kernels, rule, dtypes):
    eager, captured = make_case(dtypes, DEVICE), make_case(dtypes, DEVICE)
    static = make_scalars(1, DEVICE, skip=1.0)
    # Its call before, which compiles, changes nothing.
    graph, _ = capture(lambda: update(kernels, rule, captured.shard, static))
    for step, skip in ((1, 0.0), (2, 1.0), (3, 0.0)):
        scalars = make_scalars(step, DEVICE, skip)
        for name in SCALARS:
            getattr(static, name).copy_(getattr(scalars, name))
        for case in (eager, captured):
            set_gradients(case, step)
        update(kernels, rule, eager.shard, scalars)
        graph.replay()
        assert_equal(captured.shard, eager.shard)

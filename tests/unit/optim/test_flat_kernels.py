"""Update kernels of flat buffers: compiled ones on the CPU, Triton's interpreted and compiled."""

import pytest
import torch

from kernel_cases import (
    CHECKS,
    CONSTANTS,
    DTYPES,
    RULES,
    assert_equal,
    make_case,
    make_scalars,
    ratios_of,
    set_gradients,
)
from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.optim import cpu_kernels
from mlperf_bert.optim.cpu_kernels import MIN_BLOCKS_PER_THREAD


@pytest.fixture
def threads():
    """Lets a test set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("check", CHECKS)
def test_cpu_kernels(check, rule, dtypes):
    check(cpu_kernels, rule, dtypes, "cpu")


@pytest.mark.usefixtures("threads")
def test_lamb_does_not_depend_on_the_number_of_threads():
    numel = {1: 2 * MIN_BLOCKS_PER_THREAD * BLOCK, 0: 5, 2: MIN_BLOCKS_PER_THREAD * BLOCK}
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        case = make_case("fp32", "cpu", numel)
        set_gradients(case, 1)
        scalars = make_scalars(1, "cpu")
        squares = cpu_kernels.lamb_norms(case.shard, CONSTANTS, scalars)
        cpu_kernels.lamb_apply(case.shard, CONSTANTS, scalars, ratios_of(case.shard, squares))
        found.append((case.shard, squares))
    one_thread, of_one_thread = found[0]
    for shard, squares in found[1:]:
        assert torch.equal(squares, of_one_thread)
        assert_equal(shard, one_thread)

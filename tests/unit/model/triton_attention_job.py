"""What test_attention.py runs by itself: the kernels in Triton's interpreter, without a GPU.

The interpreter has to be chosen before triton is imported. `test_kernel_gate.py` compiles them.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from attention_cases import check_policy, make_case
from mlperf_bert.model import triton_attention


def interpret() -> None:
    attend = triton_attention.attend
    for head_size, probability in ((16, 0.0), (32, 0.3), (64, 0.3)):
        options = {"head_size": head_size, "spare_rows": 3}
        check_policy(attend, probability, torch.float32, 1e-5, **options)
    check_policy(attend, 0.3, torch.float16, 3e-3)
    check_strides()


def check_strides() -> None:
    """Columns of one tensor, as a fused projection leaves them; a gradient that is one number.

    The gradients of queries, keys and values are columns of one tensor again.
    """
    case = make_case((70, 9))
    site = case.site(0.3)
    columns = torch.stack(case.inputs, dim=1).float()
    gradients = []
    for inputs in (columns.unbind(1), [x.float() for x in case.inputs]):
        leaves = [x.requires_grad_() for x in inputs]
        context = triton_attention.attend(*leaves, case.layout, site)
        gradients.append(torch.autograd.grad(context.sum(), leaves))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    first, *others = gradients[0]
    for number, other in enumerate(others, start=1):
        assert other.data_ptr() == first[:, 0, 0].data_ptr() + number * 4 * first[0].numel()


if __name__ == "__main__":
    interpret()

"""What test_attention.py runs by itself: `triton_attention_job.py interpret|compile`; no GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing, because the interpreter takes Python
that the compiler refuses.
"""

import re
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
from attention_cases import check_policy, make_case, results
from mlperf_bert.model import triton_attention
from triton_compile import compile_instead

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_BYTES = 227 * 1024  # that a program may have there
REGISTERS = 65_536  # of a multiprocessor
STACK_BYTES = (
    96  # a thread's, for what its registers do not hold: zero for heads of 64 in Triton 3.6
)


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


def compile_all() -> None:
    for head_size, probability in (*((size, 0.1) for size in triton_attention.TILES), (64, 0.0)):
        JITFunction.run = partialmethod(compile_within_limits, 1 if head_size == 128 else 2)
        case = make_case((130, 7), head_size=head_size, max_length=512)
        results(triton_attention.attend, case, probability, torch.bfloat16)


def compile_within_limits(kernel: Any, programs: int, /, *arguments: Any, **options: Any) -> None:
    """Called where a kernel is launched; so many programs must fit on a multiprocessor."""
    done = compile_instead(kernel, *arguments, **options)
    assert done.metadata.shared <= SHARED_BYTES / programs
    if done.metadata.name == "_attention_keep_bits":
        return
    assert "wgmma.mma_async" in done.asm["ptx"]  # the matrix products of compute capability 9.0
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        command = (CUOBJDUMP, "--dump-resource-usage", file.name)
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, stack_bytes = map(int, found.groups())
    assert programs * registers * 32 * done.metadata.num_warps <= REGISTERS
    assert stack_bytes <= STACK_BYTES


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

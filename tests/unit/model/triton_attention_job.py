"""What test_attention.py runs by itself: `triton_attention_job.py interpret|compile`; no GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing, because the interpreter takes Python
that the compiler refuses.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
from attention_cases import check_policy, make_case, results
from mlperf_bert.model import triton_attention

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that a program may have there
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def interpret() -> None:
    attend = triton_attention.attend
    for head_size, probability in ((16, 0.0), (16, 0.3), (64, 0.3)):
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
    JITFunction.run = compile_instead
    for head_size, probability in (*((size, 0.1) for size in triton_attention.TILES), (64, 0.0)):
        case = make_case((130, 7), head_size=head_size, max_length=512)
        results(triton_attention.attend, case, probability, torch.bfloat16)


def compile_instead(
    kernel: Any, *arguments: Any, num_warps: int, num_stages: int, **_: Any
) -> None:
    """Called where a kernel is launched."""
    signature, constants, aligned = {}, {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        is_tensor = isinstance(value, Tensor)
        signature[parameter.name] = TYPES[value.dtype] if is_tensor else "i32"
        if is_tensor or (value % 16 == 0 and not parameter.do_not_specialize):
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    done = triton.compile(source, target=HOPPER, options=options)
    assert done.metadata.shared <= SHARED_BYTES
    print(kernel.__name__, constants["head_size"], done.metadata.shared, "bytes shared")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

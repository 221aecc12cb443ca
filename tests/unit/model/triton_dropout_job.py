"""What test_dropout.py runs by itself: `triton_dropout_job.py interpret|compile`, without a GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing.
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
from dropout_cases import CHECKS, DTYPES, site_of
from mlperf_bert.model import triton_dropout

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def interpret() -> None:
    for check in CHECKS:
        print(check.__name__, flush=True)
        check(triton_dropout, "cpu")


def compile_all() -> None:
    JITFunction.run = compile_instead
    site = site_of(40)
    triton_dropout.keep_bits(site, 100)
    cu_seqlens = torch.tensor([0, 10, 40], dtype=torch.int32)
    triton_dropout.attention_keep_bits(site, 3, cu_seqlens, 30)
    for dtype in DTYPES:
        x = torch.zeros(40, 100, dtype=dtype, requires_grad=True)
        triton_dropout.dropout(x, site).sum().backward()


def compile_instead(kernel: Any, *arguments: Any, **_: Any) -> None:
    """Called where a kernel is launched."""
    signature, constants = {}, {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
    done = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER)
    assert done.asm["cubin"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

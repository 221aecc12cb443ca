"""Compiles Triton kernels for a GPU that is not there, where they would be launched."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_instead(kernel: Any, *arguments: Any, **options: Any) -> Any:
    """What `JITFunction.run` may be set to: the compiled kernel, with alignment as at a launch."""
    signature, constants, aligned = {}, {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            is_aligned = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            is_aligned = value % 16 == 0 and not parameter.do_not_specialize
        if is_aligned:
            aligned[(number,)] = [["tt.divisibility", 16]]
    names = ("num_warps", "num_stages", "maxnreg")
    chosen = {name: options[name] for name in names if name in options}
    source = ASTSource(kernel, signature, constants, aligned)
    done = triton.compile(source, target=HOPPER, options=chosen)
    assert done.asm["cubin"]
    return done

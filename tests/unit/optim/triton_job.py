"""What test_flat_kernels.py runs by itself: `triton_job.py interpret|compile`, without a GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing, because the interpreter takes Python
that the compiler refuses. And it cuts floats off where bfloat16 should be rounded, so rounding is
compared in fp16 alone.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
from kernel_cases import CHECKS, DTYPES, RULES, check_updates, make_case, make_scalars, update
from mlperf_bert.optim import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
}


def interpret() -> None:
    for check, rule, dtypes in product(CHECKS, RULES, DTYPES):
        if check is check_updates or dtypes in ("fp32", "fp16"):  # it is slow
            print(check.__name__, rule, dtypes, flush=True)
            check(triton_kernels, rule, dtypes, "cpu")


def compile_all() -> None:
    JITFunction.run = compile_instead
    for rule, dtypes in product(RULES, DTYPES):
        update(triton_kernels, rule, make_case(dtypes, "cpu").shard, make_scalars(1, "cpu"))


def compile_instead(kernel: Any, *arguments: Any, **_: Any) -> None:
    """Called where a kernel is launched."""
    given = dict(zip(kernel.arg_names, arguments, strict=True))
    signature = {
        name: f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "constexpr"
        for name, value in given.items()
    }
    constants = {name: value for name, value in given.items() if signature[name] == "constexpr"}
    done = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER)
    assert done.asm["cubin"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

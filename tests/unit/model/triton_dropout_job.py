"""What test_dropout.py runs by itself: `triton_dropout_job.py interpret|compile`, without a GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing.
"""

import sys
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from dropout_cases import CHECKS, DTYPES, site_of
from kernel_table import compile_instead
from mlperf_bert.model import triton_dropout


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


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

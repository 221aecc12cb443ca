"""What test_flat_kernels.py runs by itself: `triton_job.py interpret|compile`, without a GPU.

The first runs the kernels in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles them for a GPU and runs nothing, because the interpreter takes Python
that the compiler refuses. And it cuts floats off where bfloat16 should be rounded, so rounding is
compared in fp16 alone.
"""

import sys
from itertools import product
from pathlib import Path

from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from kernel_cases import CHECKS, DTYPES, RULES, check_updates, make_case, make_scalars, update
from kernel_table import compile_instead
from mlperf_bert.optim import triton_kernels


def interpret() -> None:
    for check, rule, dtypes in product(CHECKS, RULES, DTYPES):
        if check is check_updates or dtypes in ("fp32", "fp16"):  # it is slow
            print(check.__name__, rule, dtypes, flush=True)
            check(triton_kernels, rule, dtypes, "cpu")


def compile_all() -> None:
    JITFunction.run = compile_instead
    for rule, dtypes in product(RULES, DTYPES):
        update(triton_kernels, rule, make_case(dtypes, "cpu").shard, make_scalars(1, "cpu"))


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

"""Compile every Triton kernel of a BERT-large step, and print statistics of their machine code.

    python tools/kernel_table.py [--capability 90] [--only REGEX] [--keep DIR]

No GPU is needed. The output is a JSON list of objects, one per kernel. Each object contains the
registers per thread, the bytes of stack and of shared memory, the loads and stores of spilled
registers, and the programs per multiprocessor. It also counts instructions, and among them those
for matrices and stores of 1 and of 16 bytes. `tests/unit/model/test_kernel_gate.py` checks these
values against bounds.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks/bert/implementations/pytorch"))

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
# Limits of a multiprocessor: registers, threads, programs, and bytes of shared memory by compute
# capability. Source: CUDA C++ programming guide, compute capabilities.
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024}
# Sizes of BERT-large, except for the number of rows. It does not change the code, so it is small.
SEQUENCES, TOKENS, LONGEST, DUMMIES = 8, 2048, 512, 4
HIDDEN, WIDE, HEADS, VOCABULARY, MASKED = 1024, 4096, 16, 30_528, 64
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")
Launch = Callable[[], object]


def compile_instead(kernel: Any, *arguments: Any, capability: int = 90, **options: Any) -> Any:
    """Compile a kernel as a launch with these arguments would, and return the compiled kernel.

    In particular, the compiler assumes the alignment of these arguments. This function replaces
    Triton's `JITFunction.run`, but does not run the kernel.
    """
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...], specializes: bool) -> Any:
        if isinstance(value, tuple):
            parts = enumerate(value)
            return tuple(type_of(part, (*path, index), specializes) for index, part in parts)
        if value is None:
            constants[path] = None
            return "constexpr"
        is_tensor = isinstance(value, Tensor)
        if (value.data_ptr() if is_tensor else value) % 16 == 0 and (is_tensor or specializes):
            aligned[path] = [["tt.divisibility", 16]]
        return TYPES[value.dtype] if is_tensor else "i32" if abs(value) < 2**31 else "i64"

    signature = {}
    for number, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        else:
            specializes = not parameter.do_not_specialize
            signature[parameter.name] = type_of(value, (number,), specializes)
    chosen = {name: options[name] for name in LAUNCH_OPTIONS if name in options}
    source = ASTSource(kernel, signature, constants, aligned)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    assert done.asm["cubin"]
    return done


@contextmanager
def compiling(case: str, capability: int, keep: Path) -> Iterator[list[dict[str, Any]]]:
    """Return a context manager in which kernel launches only compile and record the kernel.

    Its value is a list, to which each launch appends the kernel's statistics from `inspect`.
    """
    found: list[dict[str, Any]] = []
    original = JITFunction.run

    def record(kernel: Any, *arguments: Any, **options: Any) -> None:
        done = compile_instead(kernel, *arguments, capability=capability, **options)
        found.append({"case": case} | inspect(done, capability, keep))

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = original


def inspect(done: Any, capability: int, keep: Path) -> dict[str, Any]:
    """Return statistics of a kernel's machine code, and write the code to the directory `keep`.

    In the result, `programs` is the number of programs that a multiprocessor runs at the same time.
    `instructions` leaves out NOP instructions, because they only pad the code.
    """
    path = keep / f"{done.metadata.name}-{done.hash[:8]}"
    for kind in ("ttgir", "ptx"):
        path.with_suffix(f".{kind}").write_text(done.asm[kind], encoding="utf-8")
    cubin = path.with_suffix(".cubin")
    cubin.write_bytes(done.asm["cubin"])
    usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    sass = _run("nvdisasm", "-c", cubin)
    path.with_suffix(".sass").write_text(sass, encoding="utf-8")
    registers, stack = (int(each) for each in re.findall(r"(?:REG|STACK):(\d+)", usage)[:2])
    line = r"^[ \t]*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"
    names = [name for name in re.findall(line, sass, re.MULTILINE) if name != "NOP"]
    warps, shared = done.metadata.num_warps, done.metadata.shared
    programs = min(
        REGISTERS // (-(-registers // 8) * 8 * 32 * warps),
        THREADS // (32 * warps),
        SHARED_BYTES[capability] // (shared + 1024),
        PROGRAMS,
    )
    return {
        "kernel": done.metadata.name,
        "registers": registers,
        "stack": stack,
        "spills": sum(each.startswith(("STL", "LDL")) for each in names),
        "shared": shared,
        "warps": warps,
        "programs": programs,
        "occupancy": programs * warps * 32 / THREADS,
        "matrix": sum(each.startswith(("HGMMA", "HMMA", "QGMMA")) for each in names),
        "byte_stores": sum(each.startswith("STG") and ".U8" in each for each in names),
        "wide_stores": sum(each.startswith("STG") and ".128" in each for each in names),
        "instructions": len(names),
    }


def _run(program: str, *arguments: object) -> str:
    """Run one of the CUDA programs that are included in Triton, and return its output."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
    return subprocess.run(
        [path, *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout


def cases() -> dict[str, Launch]:
    """Return functions that launch the kernels of a training step.

    Each function launches the kernels of one part of the step, which is its key.
    """
    from mlperf_bert.model import (
        triton_attention,
        triton_cross_entropy,
        triton_dropout,
        triton_fp8,
        triton_gelu,
        triton_norm,
    )
    from mlperf_bert.model.attention_layout import AttentionLayout, Queries, Rotary
    from mlperf_bert.model.dropout_keys import DropoutKeys, DropoutSite
    from mlperf_bert.model.fp8_cast import Target

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    bounds = torch.zeros(SEQUENCES + DUMMIES + 1, dtype=torch.int32)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    site = DropoutSite(0.1, 7, DropoutKeys(2**40, ids[:1], ids, ids))
    layout = AttentionLayout((TOKENS // SEQUENCES,) * SEQUENCES, bounds, LONGEST, ids)
    hidden, residual, wide = empty(TOKENS, HIDDEN), empty(TOKENS, HIDDEN), empty(TOKENS, WIDE)
    keep = empty(TOKENS, HIDDEN // 8, dtype=torch.uint8)
    bias, wide_bias = empty(HIDDEN), empty(WIDE)
    statistics = empty(2, TOKENS, dtype=torch.float32)
    norm = (hidden, bias, residual, bias, statistics, keep, 1.1)
    sum_norm = (residual, bias, statistics, None, 1.0)
    half, one_id = empty(TOKENS, WIDE // 2), (ids, None, None)
    one_table = (empty(VOCABULARY, HIDDEN), None, None)
    tables = (empty(VOCABULARY, HIDDEN), empty(2, HIDDEN), empty(LONGEST, HIDDEN))
    logits, labels = empty(MASKED, VOCABULARY), torch.zeros(MASKED, dtype=torch.int64)
    unit, maximum = torch.ones(()), torch.zeros(())
    e4m3, e5m2 = (
        Target(dtype, unit, maximum) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )

    def attention(heads: int = HEADS) -> None:
        q = empty(TOKENS, 3, heads, HIDDEN // heads).requires_grad_()
        context = triton_attention.attend(*q.unbind(1), layout, site)
        torch.autograd.grad(context, q, torch.empty_like(context))

    def modern_attention(
        reach: int | None = None, size: int = 64, *, some_queries: bool = False
    ) -> None:
        table = empty(LONGEST, size // 2, dtype=torch.float32)
        turned = layout.attending(Rotary(cos=table, sin=table), reach)
        if some_queries:
            rows = Queries(rows=ids[:MASKED], cu_seqlens=bounds, lengths=(), max_length=LONGEST)
            turned = turned.for_queries(rows)
        qkv = empty(TOKENS, 3, HIDDEN // size, size).requires_grad_()
        q, k, v = qkv.unbind(1)
        context = triton_attention.attend(turned.select(q), k, v, turned, None)
        context.backward(torch.empty_like(context))

    return {
        "attention": attention,
        "keep bits": lambda: (
            triton_dropout.keep_bits(site, HIDDEN),
            triton_dropout.attention_keep_bits(site, HEADS, bounds, LONGEST),
        ),
        "norm": lambda: (
            triton_norm.residual_norm(hidden, bias, residual, bias, bias, 1e-12, keep, 1.1),
            triton_norm.residual_norm_backward((hidden, residual), *norm),
        ),
        "GELU": lambda: (
            triton_gelu.bias_gelu(wide, wide_bias),
            triton_gelu.bias_gelu_backward(wide, wide, wide_bias),
        ),
        "embeddings": lambda: (
            triton_norm.embedding_norm((ids,) * 3, tables, bias, bias, 1e-12, keep, 1.1),
            triton_norm.embedding_norm_backward(
                hidden, (ids,) * 3, tables, bias, statistics, keep, 1.1
            ),
        ),
        "masked-LM loss": lambda: (
            triton_cross_entropy.cross_entropy(logits, labels),
            triton_cross_entropy.cross_entropy_backward(
                unit, logits, labels, statistics, torch.bfloat16
            ),
        ),
        "FP8 cast": lambda: triton_fp8.cast((hidden,), 0, e4m3, transpose=True),
        "FP8 cast of QKV gradients": lambda: triton_fp8.cast_with_sums(
            empty(TOKENS, 3 * HIDDEN).split(HIDDEN, dim=1), e5m2
        ),
        "FP8 norm": lambda: (
            triton_norm.residual_norm(hidden, bias, residual, bias, bias, 1e-12, keep, 1.1, e4m3),
            triton_norm.residual_norm_backward((hidden, residual), *norm, e5m2),
        ),
        "FP8 transpose": lambda: triton_fp8.with_transpose(
            empty(TOKENS, HIDDEN, dtype=e4m3.dtype), e4m3
        ),
        "FP8 GELU forward": lambda: triton_gelu.bias_gelu_fp8(
            wide, wide_bias, e4m3, transpose=True
        ),
        "FP8 GELU backward": lambda: triton_gelu.bias_gelu_fp8_backward(
            wide, wide, wide_bias, e5m2
        ),
        "LAMB": optimizer,
        # ModernBERT has pre-norm without biases, gates, rotary positions and windows.
        "modern norm": lambda: (
            triton_norm.sum_norm(hidden, residual, bias, 1e-5, None, 1.0),
            triton_norm.sum_norm_backward((hidden, residual), *sum_norm, torch.bfloat16),
        ),
        "modern FP8 norm": lambda: (
            triton_norm.sum_norm(hidden, residual, bias, 1e-5, None, 1.0, e4m3),
            triton_norm.sum_norm_backward((hidden, residual), *sum_norm, torch.bfloat16, e5m2),
        ),
        "modern embeddings": lambda: (
            triton_norm.embedding_norm(one_id, one_table, bias, None, 1e-5, None, 1.0),
            triton_norm.embedding_norm_backward(
                hidden, one_id, one_table, bias, statistics, None, 1.0
            ),
        ),
        "gate forward": lambda: triton_gelu.gated(wide),
        "gate backward": lambda: triton_gelu.gated_backward(half, wide),
        "FP8 gate forward": lambda: triton_gelu.gated_fp8(wide, e4m3, transpose=True),
        "FP8 gate backward": lambda: triton_gelu.gated_fp8_backward(half, wide, e5m2),
        "modern attention": modern_attention,
        "modern attention, window": partial(modern_attention, 64),
        "modern attention, last layer": partial(modern_attention, some_queries=True),
        "modern attention, window, last layer": partial(modern_attention, 64, some_queries=True),
        "modern attention, heads of 128": partial(modern_attention, None, 128),
        "modern attention, window, heads of 128": partial(modern_attention, 64, 128),
        # Head sizes of other models, which are compiled but not part of this step.
        **{
            f"attention, heads of {size}": partial(attention, HIDDEN // size)
            for size in (16, 32, 128)
        },
    }


def optimizer() -> None:
    """Launch the kernels of the optimizer on a short shard.

    A short shard is sufficient, because the kernels process blocks independently.
    """
    from mlperf_bert.distributed.bucket_plan import BLOCK
    from mlperf_bert.optim import triton_kernels
    from mlperf_bert.optim.flat_optimizer import Constants, FlatShard, StepScalars

    masters, rounded = torch.zeros(8 * BLOCK), torch.zeros(8 * BLOCK, dtype=torch.bfloat16)
    of_block = torch.zeros(8, dtype=torch.int32)
    precise, single = torch.zeros(1, dtype=torch.float64), torch.zeros(())
    shard = FlatShard(
        *(masters, rounded, rounded, masters, masters, of_block, precise, precise.bool())
    )
    scalars = StepScalars(
        learning_rate=precise[0],
        correction_1=precise[0],
        correction_2=precise[0],
        gradient_factor=single,
        skip=single,
    )
    constants = Constants(beta_1=0.9, beta_2=0.999, epsilon=1e-6)
    triton_kernels.lamb_norms(shard, constants, scalars)
    triton_kernels.lamb_apply(shard, constants, scalars, precise)


def main() -> None:
    """Compile the kernels, and print their statistics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--capability",
        type=int,
        default=90,
        choices=sorted(SHARED_BYTES),
        help="compute capability to compile for, times 10 (default: 90)",
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="compile only cases whose name matches REGEX"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the compiled code in DIR")
    args = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keep = args.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        for case, launch in cases().items():
            if re.search(args.only, case) and (args.capability >= 89 or "FP8" not in case):
                with compiling(case, args.capability, keep) as compiled:
                    launch()
                rows |= {(case, each["kernel"]): each for each in compiled}
    print(json.dumps(list(rows.values()), indent=0))


if __name__ == "__main__":
    main()

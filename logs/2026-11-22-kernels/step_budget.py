"""The expected time of a BERT-large step of 112 sequences on one H100, operation by operation.

    python logs/2026-11-22-kernels/step_budget.py [--kernels FILE]

Markdown: the kernels, the rates that are assumed and where they come from, then a table for bf16
and one for FP8. Counted for each operation are the bytes it moves, its floating-point operations,
and its instructions as its kernels were compiled (`tools/kernel_table.py`; FILE is what that
printed, else it runs now). The expected time is the longest of the three at those rates. Nothing
here was measured on a GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/bert/implementations/pytorch"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from mlperf_bert.data.length_histogram import wikipedia_lengths

SHOWN = {  # of a row, and what it is called
    "registers": "registers",
    "spills": "spills",
    "programs": "programs a multiprocessor",
    "occupancy": "occupancy",
    "matrix": "matrix instructions",
    "byte_stores": "byte stores",
    "wide_stores": "16-byte stores",
    "per_element": "instructions an element",
}
MEMORY_BYTES_PER_S = 3.0e12
BF16_FLOPS, FP8_FLOPS = 790e12, 1200e12
ISSUE_PER_S = 132 * 4 * 1.7e9  # instructions of a warp
# A Triton attention forward without dropout reaches 340 TFLOP/s on an H100 (heads of 64, sequences
# of 512: arXiv 2407.08608, figure 5). Ours without dropout had 385 instructions for a tile of 128 x
# 64 when this was fixed, which at full rate is 611 TFLOP/s.
ISSUE_SHARE = 340 / 611
GAP_MS = 1e-3  # between two kernels of a graph
EFFICIENCIES = (
    ("memory", "3.0 TB/s", "nine tenths of an H100's 3.35"),
    (
        "products, bf16",
        "790 TFLOP/s",
        "measured on an H200 in a short burst; 640-680 in a long one",
    ),
    ("products, FP8", "1,200 TFLOP/s", "six tenths of the peak; at most"),
    (
        "instructions",
        f"{ISSUE_SHARE:.2f} of 4 a cycle on 132 multiprocessors at 1.7 GHz",
        "a published Triton attention without dropout (arXiv 2407.08608, figure 5) against ours",
    ),
    ("between two kernels", "1 us", "a graph's usual gap; only a GPU can tell"),
)

LAYERS, HEADS, D, F, V = 24, 16, 1024, 4096, 30_528
HEAD = D // HEADS
PARAMETERS = 336_226_108
MASKED_SHARE = 0.15
# As published, but in the mean: that of the official set is 254.4, of these counts 255.8.
LENGTHS = wikipedia_lengths().draw_evenly(112, seed=38)
LENGTHS[np.argsort(LENGTHS)[: LENGTHS.sum() - round(254.4 * 112)]] -= 1
B, T = len(LENGTHS), int(LENGTHS.sum())
P = int(np.minimum(np.rint(MASKED_SHARE * LENGTHS), 76).sum())
LAST = B + P  # rows of the last layer behind its keys and values
ROWS = (LAYERS - 1) * T + LAST  # of all layers behind attention
QKV = 3 * T * (LAYERS - 1) + 2 * T + LAST  # rows of queries, keys and values
ENCODER_WEIGHTS = LAYERS * (4 * D * D + 2 * D * F)
FORWARD_TILE, QUERY_TILE, KEY_TILE = (128, 64), (64, 64), (64, 64)
Kernels = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One row: all of its kind in a step."""

    name: str
    calls: int
    num_bytes: float = 0.0
    flops: float = 0.0
    flops_per_s: float = BF16_FLOPS
    instructions: float = 0.0  # of warps
    on_gpu_only: bool = False  # bytes are a guess: torch's own kernels

    @property
    def bounds_ms(self) -> tuple[float, float, float]:
        """By memory, by floating-point operations, by instructions."""
        return (
            1e3 * self.num_bytes / MEMORY_BYTES_PER_S,
            1e3 * self.flops / self.flops_per_s,
            1e3 * self.instructions / (ISSUE_PER_S * ISSUE_SHARE),
        )

    @property
    def expected_ms(self) -> float:
        """The longest, and the gaps behind its kernels."""
        return max(self.bounds_ms) + GAP_MS * self.calls


class Counted:
    """Operations of kernels that were compiled."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def of(
        self, name: str, case: str, kernel: str, elements: float, each: float, calls: int
    ) -> Operation:
        """`elements` in all, of which one takes `each` bytes of memory."""
        per_element = self._kernels[case, kernel]["per_element"]
        return Operation(
            name=name,
            calls=calls,
            num_bytes=each * elements,
            instructions=per_element * elements / 32,
        )

    def attention(
        self, name: str, kernel: str, *, products: int, tensors: int, tile: tuple[int, int]
    ) -> Operation:
        """`products` over all pairs of query and key; `tensors` [T, D]; tiles [queries, keys]."""
        compiled = self._kernels["attention", kernel]
        queries, keys = (-(-LENGTHS // size) * size for size in tile)
        last = -(-np.rint(LAST / T * LENGTHS) // tile[0]) * tile[0]
        computed = HEADS * float(((LAYERS - 1) * queries * keys + last * keys).sum())
        # A program has a tile of its own rows, around whose loop there is a beginning and an end.
        own_rows = HEADS * float(((LAYERS - 1) * queries + last).sum())
        around = (compiled["instructions"] - compiled["loop"]) * compiled["warps"]
        return Operation(
            name=name,
            calls=LAYERS,
            num_bytes=2 * D * tensors * LAYERS * T,
            flops=2 * products * HEAD * computed,
            instructions=compiled["per_element"] * computed / 32 + around * own_rows / tile[0],
        )


def operations(kernels: Kernels, *, is_fp8: bool) -> Iterator[Operation]:
    """Of a whole update, in the order of a step."""
    counted = Counted(kernels)
    # Forward and both gradients; behind the last layer's keys and values for LAST rows alone.
    weights = 2 * D * D * T * LAYERS + (2 * D * D + 2 * D * F) * ROWS
    rate = FP8_FLOPS if is_fp8 else BF16_FLOPS
    yield Operation(
        name="products of the encoder", calls=12 * LAYERS, flops=6 * weights, flops_per_s=rate
    )
    yield from _attention(counted)
    yield from (_fp8_blocks if is_fp8 else _bf16_blocks)(counted)
    yield from _head(counted)
    yield from _ends(counted)


def _attention(counted: Counted) -> Iterator[Operation]:
    bits = float(HEADS * (-(-LENGTHS // 64) * 64.0 * LENGTHS).sum()) * (LAYERS - 1 + LAST / T)
    yield counted.of(
        "attention, keep bits", "keep bits", "_attention_keep_bits", bits, 1 / 8, LAYERS
    )
    yield counted.attention(
        "attention, forward", "_attention_forward", products=2, tensors=4, tile=FORWARD_TILE
    )
    yield counted.attention(
        "attention, queries' gradient",
        "_attention_of_queries",
        products=3,
        tensors=6,
        tile=QUERY_TILE,
    )
    yield counted.attention(
        "attention, others' gradients", "_attention_of_keys", products=4, tensors=6, tile=KEY_TILE
    )


def _bf16_blocks(counted: Counted) -> Iterator[Operation]:
    wide, calls = ROWS * F, 2 * LAYERS
    yield counted.of("hidden keep bits", "keep bits", "_keep_bits", 2 * ROWS * D, 1 / 8, calls)
    yield counted.of("norms, forward", "norm", "_norm_forward", 2 * ROWS * D, 6.125, calls)
    yield counted.of("norms, backward", "norm", "_norm_backward", 2 * ROWS * D, 12.125, 2 * calls)
    yield counted.of("GELU, forward", "GELU", "_gelu_forward", wide, 4, LAYERS)
    yield counted.of("GELU, backward", "GELU", "_gelu_backward", wide, 6, 2 * LAYERS)
    yield Operation(
        name="QKV weights put together, their gradients apart",
        calls=2 * LAYERS,
        num_bytes=2 * 2 * 3 * D * D * LAYERS,
    )
    yield _partial_sums(2 * LAYERS * 648 * 3 * D + LAYERS * 40 * F)
    yield Operation(name="gradient of the QKV biases", calls=2 * LAYERS, num_bytes=2 * D * QKV)


def _fp8_blocks(counted: Counted) -> Iterator[Operation]:
    wide, calls = ROWS * F, 2 * LAYERS
    cast = ("FP8 cast", "_cast_to_fp8")
    yield counted.of("hidden keep bits", "keep bits", "_keep_bits", 2 * ROWS * D, 1 / 8, calls)
    yield counted.of("norms, forward", "FP8 norm", "_norm_forward", 2 * ROWS * D, 7.125, calls)
    yield counted.of(
        "norms, backward", "FP8 norm", "_norm_backward", 2 * ROWS * D, 11.125, 2 * calls
    )
    yield counted.of("transposes", "FP8 transpose", "_transpose", 4 * ROWS * D, 2, 2 * calls)
    yield counted.of("GELU, forward", "FP8 GELU forward", "_gelu_fp8", wide, 4, LAYERS)
    yield counted.of("GELU, backward", "FP8 GELU backward", "_gelu_fp8", wide, 6, 2 * LAYERS)
    yield counted.of("casts of contexts", *cast, ROWS * D, 4, LAYERS)
    yield counted.of("casts of weights", *cast, ENCODER_WEIGHTS, 4, 6 * LAYERS)
    yield _partial_sums(2 * LAYERS * 648 * 3 * D + (ROWS * F + QKV * D) // 128)
    yield counted.of(
        "casts of QKV gradients and their biases'",
        *("FP8 cast of QKV gradients", "_cast_to_fp8", QKV * D, 4, 2 * LAYERS),
    )


def _partial_sums(count: int) -> Operation:
    """Of parameters' gradients: float32, written by programs that share rows, and read once."""
    return Operation(name="partial sums of gradients", calls=0, num_bytes=2 * 4 * count)


def _head(counted: Counted) -> Iterator[Operation]:
    yield Operation(name="products of the head", calls=8, flops=6 * P * (D * V + D * D))
    loss = (
        ("masked-LM loss", "_cross_entropy_forward"),
        ("masked-LM loss", "_cross_entropy_backward"),
    )
    yield counted.of("masked-LM loss, forward", *loss[0], P * V, 2, 2)
    yield counted.of("masked-LM loss, backward", *loss[1], P * V, 4, 2)
    yield Operation(
        name="rest of the head", calls=30, num_bytes=60 * P * D + 4 * 2 * T * D, on_gpu_only=True
    )


def _ends(counted: Counted) -> Iterator[Operation]:
    case = "embeddings"
    yield counted.of("embeddings, forward", case, "_embedding_forward", T * D, 4.125, 2)
    yield counted.of("embeddings, backward", case, "_embedding_backward", T * D, 6.125, 2)
    yield Operation(
        name="embeddings, sum of gradients and the tables'",
        calls=20,
        num_bytes=6 * T * D + 2 * 2 * T * D + 2 * 2 * V * D + 6 * V * D,
        on_gpu_only=True,
    )
    yield Operation(name="gradients into the flat buffer", calls=10, num_bytes=4 * PARAMETERS)
    yield Operation(name="gradient's norm", calls=2, num_bytes=2 * PARAMETERS)
    yield counted.of("LAMB, moments", "LAMB", "_moments_and_squares", PARAMETERS, 22, 2)
    yield counted.of("LAMB, weights", "LAMB", "_apply", PARAMETERS, 18, 1)


def markdown(rows: list[Operation], title: str) -> str:
    """A table, its sum and the rate that follows."""
    head = (
        *("operation", "GB", "TFLOP", "10^9 instructions"),
        *("memory, ms", "products, ms", "instructions, ms", "expected, ms", "measured, ms"),
    )
    lines = [head, ("---",) * len(head)]
    for row in rows:
        counts = (row.num_bytes / 1e9, row.flops / 1e12, row.instructions / 1e9)
        numbers = [f"{each:.3g}" if each else "" for each in (*counts, *row.bounds_ms)]
        name = f"{row.name} (only a GPU can tell)" if row.on_gpu_only else row.name
        lines.append((name, *numbers, f"{row.expected_ms:.2f}", ""))
    total = sum(row.expected_ms for row in rows)
    lines.append(("**sum**", *[""] * 6, f"**{total:.1f}**", ""))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {title}: {total:.1f} ms, {1e3 * B / total:,.0f} sequences/s\n\n{table}"


def compiled(rows: list[dict[str, Any]]) -> str:
    """What matters of them, in Markdown."""
    head = ("part", "kernel", *SHOWN.values())
    lines = [head, ("---",) * len(head)]
    for row in rows:
        shown = (row[name] for name in SHOWN)
        cells = (f"{each:.3g}" if isinstance(each, float) else str(each) for each in shown)
        lines.append((row["case"], f"`{row['kernel']}`", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="of kernel_table.py")
    args = parser.parse_args()
    if args.kernels:
        found = json.loads(args.kernels.read_text(encoding="utf-8"))
    else:
        import kernel_table  # needs Triton

        with tempfile.TemporaryDirectory() as folder:
            found = kernel_table.as_rows(kernel_table.compile_all(90, Path(folder)))
    kernels = {(row["case"], row["kernel"]): row for row in found}
    print(f"### Kernels, as compiled\n\n{compiled(found)}\n")
    print("### Rates that are assumed\n")
    print("| what | rate | source |\n| --- | --- | --- |")
    for line in EFFICIENCIES:
        print(f"| {' | '.join(line)} |")
    print(f"\n{B} sequences, {T:,} tokens, {P:,} masked positions.")
    for title, is_fp8 in (("bf16", False), ("FP8", True)):
        print("\n" + markdown(list(operations(kernels, is_fp8=is_fp8)), title))


if __name__ == "__main__":
    main()

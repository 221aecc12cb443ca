"""How well 16-bit sums over many ranks give the mean gradient: a simulation on one CPU.

    python study_communication_precision.py --out DIR [--table]

Writes DIR/communication_precision.{json,png} and prints the table; with --table from the JSON that
is there. Gradients of N ranks are made
up, summed as an all-reduce would, and compared with their mean in float64. Every partial sum is
rounded to the type on the wire. Three things are varied:

- the order: `ring`, where each part of the buffer goes from rank to rank and every rank adds its
  own; `tree`, where sums of equally many ranks are added;
- the type: fp32, bf16, fp16; and whether each rank divides by N before (`pre-scaled`) or the sum
  is divided after;
- how much the ranks agree (`CASES`).
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import DataError

Wire = Callable[[np.ndarray], np.ndarray]

NUM_ELEMENTS = 8192
# Noise of a rank over the signal that all share. On 1,024 ranks the mean of the first case is
# about half signal, half noise.
CASES = {"independent": 32.0, "half aligned": 1.0, "aligned": 0.1}
SPREAD = 1.5  # of the logarithm of the elements' scales: 95 % lie within a factor of 400
# A dynamic loss scale settles where the largest element of a rank is a few powers of two below
# the largest number of fp16.
LARGEST_SCALED = 2.0**13


@dataclass(frozen=True, slots=True)
class Format:
    """What goes over the wire."""

    wire: str
    pre_scaled: bool

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.wire}, pre-scaled" if self.pre_scaled else self.wire


@dataclass(frozen=True, slots=True)
class Row:
    """A cell of the study over its seeds; errors are relative, in the 2-norm."""

    case: str
    order: str
    format: str
    ranks: int
    errors: list[float]  # of the elements that are finite
    overflowed: list[float]  # share of elements that are not


FORMATS = tuple(
    Format(wire, scaled) for wire in ("fp32", "bf16", "fp16") for scaled in (False, True)
)


def to_fp32(values: np.ndarray) -> np.ndarray:
    """As they are."""
    return values


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, to nearest and ties to even; float32 in and out, finite."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & 0xFFFF0000).view(np.float32)


def to_fp16(values: np.ndarray) -> np.ndarray:
    """Rounded to half precision, to nearest and ties to even, infinite above 65,504."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


WIRES: dict[str, Wire] = {"fp32": to_fp32, "bf16": to_bf16, "fp16": to_fp16}


def ring_sum(values: np.ndarray, wire: Wire) -> np.ndarray:
    """Sum of float32 [N, n] over N ranks by the reduce-scatter of one flat ring, [n].

    Part c of the buffer starts at rank c; each next rank adds its own and sends the rounded sum on.
    """
    num_ranks, num_elements = values.shape
    part = np.arange(num_elements) * num_ranks // num_elements
    columns = np.arange(num_elements)
    total = wire(values[part, columns])
    for hop in range(1, num_ranks):
        total = wire(total + wire(values[(part + hop) % num_ranks, columns]))
    return total


def tree_sum(values: np.ndarray, wire: Wire) -> np.ndarray:
    """Sum of float32 [N, n] over N ranks, a power of two, by a binary tree, [n]."""
    sums = wire(values)
    while len(sums) > 1:
        sums = wire(sums[0::2] + sums[1::2])
    return sums[0]


ORDERS: dict[str, Callable[[np.ndarray, Wire], np.ndarray]] = {"ring": ring_sum, "tree": tree_sum}


def made_up_gradients(num_ranks: int, noise: float, seed: int) -> np.ndarray:
    """Loss-scaled gradients of all ranks, float32 [num_ranks, NUM_ELEMENTS].

    Each element has a scale of its own, a signal that all ranks share and noise of each rank, both
    normal; `noise` is the ratio of their standard deviations.
    """
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(0.0, SPREAD, NUM_ELEMENTS).astype(np.float32)
    signal = rng.standard_normal(NUM_ELEMENTS, dtype=np.float32)
    values = rng.standard_normal((num_ranks, NUM_ELEMENTS), dtype=np.float32)
    values *= noise
    values += signal
    values *= scales
    values *= 2.0 ** np.floor(np.log2(LARGEST_SCALED / np.abs(values).max()))
    return values


def mean_error(values: np.ndarray, order: str, fmt: Format) -> tuple[float, float]:
    """Relative error of the reduced mean over finite elements, and the share of the others."""
    num_ranks = np.float32(len(values))
    sent = values / num_ranks if fmt.pre_scaled else values
    with np.errstate(invalid="ignore"):  # infinities of both signs may meet
        total = ORDERS[order](sent, WIRES[fmt.wire])
    mean = total if fmt.pre_scaled else total / num_ranks
    exact = values.mean(axis=0, dtype=np.float64)
    finite = np.isfinite(mean)
    difference = np.linalg.norm(mean[finite] - exact[finite])
    return float(difference / np.linalg.norm(exact[finite])), float(1 - finite.mean())


def study(most_ranks: int, seeds: int) -> Iterator[Row]:
    """Every row, the ranks 8, 16 .. `most_ranks` innermost."""
    counts = [2**power for power in range(3, most_ranks.bit_length())]
    found: dict[tuple[str, str, str, int], list[tuple[float, float]]] = {}
    for case, noise in CASES.items():
        for seed in range(seeds):
            values = made_up_gradients(most_ranks, noise, seed)
            for order in ORDERS:
                for fmt in FORMATS:
                    for ranks in counts:
                        key = case, order, fmt.name, ranks
                        found.setdefault(key, []).append(mean_error(values[:ranks], order, fmt))
    for key, pairs in found.items():
        yield Row(*key, [error for error, _ in pairs], [share for _, share in pairs])


def in_words(rows: list[Row]) -> str:
    """The table, in Markdown: mean +- standard deviation over seeds, at a few numbers of ranks."""
    shown = sorted({row.ranks for row in rows})[::-2][::-1]
    lines = [
        f"| gradients | order | on the wire | {' | '.join(map(str, shown))} |",
        "|---|---|---|" + "---|" * len(shown),
    ]
    cells = {(row.case, row.order, row.format, row.ranks): _cell(row) for row in rows}
    for case, order, name in dict.fromkeys(key[:3] for key in cells):
        numbers = " | ".join(cells[case, order, name, ranks] for ranks in shown)
        lines.append(f"| {case} | {order} | {name} | {numbers} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    text = f"{np.mean(row.errors):.2g} ± {_spread(row):.1g}"
    if max(row.overflowed) > 0:
        text += f"; {np.mean(row.overflowed):.2%} overflow"
    return text


def _spread(row: Row) -> float:
    return float(np.std(row.errors, ddof=1))


def draw(rows: list[Row]) -> bytes:
    """A PNG of error over ranks, a panel for each case; bars are the seeds' standard deviation.

    Pre-scaled only: without, the lines lie on these, but for the elements that overflow.
    """
    figure, panels = plt.subplots(1, len(CASES), figsize=(12, 4), sharey=True, layout="constrained")
    colours = {fmt.name: f"C{number}" for number, fmt in enumerate(FORMATS) if fmt.pre_scaled}
    for axes, (case, noise) in zip(panels, CASES.items(), strict=True):
        for order, style in (("ring", "-"), ("tree", "--")):
            for name, colour in colours.items():
                line = [
                    row for row in rows if (row.case, row.order, row.format) == (case, order, name)
                ]
                axes.errorbar(
                    [row.ranks for row in line],
                    [np.mean(row.errors) for row in line],
                    [_spread(row) for row in line],
                    color=colour,
                    linestyle=style,
                    label=f"{order}, {name}",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(f"{case}: noise {noise:g} times the signal", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of the mean gradient")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


def main() -> None:
    """Run the study, print the table, write the numbers and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for JSON and PNG")
    parser.add_argument("--ranks", type=int, default=1024, metavar="N", help="a power of two, >= 8")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="at least 3")
    parser.add_argument("--table", action="store_true", help="draw and print what is in DIR")
    args = parser.parse_args()
    if args.ranks < 8 or args.ranks & (args.ranks - 1):
        parser.error(f"--ranks: is {args.ranks}; set it to a power of two from 8 on")
    if args.seeds < 3:
        parser.error(f"--seeds: is {args.seeds}; set it to 3 at least")
    mpl.use("Agg")
    numbers: Path = args.out / "communication_precision.json"
    try:
        if args.table:
            rows = [Row(**row) for row in json.loads(numbers.read_bytes())["rows"]]
        else:
            make_directory(args.out)
            rows = list(study(args.ranks, args.seeds))
            answer = {
                "schema_version": 1,
                "num_elements": NUM_ELEMENTS,
                "noise_over_signal": CASES,
                "rows": [asdict(row) for row in rows],
            }
            write_file(numbers, json.dumps(answer).encode())
        write_file(args.out / "communication_precision.png", draw(rows))
    except DataError as error:
        sys.exit(f"study_communication_precision: error: {error}")
    print(in_words(rows))


if __name__ == "__main__":
    main()

"""`summary.md` of a run of `tools/gpu_check.sh`, from the files that its parts left.

python tools/summarise_gpu.py OUT > OUT/summary.md
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED = 2  # exit status of a setting that the machine or the program refuses
TIMED_OUT = (124, 137)  # of `timeout`
HEADLINE = "train_bf16"  # what an ablation is compared with


@dataclass(frozen=True)
class Part:
    """One line of `parts.tsv`, and the JSON object that the part printed, if it did."""

    name: str
    status: str
    seconds: str
    command: str
    result: dict[str, Any] | None
    last_line: str


@dataclass(frozen=True)
class Goal:
    """A number that is to be reached; `value` is None where nothing measured it."""

    text: str
    value: float | None
    bound: float
    is_upper: bool = False

    @property
    def verdict(self) -> str:
        """Met, missed or not measured."""
        if self.value is None:
            return "not measured"
        is_met = self.value <= self.bound if self.is_upper else self.value >= self.bound
        return f"{'met' if is_met else 'missed'}: {self.value:.4g}"


def main() -> int:
    """Print the summary of the directory that is named."""
    out = Path(sys.argv[1])
    parts = read_parts(out)
    sections = [
        "# GPU check",
        _machine(out),
        _goals(parts),
        _table_of_parts(parts),
        _training(parts),
        _against(parts),
        _evaluation(parts),
        _scale(parts),
        _profiles(parts),
    ]
    print("\n\n".join(section for section in sections if section))
    return 0


def read_parts(out: Path) -> dict[str, Part]:
    """All parts that were begun or skipped, by name."""
    parts = {}
    for line in (out / "parts.tsv").read_text(encoding="utf-8").splitlines():
        name, status, seconds, command = line.split("\t", 3)
        lines = _text(out / f"{name}.log").splitlines()
        parts[name] = Part(
            name,
            status,
            seconds,
            command,
            _result(out / f"{name}.json"),
            lines[-1] if lines else "",
        )
    return parts


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _result(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(_text(path))
    except json.JSONDecodeError:
        return None
    return result if isinstance(result, dict) else None


def _machine(out: Path) -> str:
    lines = _text(out / "machine.txt").rstrip()
    return f"```\n{lines}\n```"


def _goals(parts: dict[str, Part]) -> str:
    title = "## Goals\n\n"
    if not _on_gpu(parts):
        return title + "Not run on a GPU: no figure below says anything about one."
    bf16, fp8 = _get(parts, HEADLINE), _get(parts, "train_fp8")
    against, evaluation = _get(parts, "against_bf16"), _get(parts, "eval_bf16")
    captured, eager = (
        _get(parts, f"train_batch_4_{mode}").get("samples_per_s") for mode in ("captured", "eager")
    )
    goals = (
        Goal("bf16 samples/s, first step", bf16.get("samples_per_s"), 950),
        Goal("bf16 MFU of the measured peak (long run)", bf16.get("mfu"), 0.6),
        Goal("FP8 samples/s", fp8.get("samples_per_s"), 1250),
        Goal(
            "`transformers` padded and compiled, times", against.get("ratio_padded_compiled"), 2.4
        ),
        Goal("evaluation, share of a run", evaluation.get("share_of_run"), 0.028, is_upper=True),
        Goal(
            "captured / eager at 4 sequences", captured / eager if captured and eager else None, 1.5
        ),
    )
    rows = [
        (goal.text, f"{'at most' if goal.is_upper else 'at least'} {goal.bound:g}", goal.verdict)
        for goal in goals
    ]
    return title + _table(("goal", "bound", "found"), rows)


def _table_of_parts(parts: dict[str, Part]) -> str:
    rows = [(part.name, _state(part), part.seconds, f"`{part.command}`") for part in parts.values()]
    return "## Parts\n\n" + _table(("part", "state", "s", "command"), rows)


def _state(part: Part) -> str:
    if part.status in ("0", "skipped"):
        return "done" if part.status == "0" else "skipped: no time left"
    if int(part.status) == REFUSED:
        return f"cannot run here: {part.last_line}"
    if int(part.status) in TIMED_OUT:
        return "stopped: took too long"
    return f"failed ({part.status}): {part.last_line}"


def _training(parts: dict[str, Part]) -> str:
    """Rate, operations and memory of every `bench train`; ablations beside HEADLINE."""
    headline = _get(parts, HEADLINE).get("samples_per_s")
    rows = []
    for part in parts.values():
        result = part.result
        if not part.name.startswith(("train_", "ablation_")) or result is None:
            continue
        share = "-"
        if headline and part.name.startswith(("ablation_", "train_bf16", "train_fp8")):
            share = f"{result['samples_per_s'] / headline:.3f}"
        rows.append(
            (
                part.name,
                f"{result['samples_per_s']:.1f}",
                share,
                f"{result['step_ms']:.2f}",
                f"{result['tflops']:.4g}",
                _percent(result["mfu"]),
                _percent(result["mfu_of_burst"]),
                _percent(result["padding_share"]),
                f"{result['memory_peak_bytes'] / 2**30:.1f}",
            )
        )
    head = ("part", "samples/s", f"/ {HEADLINE}", "step ms", "TFLOP/s", "MFU", "of burst")
    note = (
        "MFU is of the matrix products of the same part. Only train_bf16 and train_fp8 measure "
        "these long enough for the clocks to fall."
    )
    return f"## Training steps\n\n{_table((*head, 'padding', 'GiB'), rows)}\n\n{note}"


def _against(parts: dict[str, Part]) -> str:
    result = _get(parts, "against_bf16")
    if not result:
        return ""
    rows = []
    for name in ("padded", "padded_to_longest", "padded_compiled", "padded_flash", "unpadded_peer"):
        rate, ratio = result[f"{name}_samples_per_s"], result[f"ratio_{name}"]
        if rate is None:
            rows.append((name, "-", result[f"{name}_reason"]))
        else:
            rows.append((name, f"{rate:.1f}", f"{ratio:.2f}"))
    title = f"## Against `transformers`: ours {result['ours_samples_per_s']:.1f} samples/s\n\n"
    return title + _table(("the other side", "samples/s", "ours, times that"), rows)


def _evaluation(parts: dict[str, Part]) -> str:
    result = _get(parts, "eval_bf16")
    if not result:
        return ""
    return (
        f"## Evaluation\n\n{result['evaluation_samples_per_s']:.1f} samples/s, "
        f"{result['evaluation_s']:.3f} s (the first {result['first_evaluation_s']:.3f} s) for "
        f"{result['num_samples']}: {result['share_of_run']:.2%} of a run with an evaluation every "
        f"{result['interval_samples']} samples; by operations {result['floor_share']:.2%}."
    )


def _scale(parts: dict[str, Part]) -> str:
    sections = []
    for name, key, first in (("scale", "rows", "batch"), ("sweep", "sweep", "tokens")):
        rows = [
            (
                row[first],
                row.get("step_mode", "-"),
                "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:.1f}",
                row["reason"] if row["samples_per_s"] is None else f"{row['step_ms']:.2f}",
            )
            for row in _get(parts, name).get(key, ())
        ]
        if rows:
            head = (first, "step", "samples/s", "step ms")
            sections.append(f"## {name.capitalize()}\n\n{_table(head, rows)}")
    return "\n\n".join(sections)


def _profiles(parts: dict[str, Part]) -> str:
    sections = []
    for name in ("profile_bf16", "profile_fp8"):
        result = _get(parts, name)
        if not result:
            continue
        rows = [
            (
                f"{row['ms']:.3f}",
                _percent(row["share"]),
                f"{row['calls']:g}",
                f"`{row['name'][:90]}`",
            )
            for row in result["rows"]
        ]
        sections.append(
            f"## {name}\n\n{result['step_ms']:.2f} ms a step under the profiler, "
            f"{_percent(result['gap_share'])} of it with nothing running.\n\n"
            + _table(("ms", "share", "calls", result["unit_of_work"]), rows)
            + f"\n\n![one step]({name}.png)"
        )
    return "\n\n".join(sections)


def _get(parts: dict[str, Part], name: str) -> dict[str, Any]:
    part = parts.get(name)
    return {} if part is None or part.result is None else part.result


def _on_gpu(parts: dict[str, Part]) -> bool:
    devices = [part.result.get("device") for part in parts.values() if part.result]
    return "cuda" in devices


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    sys.exit(main())

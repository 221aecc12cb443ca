"""Summary of a run of `tools/gpu_check.sh`, from the files that its parts left so far.

python tools/summarise_gpu.py RESULTS > summary.md    exit status 1: a part failed or took too long
"""

import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 10_000  # length of the summary: the check's output may be cut there
MOST_OF_A_LINE = 200
REFUSED = 2  # exit status of a setting that the machine or the program refuses
TIMED_OUT, KILLED = 124, 137  # exit status of `timeout`, which also kills
HEADLINE, ALONE = "train_bf16", "ablation_none"  # the base of steps and ablations
MLLOG = ":::MLLOG "  # begins each line of a result log
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|ALLOC_FAILED|Cannot allocate memory")
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
COLUMNS = {  # of training steps: the key of `bench train`, and its format
    "samples/s": ("samples_per_s", ".1f"),
    "step ms": ("step_ms", ".2f"),
    "TFLOP/s": ("tflops", ".4g"),
    "MFU": ("mfu", ".1%"),
    "padding": ("padding_share", ".1%"),
}
BASELINES = ("sorted", "sorted_compiled", "padded", "padded_compiled", "unpadded_baseline")
RATES = {  # samples/s: first step and goal, in bf16 and in FP8
    "H100": ((850, 900), (1139, 1200)),
    "H200": ((950, 1030), (1092, 1250)),
}


@dataclass(frozen=True)
class Part:
    """One line of `plan.tsv`, its outcome, and its JSON object if it printed one."""

    name: str
    limit: int
    command: str
    status: int | None  # None: not begun, or cut off with the whole check
    seconds: int
    result: dict[str, Any]
    log: list[str]

    @property
    def state(self) -> str:
        """Outcome, with the line of its log that gives the reason."""
        if self.status in (0, None):
            return "done" if self.status == 0 else "not ended"
        if any(OUT_OF_MEMORY.search(line) for line in self.log[-40:]):
            return "ran out of memory"
        if self.status == REFUSED:
            return f"cannot run here: {self.reason}"
        if self.status == TIMED_OUT or (self.status == KILLED and self.seconds >= self.limit - 4):
            return f"stopped, took too long: {self.reason}"
        return f"failed ({self.status}): {self.reason}"

    @property
    def reason(self) -> str:
        """The last error of the log, or its last line."""
        lines = [line for line in self.log if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]
        return (errors or lines or [""])[-1][:MOST_OF_A_LINE]


def main() -> int:
    """Print the summary of the named directory."""
    out = Path(sys.argv[1])
    parts = read_parts(out)
    sections: tuple[tuple[str, Callable[[], str]], ...] = (
        ("GPU check", lambda: _text(out / "machine.txt").strip()),
        ("Goals", lambda: _goals(parts, _text(out / "machine.txt"))),
        ("Training steps", lambda: _training(parts)),
        ("Parts", lambda: _table_of_parts(parts)),
        ("Tests", lambda: _tests(out)),
        ("Against `transformers`", lambda: _compared(parts)),
        ("Runs of real text", lambda: _learning(out)),
        ("Shares of a run", lambda: _shares(out / "whole")),
    )
    left = MOST_CHARACTERS
    for title, write in sections:
        try:
            words = write()
        except Exception as error:  # one odd result must not lose the others' summary
            words = f"not summarised: {error!r}"
        if len(words) > left:
            words = f"{words[:left]}\n(cut off: the archive has all)"
        left -= min(left, len(words))
        if words:
            print(f"## {title}\n\n{words}\n")
    ended_well = ("done", "not ended", "ran out of memory")
    return int(any(part.state not in ended_well for part in parts.values()))


def read_parts(out: Path) -> dict[str, Part]:
    """All parts of the plan by name, in its order."""
    ends = dict(line.split("\t", 1) for line in _text(out / "parts.tsv").splitlines())
    parts = {}
    for line in _text(out / "plan.tsv").splitlines():
        _, file, limit, command = line.split("\t", 3)
        name = file.partition(".")[0]
        status, _, seconds = ends.get(name, "").partition("\t")
        parts[name] = Part(
            name=name,
            limit=int(limit),
            command=command,
            status=int(status) if status else None,
            seconds=int(seconds or 0),
            result=_result(out / f"{name}.json"),
            log=_text(out / f"{name}.log").splitlines(),
        )
    return parts


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(_text(path))
    except json.JSONDecodeError:
        return {}
    return result if isinstance(result, dict) else {}


def _goals(parts: dict[str, Part], machine: str) -> str:
    devices = {part.result.get("device") for part in parts.values()} - {None}
    names = " ".join(str(part.result.get("device_name")) for part in parts.values())
    model = re.search(rf"\b({'|'.join(RATES)})\b", f"{names} {machine}")
    if "dry-run" in machine or (devices and "cuda" not in devices):
        return "Not run on a GPU: no figure below says anything about one."
    if model is None:
        return "Not judged: there are goals for H100 and H200 only."
    measured = _get(parts, "transformers_bf16")
    rates = {name: _get(parts, name).get("samples_per_s") for name in parts}
    captured, eager = (rates.get(f"train_batch_4_{mode}") for mode in ("captured", "eager"))
    steps = (("bf16", HEADLINE), ("FP8", "train_fp8"))
    goals = [
        (f"{precision} samples/s, {text}", rates.get(part), bound)
        for (precision, part), bounds in zip(steps, RATES[model[1]], strict=True)
        for text, bound in zip(("first", "goal"), bounds, strict=True)
    ]
    ratio = captured / eager if captured and eager else None
    baseline = measured.get("ratio_padded_compiled")
    goals += [
        ("bf16 MFU of the measured peak (long run)", _get(parts, HEADLINE).get("mfu"), 0.6),
        ("captured / eager at 4 sequences", ratio, 1.5),
        ("`transformers` padded and compiled, times", baseline, 2.4),
    ]
    rows = [(text, f"at least {bound:g}", _verdict(value, bound)) for text, value, bound in goals]
    return _table(("goal", f"bound, {model[1]}", "found"), rows)


def _verdict(value: float | None, bound: float) -> str:
    """Whether a number that is None if nothing measured it reaches its bound."""
    if value is None:
        return "not measured"
    return f"{'met' if value >= bound else 'missed'}: {value:.4g}"


def _table_of_parts(parts: dict[str, Part]) -> str:
    rows = [(part.name, part.state, part.seconds, part.limit) for part in parts.values()]
    return _table(("part", "state", "s", "at most"), rows)


def _tests(out: Path) -> str:
    """Outcome of each file of tests, and its failures in a line each."""
    rows, failures = [], []
    for path in sorted(out.glob("test_*.txt")):
        lines = _text(path).splitlines()
        begun = [line for line in lines if line.startswith("tests/") and "::" in line]
        last = re.fullmatch(r"=+ (.* in .*) =+", lines[-1]) if lines else None
        cut_off = f"cut off in {begun[-1][:MOST_OF_A_LINE].strip()}" if begun else "no test begun"
        rows.append((path.stem, last[1] if last else cut_off))
        failures += [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not rows:
        return ""
    shown = "\n".join(f"- {line[:MOST_OF_A_LINE]}" for line in failures[:12])
    return f"{_table(('file', 'ended'), rows)}\n\n{len(failures)} failures\n{shown}"


def _training(parts: dict[str, Part]) -> str:
    """Rate, operations and memory of every `bench train`, beside the one it varies."""
    rows = []
    for part in parts.values():
        if part.name.startswith(("train_", "ablation_")) and part.result:
            base = _get(parts, HEADLINE if part.name.startswith("train_") else ALONE)
            ratio = part.result["samples_per_s"] / base["samples_per_s"] if base else None
            cells = [_cell(part.result[key], form) for key, form in COLUMNS.values()]
            gib = part.result["memory_peak_bytes"] / 2**30
            rows.append((part.name, _cell(ratio, ".3f"), *cells, f"{gib:.1f}"))
    if not rows:
        return ""
    return (
        f"{_table(('part', 'ratio', *COLUMNS, 'GiB'), rows)}\n\n"
        f"{_get(parts, HEADLINE).get('attention', '')}\n"
        f"Ratio: to {HEADLINE}, of ablations to {ALONE}. MFU is of the matrix products of the same "
        f"part; only {HEADLINE} and train_fp8 measure these long enough for the clocks to fall."
    )


def _compared(parts: dict[str, Part]) -> str:
    result = _get(parts, "transformers_bf16")
    if not result:
        return ""
    rows = [
        (
            name,
            _cell(result.get(f"{name}_samples_per_s"), ".1f"),
            _cell(result.get(f"ratio_{name}"), ".2f"),
            (result.get(f"{name}_reason") or "")[:MOST_OF_A_LINE],
        )
        for name in BASELINES
    ]
    table = _table(("the other side", "samples/s", "ours, times that", "why not"), rows)
    strongest = _cell(result.get("ratio_strongest"), ".2f")
    return (
        f"Ours {result['ours_samples_per_s']:.1f} samples/s, {strongest} times the strongest "
        f"({result.get('strongest')}); compiled: {result.get('compiled')}\n\n{table}"
    )


def _learning(out: Path) -> str:
    """Losses in bf16 and in FP8 from one start, and the end of a resumed run beside a whole one."""
    bf16, fp8 = (_losses(out / f"text_{each}" / "run_0") for each in ("bf16", "fp8"))
    lines = []
    if steps := sorted(bf16.keys() & fp8.keys()):
        differences = [fp8[step] - bf16[step] for step in steps]
        shown = steps[:: max(1, len(steps) // 6)]
        rows = [(step, f"{bf16[step]:.4f}", f"{fp8[step]:.4f}") for step in shown]
        lines += [
            _table(("step", "loss, bf16", "loss, FP8"), rows),
            f"FP8 less bf16 over {len(steps)} logged steps: {min(differences):+.4f} to "
            f"{max(differences):+.4f}, mean {statistics.fmean(differences):+.4f}, last "
            f"{differences[-1]:+.4f}",
        ]
    whole, resumed = (_losses(out / run) for run in ("whole", "resumed"))
    if whole and resumed:
        stopped = min(resumed.keys() - whole.keys(), default=0)  # in the middle of an interval
        later = [step for step in sorted(whole.keys() | resumed.keys()) if step > stopped][1:]
        same = [step for step in later if whole.get(step) == resumed.get(step)]
        lines.append(
            f"Stopped after step {stopped} and resumed, a run has the whole one's losses in "
            f"{len(same)} of {len(later)} later records"
        )
    return "\n\n".join(lines)


def _losses(run: Path) -> dict[int, float]:
    """Losses by step, of a run's metrics; not a number where there was none."""
    records = [json.loads(line) for line in _text(run / "metrics.jsonl").splitlines()]
    return {each["step"]: math.nan if each["loss"] is None else each["loss"] for each in records}


def _shares(run: Path) -> str:
    """What waiting for data, checkpoints and evaluations took of a whole run of real text.

    A record is closed before a checkpoint is begun, so the next one has what it cost.
    """
    records = [json.loads(line) for line in _text(run / "metrics.jsonl").splitlines()]
    log = _text(run / "result_0.txt")
    if not records or not log:
        return ""
    steps_ms = statistics.fmean(each["step_ms"] for each in records)
    waits_ms = statistics.fmean(each["data_wait_ms"] for each in records)
    lines = [f"Waiting for data: {waits_ms / steps_ms:.2%} of a step"]
    saved = _checkpoint_steps(records, _text(run / "config.toml"))
    beside: list[float] = []
    others: list[float] = []
    begin = 0
    for each in records:
        is_beside = any(begin <= step < each["step"] for step in saved)
        (beside if is_beside else others).append(each["step_ms"])
        begin = each["step"]
    if beside and others:
        ratio = statistics.median(beside) / statistics.median(others)
        lines.append(
            f"Checkpoints: in the interval after one, a step takes {ratio:.3f} times as long"
        )
    times_ms: dict[str, list[int]] = {}
    for line in log.splitlines():
        if line.startswith(MLLOG):
            event = json.loads(line.removeprefix(MLLOG))
            times_ms.setdefault(event["key"], []).append(event["time_ms"])
    evaluations_ms = sum(times_ms["eval_stop"]) - sum(times_ms["eval_start"])
    whole_ms = times_ms["run_stop"][0] - times_ms["run_start"][0]
    return "\n".join([*lines, f"Evaluations: {evaluations_ms / whole_ms:.2%} of the run"])


def _checkpoint_steps(records: Sequence[dict[str, Any]], config: str) -> list[int]:
    """The steps after which a run with a fixed `checkpoint.interval_steps` saved a checkpoint.

    One is due that many steps after the last, at the end of a record.
    """
    interval = tomllib.loads(config).get("checkpoint", {}).get("interval_steps")
    if not isinstance(interval, int) or interval == 0:
        return []
    steps: list[int] = []
    last = 0
    for each in records:
        if each["step"] - last >= interval:
            last = each["step"]
            steps.append(last)
    return steps


def _get(parts: dict[str, Part], name: str) -> dict[str, Any]:
    return parts[name].result if name in parts else {}


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    sys.exit(main())

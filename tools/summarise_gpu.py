"""Summarize a run of `tools/gpu_check.sh` from the files that it has written so far.

    python tools/summarise_gpu.py RESULTS > summary.md

RESULTS is the directory with these files. The exit status is 1 if a part of the run failed or
exceeded its time limit.
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

MOST_CHARACTERS = 10_000  # of the summary, because the check's output may be truncated there
MOST_OF_A_LINE = 200
REFUSED = 2  # exit status if the program does not support a setting, or not on this machine
TIMED_OUT, KILLED = 124, 137  # exit statuses of `timeout`, the second if it had to kill the part
# Training steps are compared with the first of these parts, and ablations with the second.
HEADLINE, BASE = "train_bf16", "ablation_none"
MLLOG = ":::MLLOG "  # start of each line of a result log
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|ALLOC_FAILED|Cannot allocate memory")
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
COLUMNS = {  # columns for training steps: the key of `bench train`, and its format
    "samples/s": ("samples_per_s", ".1f"),
    "step ms": ("step_ms", ".2f"),
    "TFLOP/s": ("tflops", ".4g"),
    "MFU": ("mfu", ".1%"),
    "padding": ("padding_share", ".1%"),
    "loss": ("loss", ".3f"),
}
BASELINES = ("sorted", "sorted_compiled", "padded", "padded_compiled", "padding_free", "nested")
RATES = {  # samples/s: first milestone and goal, in bf16 and in FP8
    "H100": ((850, 1020), (1139, 1250)),
    "H200": ((950, 1100), (1092, 1300)),
}
MODERN_TOKENS_PER_S = 304_000  # published for ModernBERT-base on an H100


@dataclass(frozen=True)
class Part:
    """One part of the GPU check, which is a line of `plan.tsv`, and its outcome.

    `limit` is the part's own time limit, `left` is what was left of its stage's time when the part
    began, and `seconds` is the duration, all in seconds. `status` is the exit status, or None if
    the part has not ended. `result` is the JSON object that the part printed, or is empty.
    """

    name: str
    limit: int
    command: str
    status: int | None
    seconds: int
    left: int
    result: dict[str, Any]
    log: list[str]

    @property
    def state(self) -> str:
        """Outcome of the part in words. After an error, it includes the reason from the log."""
        if self.status in (0, None):
            return "done" if self.status == 0 else "not finished"
        if any(OUT_OF_MEMORY.search(line) for line in self.log[-40:]):
            return "ran out of memory"
        if self.status == REFUSED:
            return f"cannot run here: {self.reason}"
        limit = min(self.limit, self.left)
        if self.status == TIMED_OUT or (self.status == KILLED and self.seconds >= limit - 4):
            why = "it took too long" if limit == self.limit else "the time of its stage was over"
            return f"stopped because {why}: {self.reason}"
        return f"failed (exit status {self.status}): {self.reason}"

    @property
    def reason(self) -> str:
        """Last line of the log that reports an error, or otherwise the last line of the log."""
        lines = [line for line in self.log if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]
        return (errors or lines or [""])[-1][:MOST_OF_A_LINE]


def main() -> int:
    """Print a summary of the results in the directory given on the command line."""
    out = Path(sys.argv[1])
    parts = read_parts(out)
    sections: tuple[tuple[str, Callable[[], str]], ...] = (
        ("GPU check", lambda: _text(out / "machine.txt").strip()),
        ("Goals", lambda: _goals(parts, _text(out / "machine.txt"))),
        ("Training steps", lambda: _training(parts)),
        ("Parts of the check", lambda: _table_of_parts(parts)),
        ("Tests", lambda: _tests(out)),
        ("Comparison with `transformers`", lambda: _compared(parts)),
        ("Runs on real text", lambda: _learning(out)),
        ("Overheads of a run", lambda: _shares(out / "whole")),
    )
    left = MOST_CHARACTERS
    for title, write in sections:
        try:
            text = write()
        except Exception as error:  # so that one odd result does not prevent the other sections
            text = f"This section cannot be written: {error!r}"
        if len(text) > left:
            text = f"{text[:left]}\n(truncated here, complete in the archive)"
        left -= min(left, len(text))
        if text:
            print(f"## {title}\n\n{text}\n")
    accepted = ("done", "not finished", "ran out of memory")
    return int(any(part.state not in accepted for part in parts.values()))


def read_parts(out: Path) -> dict[str, Part]:
    """Read all parts of the plan, and return them by name in the order of the plan."""
    ends = dict(line.split("\t", 1) for line in _text(out / "parts.tsv").splitlines())
    parts = {}
    for line in _text(out / "plan.tsv").splitlines():
        _, file, limit, command = line.split("\t", 3)
        name = file.partition(".")[0]
        status, seconds, left = ends.get(name, "\t0\t0").split("\t")
        parts[name] = Part(
            name=name,
            limit=int(limit),
            command=command,
            status=int(status) if status else None,
            seconds=int(seconds),
            left=int(left),
            result=_result(out / f"{name}.json"),
            log=_text(out / f"{name}.log").splitlines(),
        )
    return parts


def _text(path: Path) -> str:
    """Return the text of a file, or "" if the file does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _result(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty object if the file contains none."""
    try:
        result = json.loads(_text(path))
    except json.JSONDecodeError:
        return {}
    return result if isinstance(result, dict) else {}


def _goals(parts: dict[str, Part], machine: str) -> str:
    """Return a table that compares the measurements with the goals for this GPU model."""
    devices = {part.result.get("device") for part in parts.values()} - {None}
    names = " ".join(str(part.result.get("device_name")) for part in parts.values())
    model = re.search(rf"\b({'|'.join(RATES)})\b", f"{names} {machine}")
    if "dry-run" in machine or (devices and "cuda" not in devices):
        return "This check did not run on a GPU, so no number below says anything about one."
    if model is None:
        return "There are no goals for this GPU, only for H100 and H200."
    measured = _get(parts, "transformers_bf16")
    rates = {name: _get(parts, name).get("samples_per_s") for name in parts}
    captured, eager = (rates.get(f"train_batch_4_{mode}") for mode in ("captured", "eager"))
    goals = []
    for precision, bounds in zip(("bf16", "fp8"), RATES[model[1]], strict=True):
        at_each_batch = [rates.get(f"train_{precision}"), rates.get(f"train_large_{precision}")]
        best = max(filter(None, at_each_batch), default=None)
        for text, bound in zip(("first milestone", "goal"), bounds, strict=True):
            goals.append((f"{precision} samples/s, {text}", best, bound))
    modern = _get(parts, "modern_bf16").get("tokens_per_s")
    goals.append(("ModernBERT-base, tokens/s", modern, MODERN_TOKENS_PER_S))
    ratio = captured / eager if captured and eager else None
    baseline = measured.get("ratio_padded_compiled")
    goals += [
        ("bf16 MFU, of the peak in a long run", _get(parts, HEADLINE).get("mfu"), 0.6),
        ("speedup of captured over eager steps of 4 sequences", ratio, 1.5),
        ("speedup over `transformers`, padded and compiled", baseline, 2.4),
    ]
    rows = [(text, f"at least {bound:g}", _verdict(value, bound)) for text, value, bound in goals]
    return _table(("measurement", f"goal for {model[1]}", "result"), rows)


def _verdict(value: float | None, bound: float) -> str:
    """Return "met" or "missed" and the measured value, which should be at least `bound`.

    If the value is None, returns "not measured".
    """
    if value is None:
        return "not measured"
    return f"{'met' if value >= bound else 'missed'}: {value:.4g}"


def _table_of_parts(parts: dict[str, Part]) -> str:
    """Return a table with the outcome and the duration of each part."""
    rows = [(part.name, part.state, part.seconds, part.limit) for part in parts.values()]
    return _table(("part", "outcome", "seconds", "time limit, seconds"), rows)


def _tests(out: Path) -> str:
    """Return a table with the outcome of each test file, followed by the first failures."""
    rows, failures = [], []
    for path in sorted(out.glob("test_*.txt")):
        lines = _text(path).splitlines()
        started = [line for line in lines if line.startswith("tests/") and "::" in line]
        last = re.fullmatch(r"=+ (.* in .*) =+", lines[-1]) if lines else None
        stopped = "no test started"
        if started:
            stopped = f"stopped during {started[-1][:MOST_OF_A_LINE].strip()}"
        rows.append((path.stem, last[1] if last else stopped))
        failures += [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not rows:
        return ""
    shown = "\n".join(f"- {line[:MOST_OF_A_LINE]}" for line in failures[:12])
    return f"{_table(('file', 'outcome'), rows)}\n\nFailures: {len(failures)}\n{shown}"


def _training(parts: dict[str, Part]) -> str:
    """Return a table with the speed and the memory of each `bench train`.

    The table also has the ratio of each speed to that of the training step it is compared with.
    """
    rows = []
    for part in parts.values():
        kind = part.name.partition("_")[0]
        if kind in ("train", "ablation", "modern") and part.result:
            base = _get(parts, {"train": HEADLINE, "ablation": BASE}.get(kind, ""))
            ratio = part.result["samples_per_s"] / base["samples_per_s"] if base else None
            cells = [_cell(part.result[key], form) for key, form in COLUMNS.values()]
            gib = part.result["memory_peak_bytes"] / 2**30
            rows.append((part.name, _cell(ratio, ".3f"), *cells, f"{gib:.1f}"))
    if not rows:
        return ""
    return (
        f"{_table(('part', 'ratio', *COLUMNS, 'GiB'), rows)}\n\n"
        f"{_get(parts, HEADLINE).get('attention', '')}\n"
        f"The ratio compares samples/s with {HEADLINE}, and for ablations with {BASE}. MFU is "
        "relative to the matrix products of the same part. The loss is that of the last step, or - "
        "if it is not a finite number. "
        f"Only {HEADLINE} and train_fp8 measure these long enough for the clocks to slow down."
    )


def _compared(parts: dict[str, Part]) -> str:
    """Return a table with the speed of each baseline of `bench transformers`, and our speedup."""
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
    head = ("baseline", "samples/s", "our speedup", "why it did not run")
    strongest = _cell(result.get("ratio_strongest"), ".2f")
    return (
        f"Our step trains {result['ours_samples_per_s']:.1f} samples/s, which is {strongest} times "
        f"as fast as the fastest baseline ({result.get('strongest')}). "
        f"Compiled: {result.get('compiled')}.\n\n{_table(head, rows)}"
    )


def _learning(out: Path) -> str:
    """Return a comparison of losses between training runs, as Markdown.

    The run in bf16 is compared with that in FP8, and an uninterrupted run with a resumed one.
    """
    bf16, fp8 = (_losses(out / f"text_{each}" / "run_0") for each in ("bf16", "fp8"))
    lines = []
    if steps := sorted(bf16.keys() & fp8.keys()):
        differences = [fp8[step] - bf16[step] for step in steps]
        shown = steps[:: max(1, len(steps) // 6)]
        rows = [(step, f"{bf16[step]:.4f}", f"{fp8[step]:.4f}") for step in shown]
        lines += [
            _table(("step", "loss, bf16", "loss, FP8"), rows),
            f"The loss in FP8 minus that in bf16 is {min(differences):+.4f} to "
            f"{max(differences):+.4f} over {len(steps)} logged steps. The mean is "
            f"{statistics.fmean(differences):+.4f}, the last {differences[-1]:+.4f}.",
        ]
    whole, resumed = (_losses(out / run) for run in ("whole", "resumed"))
    if whole and resumed:
        # The run was stopped within an interval, so only the resumed one has a record there.
        stopped = min(resumed.keys() - whole.keys(), default=0)
        later = [step for step in sorted(whole.keys() | resumed.keys()) if step > stopped][1:]
        same = [step for step in later if whole.get(step) == resumed.get(step)]
        lines.append(
            f"A run that stopped after step {stopped} and was resumed has the same loss as the "
            f"uninterrupted run in {len(same)} of {len(later)} later records."
        )
    return "\n\n".join(lines)


def _losses(run: Path) -> dict[int, float]:
    """Return the losses in a run's metrics, by step.

    A loss that is missing in a record is NaN.
    """
    records = [json.loads(line) for line in _text(run / "metrics.jsonl").splitlines()]
    return {each["step"]: math.nan if each["loss"] is None else each["loss"] for each in records}


def _shares(run: Path) -> str:
    """Return how much time a run spends on data waits, checkpoints and evaluations, as sentences.

    The time of a checkpoint appears in the metrics record after it, because training writes a
    record before it starts a checkpoint.
    """
    records = [json.loads(line) for line in _text(run / "metrics.jsonl").splitlines()]
    log = _text(run / "result_0.txt")
    if not records or not log:
        return ""
    steps_ms = statistics.fmean(each["step_ms"] for each in records)
    waits_ms = statistics.fmean(each["data_wait_ms"] for each in records)
    lines = [f"Waiting for data takes {waits_ms / steps_ms:.2%} of a step."]
    saved = _checkpoint_steps(records, _text(run / "config.toml"))
    after_checkpoint: list[float] = []
    others: list[float] = []
    begin = 0
    for each in records:
        follows = any(begin <= step < each["step"] for step in saved)
        (after_checkpoint if follows else others).append(each["step_ms"])
        begin = each["step"]
    if after_checkpoint and others:
        ratio = statistics.median(after_checkpoint) / statistics.median(others)
        lines.append(
            f"In the interval after a checkpoint, a step takes {ratio:.3f} times as long as usual."
        )
    times_ms: dict[str, list[int]] = {}
    for line in log.splitlines():
        if line.startswith(MLLOG):
            event = json.loads(line.removeprefix(MLLOG))
            times_ms.setdefault(event["key"], []).append(event["time_ms"])
    evaluations_ms = sum(times_ms["eval_stop"]) - sum(times_ms["eval_start"])
    whole_ms = times_ms["run_stop"][0] - times_ms["run_start"][0]
    return "\n".join([*lines, f"Evaluations take {evaluations_ms / whole_ms:.2%} of the run."])


def _checkpoint_steps(records: Sequence[dict[str, Any]], config: str) -> list[int]:
    """Return the steps after which a run saved a checkpoint.

    A checkpoint is saved at the first record at least `checkpoint.interval_steps` steps after the
    previous checkpoint. If the config does not fix that setting, the list is empty.
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
    """Return the JSON object of the part `name`, or an empty object if it printed none."""
    return parts[name].result if name in parts else {}


def _cell(value: float | None, form: str) -> str:
    """Return a number as text for a cell of a table, or "-" if it is None."""
    return "-" if value is None else format(value, form)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with this head and these rows."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    sys.exit(main())

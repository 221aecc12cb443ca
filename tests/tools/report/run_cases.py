"""Runs as they might have gone: directories and logs with made-up curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.report.run import Run, read_run
from bert_tools.report.run_files import only_run
from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.run.outcome import RunOutcome, Status
from support import CONFIGS

BATCH_16K = CONFIGS / "open_adamw_dgxa100_128x8x16x1.toml"  # the published curve's own
BATCH_448 = CONFIGS / "dgxa100_1x8x56x1.toml"
SAMPLES_448 = 2_414_421  # of the reference convergence point
PUBLISHED = ((20, 0.36), (80, 0.50), (100, 0.69), (120, 0.71), (179, 0.72))  # of the issue
GOOD_448 = (0.45, 0.58, 0.65, 0.68, 0.695, 0.702, 0.708, 0.712, 0.716, 0.721)


def record(step: int, batch: int, accuracy: float | None, **values: Any) -> dict[str, Any]:
    """One of `metrics.jsonl`, of a healthy run but for `values`."""
    return {
        "step": step,
        "samples": step * batch,
        "loss": 2.0,
        "mlm_accuracy": accuracy,
        "learning_rate": 1e-3,
        "samples_per_s": 1000.0,
        "skipped_steps": 0,
        "step_ms": 100.0,
        "wait_ms": 0.1,
        "slowest_over_median": None,
        **values,
    }


def records_16k(points: Sequence[tuple[int, float]], **values: Any) -> list[dict[str, Any]]:
    """Of evaluations at steps of the config BATCH_16K."""
    return [record(step, 16_384, accuracy, **values) for step, accuracy in points]


def records_448(accuracies: Sequence[float], share: float = 1.0) -> list[dict[str, Any]]:
    """Evenly spaced evaluations, the last at `share` of SAMPLES_448."""
    steps = [
        round(share * SAMPLES_448 / 448 * number / len(accuracies))
        for number in range(1, len(accuracies) + 1)
    ]
    return [record(step, 448, each) for step, each in zip(steps, accuracies, strict=True)]


def write_run(
    directory: Path,
    config: Path,
    records: Sequence[Mapping[str, Any]],
    *,
    overrides: Sequence[str] = (),
    ended: Status | None = None,
    initial_weights: str = "checkpoint",
) -> Path:
    """A run directory with run 0."""
    run = directory / "run_0"
    run.mkdir(parents=True)
    text = config_to_toml(load_config(config, overrides))
    (run / "config.toml").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (run / "metrics.jsonl").write_text(lines, encoding="utf-8")
    log = log_line("initial_weights", initial_weights)
    (directory / "result_0.txt").write_text(log, encoding="ascii")
    if ended is not None:
        outcome = RunOutcome(
            status=ended, steps=1, samples=1, seconds=1.0, mlm_accuracy=None, stopped_by=None
        )
        (run / "outcome.json").write_bytes(outcome.to_json())
    return directory


def log_line(key: str, value: Any, **metadata: Any) -> str:
    """One line of an MLPerf log."""
    fields = {"key": key, "value": value, "time_ms": 1, "metadata": metadata}
    return f":::MLLOG {json.dumps(fields)}\n"


def log_of(points: Sequence[tuple[int, float]], batch: int, status: str | None = None) -> str:
    """Somebody's log of evaluations at steps, with other output between."""
    lines = [log_line("global_batch_size", batch), "0: loading\n"]
    for step, accuracy in points:
        lines.append("7: " + log_line("eval_accuracy", accuracy, epoch_num=step * batch))
    if status is not None:
        lines.append(log_line("run_stop", None, status=status))
    return "".join(lines)


def read_only(path: Path) -> Run:
    """As `report --doctor` reads it."""
    return read_run(only_run(path), needs_config=True)

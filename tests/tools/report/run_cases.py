"""Runs as they might have gone: directories and logs with made-up curves."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.report.run import Run, read_run
from bert_tools.report.run_files import only_run
from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.run.outcome import RunOutcome, Status
from support import CONFIGS, TINY_CONFIG

Told = Callable[..., str]  # what `report` or `watch` prints

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


def tiny(step: int, accuracy: float | None = None, **values: Any) -> dict[str, Any]:
    """One at a batch of 16, with all that `watch` shows."""
    more = {"loss": 5.0 - step / 1000, "samples_per_s": 800.0, "tokens_per_s": 20_000.0}
    more |= {"imbalance_tokens": 1.05, "idle_fraction": 0.04, "clipped_fraction": 0.25}
    more |= {"grad_norm": 1.5, "memory_bytes": 3 * 2**30, "step_ms": 20.0}
    return record(step, 16, accuracy, **{**more, **values})


def records_16k(points: Iterable[tuple[int, float]], **values: Any) -> list[dict[str, Any]]:
    """Records of evaluations at steps of the config BATCH_16K."""
    return [record(step, 16_384, accuracy, **values) for step, accuracy in points]


def records_448(accuracies: Sequence[float], share: float = 1.0) -> list[dict[str, Any]]:
    """Evenly spaced evaluations, the last at `share` of SAMPLES_448."""
    between = share * SAMPLES_448 / 448 / len(accuracies)
    return [record(round(between * n), 448, each) for n, each in enumerate(accuracies, 1)]


def lines_of(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in records)


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
    (run / "metrics.jsonl").write_text(lines_of(records), encoding="utf-8")
    log = log_line("initial_weights", initial_weights)
    (directory / "result_0.txt").write_text(log, encoding="ascii")
    if ended is not None:
        end_run(run, ended)
    return directory


def write_watched(
    directory: Path,
    records: Sequence[Mapping[str, Any]] = (),
    *,
    log: Sequence[str] = (),
    index: int = 0,
) -> Path:
    """`run_<index>` of a run directory, under way; 20 steps, target 0.99, a batch of 16."""
    run = directory / f"run_{index}"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(TINY_CONFIG, encoding="utf-8")
    if records:
        (run / "metrics.jsonl").write_text(lines_of(records), encoding="utf-8")
    (run / "stdout.log").write_text("".join(f"12:00:00 {line}\n" for line in log), encoding="utf-8")
    return run


def end_run(run: Path, status: Status = "success", stopped_by: str | None = None) -> None:
    outcome = RunOutcome(
        status=status, steps=20, samples=320, seconds=61.0, mlm_accuracy=0.99, stopped_by=stopped_by
    )
    (run / "outcome.json").write_bytes(outcome.to_json())


def log_line(key: str, value: Any, seconds: float = 0.001, **metadata: Any) -> str:
    """One line of an MLPerf log."""
    fields = {"key": key, "value": value, "time_ms": int(1000 * seconds), "metadata": metadata}
    return f":::MLLOG {json.dumps(fields)}\n"


def log_of(points: Iterable[tuple[int, float]], batch: int, status: str | None = None) -> str:
    """Somebody's log of evaluations at steps, with other output between."""
    lines = [log_line("global_batch_size", batch), "0: loading\n"]
    for step, accuracy in points:
        lines.append("7: " + log_line("eval_accuracy", accuracy, epoch_num=step * batch))
    if status is not None:
        lines.append(log_line("run_stop", None, status=status))
    return "".join(lines)


def read_only(path: Path) -> Run:
    """As `report doctor` reads it."""
    return read_run(only_run(path), needs_config=True)

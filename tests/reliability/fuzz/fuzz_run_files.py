"""What a run leaves behind as a world to fuzz: its logs, metrics, outcome and directory."""

import json
from pathlib import Path

from bert_tools.common.log_reader import read_foreign_log
from bert_tools.report.doctor import diagnose
from bert_tools.report.run import read_run
from bert_tools.report.run_files import only_run
from bert_tools.report.watch_frame import frame, status_line
from bert_tools.report.watch_look import Watcher
from mlperf_bert.common.errors import DataError
from mlperf_bert.run.outcome import RunOutcome
from support import TINY_CONFIG

LOG = "result_0.txt"
METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
CONFIG = "config.toml"
RUN = "run_0"
STDOUT = "stdout.log"
SAID = (
    "sampler uniform, balance none",
    "step 3/20  100 samples/s  2,000 tokens/s  loss 9.2000",
    "evaluation at 48 samples: accuracy 0.2500, on [MASK] inputs 0.2400 (0.5 s)",
    "rank 1 on n1 is slow: 0.200 s for its own work of a step, 2.00 times the median of 0.100 s",
)


def make_log(directory: Path) -> None:
    """A whole log; of the 400 records of tensor names, some are kept."""
    from submissions import write_log

    path = directory / LOG
    write_log(path, "open", 7, 12.5)
    lines = path.read_text("ascii").split("\n")
    names = [line for line in lines if "weights_initialization" in line][3:]
    path.write_text("\n".join(line for line in lines if line not in names))


def make_metrics(directory: Path) -> None:
    """Records as a run writes them, an evaluation in one of three."""
    records = [
        {
            "step": step,
            "samples": 16 * step,
            "loss": 9.5 - step / 10,
            "mlm_accuracy": 0.25 if step % 3 == 0 else None,
            "learning_rate": 1e-3,
            "skipped_steps": 0,
            "grad_norm": 1.5,
            "samples_per_s": 100.0,
            "step_ms": 160.0,
            "wait_ms": 0.1,
            "slowest_over_median": 1.1,
            "noise_scale": 900.0,
            "noise_scale_plain": 80.0,
        }
        for step in range(1, 8)
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in records)
    (directory / METRICS).write_text(text, encoding="ascii")


def make_outcome(directory: Path) -> None:
    """Of a run that reached its target."""
    outcome = RunOutcome(
        status="success", steps=7, samples=112, seconds=3.5, mlm_accuracy=0.25, stopped_by=None
    )
    (directory / OUTCOME).write_bytes(outcome.to_json())


def make_run(directory: Path) -> None:
    """A run directory with all that `report` reads."""
    run = directory / RUN
    run.mkdir()
    (run / CONFIG).write_text(TINY_CONFIG, encoding="utf-8")
    make_metrics(run)
    make_outcome(run)
    make_log(directory)


def parse_run(path: Path) -> object:
    """As `report --doctor`, to the lines that it prints."""
    diagnosis = diagnose(read_run(only_run(path), needs_config=True))
    assert all(line.isprintable() for line in diagnosis.lines())
    json.dumps(diagnosis.as_json())
    return diagnosis


def make_watched_run(directory: Path) -> None:
    """The same with what the run has said."""
    make_run(directory)
    text = "".join(f"12:00:00 {line}\n" for line in SAID)
    (directory / RUN / STDOUT).write_text(text, encoding="ascii")


def parse_watched_run(directory: Path) -> object:
    """As `watch`, to the frames that it draws; it goes on where a file is wrong, and says so."""
    look = Watcher(directory).whole_look()
    for width, height in ((80, 24), (30, 9)):
        lines = frame(look, width, height, "unicode", "")
        assert len(lines) <= height
        assert all(line.plain.isprintable() and line.cell_len <= width for line in lines)
    assert status_line(look).isprintable()
    json.dumps(look.as_json(), allow_nan=False)
    problems = [alert.text for alert in look.alerts if alert.kind == "file"]
    if problems:
        raise DataError("watch", problems[0], "it is shown as an alert")
    return look


def parse_foreign_log(directory: Path) -> object:
    """The records alone, then all that `report --doctor` makes of them."""
    read_foreign_log(directory / LOG, LOG)
    return parse_run(directory / LOG)

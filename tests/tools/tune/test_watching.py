"""What is seen of a training that is under way: each of its evaluations; lines that stay lines."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bert_tools.tune.objective import Curve
from bert_tools.tune.search import StudyProgress
from bert_tools.tune.trial_process import TrialProcess

THREE_AT_ONCE = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "run_0"
run.mkdir()
facts = {"loss": 1.0, "skipped_steps": 0}
rows = [{"step": k, "samples": 32 * k, "mlm_accuracy": k / 10, **facts} for k in (1, 2, 3)]
(run / "beside").write_text("".join(json.dumps(row) + chr(10) for row in rows))
(run / "beside").rename(run / "metrics.jsonl")
time.sleep(250)
"""


def test_every_evaluation_is_looked_at_however_many_come_at_once(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def is_hopeless(curve: Curve) -> bool:
        seen.append([accuracy for _, accuracy in curve])
        return len(curve) == 2

    trainer = (sys.executable, "-c", THREE_AT_ONCE)
    process = TrialProcess(trainer, tmp_path, tmp_path / "data", tmp_path / "trial.toml")
    assert process.wait(is_hopeless, lambda: False) == 128 + 15
    assert seen == [[0.1], [0.1, 0.2]]


@pytest.mark.parametrize(("workers", "is_live"), [(1, True), (2, False)])
def test_only_one_worker_draws_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: int, is_live: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with StudyProgress(workers) as progress:
        progress.begins("trial 0, 1 of 2")
    assert ("trial 0" in capsys.readouterr().err) is is_live


def test_what_a_training_printed_does_not_reach_the_terminal_raw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StudyProgress(1) as progress:
        progress.line("ended with: \x1b[2J\x07")
    assert capsys.readouterr().err == "ended with: \\x1b[2J\\x07\n"


def test_a_study_goes_on_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    lost = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", lost)
    with StudyProgress(workers=1) as progress:
        progress.line("one")
        progress.line("another")
    with suppress(BrokenPipeError):  # of what it still holds
        lost.close()

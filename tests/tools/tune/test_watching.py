"""A training under way: what is seen of it, when it is hopeless, and what it counts."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bert_tools.tune.objective import Curve, judged
from bert_tools.tune.search import StudyProgress
from bert_tools.tune.settings import Pruner
from bert_tools.tune.trial_process import TrialProcess

FOUR = ((0.1, 0.2, 0.3), (0.1, 0.3, 0.5), (0.1, 0.4, 0.6), (0.2, 0.5, 0.7))  # median 0.35 at two


def pruner(rule: str, first: int = 2) -> Pruner:
    return Pruner(rule=rule, first=first, target=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "stops"),
    [((0.0,), False), ((0.1, 0.34), True), ((0.1, 0.36), False), ((0.36, 0.1), False)],
)
def test_below_the_median_ends(own: tuple[float, ...], stops: bool) -> None:
    assert pruner("median").is_hopeless(own, FOUR) is stops
    assert not pruner("none").is_hopeless(own, FOUR)


def test_few_others_say_nothing() -> None:
    assert not pruner("median").is_hopeless((0.0, 0.0), FOUR[:3])
    assert not pruner("median").is_hopeless((0.0, 0.0, 0.0, 0.0), FOUR)  # nobody came so far


def test_who_reached_the_target_counts_as_there_later_on() -> None:
    others = [(0.7,), (0.7,), (0.7,), (0.1, 0.1, 0.1)]
    assert pruner("median").is_hopeless((0.2, 0.3, 0.6), others)
    assert not pruner("median").is_hopeless((0.2, 0.3, 0.7), others)


def test_halving_keeps_a_third_at_its_rungs() -> None:
    others = [(level,) * 12 for level in (0.1, 0.2, 0.3, 0.4, 0.5)]  # of six, two go on
    halving = pruner("halving", first=2)
    for number, is_rung in ((1, False), (2, True), (3, False), (6, True), (12, False)):
        assert halving.is_hopeless((0.35,) * number, others) is is_rung
        assert not halving.is_hopeless((0.45,) * number, others)


CURVE = ((100, 0.2), (200, 0.35), (300, 0.3))


def test_what_reached_the_target_counts_what_it_needed() -> None:
    assert judged(CURVE, 300, 6.0, "samples", 0.35, 1000).samples == 200
    assert judged(CURVE, 300, 6.0, "samples", 0.36, 1000).ended == "missed"
    assert judged(CURVE, 300, 6.0, "samples", 0.2, 1000).value == 100
    assert judged(CURVE, 300, 6.0, "time", 0.3, 1000).value == 6.0


def test_a_miss_is_worse_than_the_whole_budget_and_better_the_nearer_it_came() -> None:
    value = judged(CURVE, 300, 6.0, "samples", 0.7, 1000).value
    assert value == pytest.approx(1500)  # half of the target missed
    near = judged(((300, 0.6),), 300, 6.0, "samples", 0.7, 1000).value
    assert near is not None and 1000 < near < 1500
    assert judged((), 40, 1.0, "samples", 0.7, 1000).value == 2000  # diverged
    # Six seconds for 300 samples are twenty for a budget of 1,000.
    assert judged(CURVE, 300, 6.0, "time", 0.7, 1000).value == pytest.approx(30)


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

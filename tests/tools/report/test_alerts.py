"""Alerts: each where its trouble is, and none on a healthy run."""

from pathlib import Path
from typing import Any

import pytest
from watch_cases import make_run, record

from bert_tools.report.watch_files import History, Remarks
from bert_tools.report.watch_look import Alert, Watcher, find_alerts
from mlperf_bert.config.files import config_to_toml, load_config
from support import CONFIGS

HEALTHY = [record(step, 0.01 * step if step % 5 == 0 else None) for step in range(1, 41)]


def alerts_of(
    records: list[dict[str, Any]], silent_s: float | None = 0.0, log: tuple[str, ...] = ()
) -> list[Alert]:
    history, remarks = History(), Remarks()
    for each in records:
        history.add(each)
    for line in log:
        remarks.add(line.encode())
    return list(find_alerts(None, history, remarks, silent_s, []))


def kinds(alerts: list[Alert]) -> list[str]:
    return [alert.kind for alert in alerts]


def test_a_healthy_run_has_none() -> None:
    assert alerts_of(HEALTHY) == []
    assert alerts_of([]) == []


@pytest.mark.parametrize(
    ("step_ms", "evaluation", "silent_s", "is_silent"),
    [
        (20.0, "", 29.0, False),  # network file systems hold things back
        (20.0, "", 31.0, True),
        (10_000.0, "", 49.0, False),  # one step a record: 10 s usually
        (10_000.0, "", 51.0, True),
        (10_000.0, "evaluation at 160 samples: accuracy 0.1 (90.0 s)", 499.0, False),
        (10_000.0, "evaluation at 160 samples: accuracy 0.1 (90.0 s)", 501.0, True),
    ],
)
def test_silence_is_measured_by_what_is_usual(
    step_ms: float, evaluation: str, silent_s: float, is_silent: bool
) -> None:
    records = [record(step, step_ms=step_ms) for step in range(1, 5)]
    alerts = alerts_of(records, silent_s, (f"12:00:00 {evaluation}",) if evaluation else ())
    assert kinds(alerts) == (["silent"] if is_silent else [])
    if is_silent:
        assert alerts[0].weight == "grave" and "no new metrics for 0:0" in alerts[0].text


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"loss": None}, "the loss is no number"),
        ({"skipped_steps": 1}, "were skipped"),
        ({"loss": 50.0}, "the loss diverges"),
        ({"mlm_accuracy": 0.01}, "the accuracy collapsed"),
    ],
)
def test_what_train_would_say_is_said(last: dict[str, Any], words: str) -> None:
    first = [record(step, 0.4) for step in range(1, 31)]
    then = [{**record(step, 0.4), **last} for step in range(31, 41)]
    alerts = alerts_of([*first, *then])
    assert kinds(alerts) == ["health"] and words in alerts[0].text
    assert alerts[0].weight == "grave"


def test_an_alarm_that_has_recovered_goes_away() -> None:
    records = [record(step, loss=None if step == 20 else 4.0) for step in range(1, 25)]
    assert kinds(alerts_of(records[:20])) == ["health"]
    assert alerts_of(records) == []


def test_slower_than_before() -> None:
    rates = [1000.0] * 30 + [890.0] * 6
    alerts = alerts_of([record(n, samples_per_s=rate) for n, rate in enumerate(rates, 1)])
    assert kinds(alerts) == ["slow"]
    assert "890.0 samples/s, 1,000.0 until now" in alerts[0].text
    noisy = [1000.0, 800.0] * 18  # as ever
    assert alerts_of([record(n, samples_per_s=rate) for n, rate in enumerate(noisy, 1)]) == []


def test_waiting_for_data() -> None:
    alerts = alerts_of([record(step, wait_ms=3.0) for step in range(1, 9)])
    assert kinds(alerts) == ["waits"] and "15% of rank 0's time" in alerts[0].text


SLOW = "12:00:01 rank 3 on n2 is slow: 0.812 s for its own work of a step, 2.03 times the median"
EVALUATED = "12:00:00 evaluation at 1,600 samples: accuracy 0.2000 (1.0 s)"


def test_stragglers_are_named_until_the_next_comparison() -> None:
    alerts = alerts_of(HEALTHY, log=(EVALUATED, SLOW, "12:00:02 step 5/20  1 samples/s"))
    assert kinds(alerts) == ["slow_rank"] and "rank 3 on n2 is slow" in alerts[0].text
    assert alerts_of(HEALTHY, log=(EVALUATED, SLOW, EVALUATED)) == []
    ratio = [*HEALTHY, record(41, slowest_over_median=1.72)]
    assert "1.72 times the median" in alerts_of(ratio)[0].text
    assert alerts_of([*HEALTHY, record(41, slowest_over_median=1.2)]) == []


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", HEALTHY)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x"}\n')
    (run / "config.toml").write_text("[run\n")
    look, _ = Watcher(tmp_path / "run").look()
    assert kinds(list(look.alerts)) == ["file", "file"]
    assert "config.toml" in look.alerts[0].text and "line 41" in look.alerts[1].text
    assert look.history.last == HEALTHY[-1]  # what came before still holds


def test_problems_come_last() -> None:
    problem = "a: b; c"
    history = History()
    history.add(record(1, loss=None))
    alerts = list(find_alerts(None, history, Remarks(), 1e6, [problem]))
    assert kinds(alerts) == ["silent", "health", "file"]


def reference_run(directory: Path, points: list[tuple[int, float]]) -> Path:
    """Of the recipe whose curve is published, with evaluations at these steps."""
    records = [{**record(step, accuracy), "samples": step * 16_384} for step, accuracy in points]
    run = make_run(directory, records)
    config = CONFIGS / "open_adamw_dgxa100_128x8x16x1.toml"
    (run / "config.toml").write_text(config_to_toml(load_config(config)))
    return directory


def test_a_run_far_behind_published_ones_is_told(tmp_path: Path) -> None:
    late = reference_run(tmp_path / "late", [(20, 0.36), (120, 0.40)])
    assert "late" in kinds(list(Watcher(late).look()[0].alerts))
    look, _ = Watcher(reference_run(tmp_path / "good", [(20, 0.36), (120, 0.711)])).look()
    assert "late" not in kinds(list(look.alerts))
    assert look.remaining.basis == "published runs"

"""Alerts: each where its trouble is; and how long a run may still take, where that can be said."""

import csv
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from run_cases import BATCH_16K, records_16k, tiny, write_run, write_watched

from bert_tools.report.run import Evaluation, Task
from bert_tools.report.watch_files import History, Remarks
from bert_tools.report.watch_look import (
    Alert,
    Forecast,
    Watcher,
    by_curve,
    by_published,
    find_alerts,
)
from support import REPOSITORY, mlperf_records

LOGS = sorted((REPOSITORY / "results" / "cpu_2core_pytorch" / "bert").glob("result_*.txt"))
TARGETS = (0.20, 0.22, 0.24, 0.26, 0.27)
HEALTHY = [tiny(step, 0.01 * step if step % 5 == 0 else None) for step in range(1, 41)]


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


def test_silence_is_measured_by_what_is_usual() -> None:
    evaluated = ("12:00:00 evaluation at 160 samples: accuracy 0.1 (90.0 s)",)
    for step_ms, log, silent_s, is_silent in (
        (20.0, (), 29.0, False),  # network file systems hold things back
        (20.0, (), 31.0, True),
        (10_000.0, (), 49.0, False),  # one step a record: 10 s usually
        (10_000.0, (), 51.0, True),
        (10_000.0, evaluated, 499.0, False),
        (10_000.0, evaluated, 501.0, True),
    ):
        alerts = alerts_of([tiny(step, step_ms=step_ms) for step in range(1, 5)], silent_s, log)
        assert kinds(alerts) == (["silent"] if is_silent else [])
        if is_silent:
            assert alerts[0].weight == "grave" and "no new metrics for 0:0" in alerts[0].text


def test_slower_than_before() -> None:
    rates = [1000.0] * 30 + [890.0] * 6
    alerts = alerts_of([tiny(n, samples_per_s=rate) for n, rate in enumerate(rates, 1)])
    assert kinds(alerts) == ["slow"]
    assert "890.0 samples/s, 1,000.0 until now" in alerts[0].text
    noisy = [1000.0, 800.0] * 18  # as ever
    assert alerts_of([tiny(n, samples_per_s=rate) for n, rate in enumerate(noisy, 1)]) == []


def test_waiting_for_data() -> None:
    alerts = alerts_of([tiny(step, wait_ms=3.0) for step in range(1, 9)])
    assert kinds(alerts) == ["waits"] and "15% of rank 0's time" in alerts[0].text


def test_the_slowest_rank_is_named_if_it_is_slow() -> None:
    (alert,) = alerts_of([*HEALTHY, tiny(41, slowest_over_median=1.72, slowest_rank=3)])
    assert alert.kind == "slow_rank" and "rank 3 needs 1.72 times the median" in alert.text
    assert alerts_of([*HEALTHY, tiny(41, slowest_over_median=1.2)]) == []


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = write_watched(tmp_path / "run", HEALTHY)
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
    history.add(tiny(1, loss=None))
    alerts = list(find_alerts(None, history, Remarks(), 1e6, [problem]))
    assert kinds(alerts) == ["silent", "file"]


def test_a_run_behind_published_ones_is_told(tmp_path: Path) -> None:
    for step, accuracy, weights in ((120, 0.40, ["grave"]), (104, 0.5, ["mild"]), (120, 0.711, [])):
        records = records_16k([(20, 0.36), (step, accuracy)])
        look, _ = Watcher(write_run(tmp_path / str(accuracy), BATCH_16K, records)).look()
        assert [alert.weight for alert in look.alerts if alert.kind == "late"] == weights
        assert look.remaining.basis == "published runs"


def task(batch: int, optimizer: str) -> Task:
    return Task(batch, optimizer, 0.72, is_reference=True)


def curve_of(log: Path) -> list[Evaluation]:
    return [
        Evaluation(each["metadata"]["samples_count"], each["value"])
        for each in mlperf_records(log, "eval_accuracy")
    ]


def forecasts(curve: list[Evaluation], target: float) -> list[bool]:
    """Whether each forecast held the moment at which the target was in fact seen to be reached."""
    reached = next((at for at, each in enumerate(curve) if each.accuracy >= target), 0)
    held = []
    for at in range(3, reached):
        forecast = by_curve(curve[: at + 1], target)
        if isinstance(forecast, Forecast):
            truth = curve[reached].samples - curve[at].samples
            held.append(forecast.low_samples <= truth <= forecast.high_samples)
    return held


def test_the_truth_lies_in_nine_of_ten_forecasts_of_our_runs() -> None:
    held = [each for log in LOGS for target in TARGETS for each in forecasts(curve_of(log), target)]
    assert len(LOGS) == 10 and len(held) > 100
    assert sum(held) / len(held) >= 0.9


def test_a_straight_line_and_a_logarithm_lie_within() -> None:
    line = [Evaluation(1000 * n, 0.05 * n) for n in range(1, 6)]
    found = by_curve(line, 0.5)
    assert isinstance(found, Forecast) and found.basis == "its curve"
    assert found.low_samples == pytest.approx(5000)
    assert found.high_samples > 5000
    log = [Evaluation(1000 * 2**n, 0.1 * n) for n in range(1, 6)]  # the next doubling brings 0.1
    found = by_curve(log, 0.6)
    assert isinstance(found, Forecast)
    assert found.low_samples < 32_000 <= found.high_samples
    assert found.high_samples == pytest.approx(32_000 + 16_000)  # and one evaluation


def test_nothing_is_said_where_nothing_is_known() -> None:
    for accuracies, reason in (
        ((0.1, 0.2, 0.3), "after 4 evaluations"),
        ((0.3, 0.3, 0.3, 0.3), "does not rise"),
        ((0.1, 0.2, 0.3, 0.2), "does not rise"),
        ((0.4, 0.3, 0.2, 0.1), "does not rise"),
        ((0.10, 0.15, 0.22, 0.23), "does not rise|too flat"),
    ):
        curve = [Evaluation(1000 * n, each) for n, each in enumerate(accuracies, 1)]
        found = by_curve(curve, 0.99)
        assert isinstance(found, str) and any(words in found for words in reason.split("|"))
    for samples in ((0, 1, 2, 3), (5, 5, 6, 7), (9, 8, 7, 6)):  # that do not ascend
        curve = [Evaluation(each, 0.1 * n) for n, each in enumerate(samples, 1)]
        assert isinstance(by_curve(curve, 0.9), str)


def published() -> dict[str, list[tuple[int, float]]]:
    text = resources.files("bert_tools.report").joinpath("published_curves.csv").read_text()
    found: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        point = (int(row["step"]) * int(row["global_batch_size"]), float(row["mlm_accuracy"]))
        found.setdefault(row["curve"], []).append(point)
    return found


def test_published_runs_are_forecast_by_each_other() -> None:
    for points in published().values():
        end = next(samples for samples, accuracy in points if accuracy >= 0.72)
        for samples, _ in points[:-1]:
            found = by_published(samples, task(16_384, "adamw"))
            assert isinstance(found, Forecast) and found.basis == "published runs"
            assert found.low_samples <= end - samples <= found.high_samples


def test_other_batches_go_by_the_reference_and_unknown_ones_are_told() -> None:
    # MLPerf's reference convergence point at 448: 2,414,421 samples; single runs 2.10 to 2.70 M.
    found = by_published(1_000_000, task(448, "lamb"))
    assert isinstance(found, Forecast)
    assert found.low_samples < 1_100_000 and 1_700_000 < found.high_samples < 1_900_000
    assert by_published(0, task(10**6, "adamw")) == "nothing is published for this batch"
    late = by_published(9_000_000, task(448, "lamb"))
    assert late == "later than the published runs of this batch"


def test_times_are_those_of_the_rates(tmp_path: Path) -> None:
    # 800 samples/s, and evaluations of 2 s every 160 samples: 1/800 + 2/160 s a sample.
    records = [tiny(step, 0.1 if step % 10 == 0 else None) for step in range(1, 11)]
    log = ["evaluation at 160 samples: accuracy 0.1000, on [MASK] inputs 0.1000 (2.0 s)"]
    write_watched(tmp_path / "run", records, log=log)
    look, _ = Watcher(tmp_path / "run").look()
    sample_s = 1 / 800 + 2 / 160
    assert look.remaining.to_last_step_s == pytest.approx(10 * 16 * sample_s)
    assert look.remaining.to_target_s is None
    assert look.remaining.why_not == "after 4 evaluations"


def test_the_forecast_counts_from_the_newest_step(tmp_path: Path) -> None:
    records = [tiny(step, step / 20 if step <= 8 else None) for step in range(1, 13)]
    write_watched(tmp_path / "run", records)
    look, _ = Watcher(tmp_path / "run").look()
    # 0.05 a step of 16 samples: at step 8 it is 0.4, so 0.99 comes 11.8 steps later, 7.8 from now.
    assert look.remaining.to_target_s is not None
    assert look.remaining.to_target_s[0] == pytest.approx(7.8 * 16 / 800)
    assert math.isfinite(look.remaining.to_target_s[1])

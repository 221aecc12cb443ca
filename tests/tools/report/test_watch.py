"""`watch`: the state of a run, its numbers, the remaining time, and nothing raw on the terminal."""

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.report.watch import rows_of, snapshot_of
from run_cases import end_run, record, write_run

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\n\x00\ud800\u0301" + "\u4e2d" * 50


def set_age(run, seconds):
    for name in ("config.toml", "metrics.jsonl", "stdout.log"):
        if (run / name).exists():
            os.utime(run / name, (time.time() - seconds,) * 2)


def numbers(look):
    return dict(rows_of(look))


def test_the_remaining_time_is_that_of_the_newest_rates(tmp_path):
    rates = [9e9] * 4 + [0.5] * 6 + [2.0] * 6  # of the last 12 the median is 1.25
    records = [record(step, samples_per_s=rate) for step, rate in enumerate(rates, 1)]
    look = snapshot_of(write_run(tmp_path / "run", records))
    assert look.rate == 1.25 and look.remaining.limit_s == pytest.approx(4 * 16 / 1.25)
    assert numbers(look)["left"] == "limit 51.2 s"
    for rate in (None, 0.0, -1.0):
        look = snapshot_of(write_run(tmp_path / str(rate), [record(1, samples_per_s=rate)]))
        assert numbers(look)["left"] == "not known"


def test_a_run_that_writes_nothing_is_stalled(tmp_path):
    run = write_run(tmp_path / "run", [record(1)], said=["attention: grouped"]) / "run_0"
    for seconds, state in ((50, "running"), (90, "stalled, nothing written for 90.0 s")):
        set_age(run, seconds)
        assert snapshot_of(run).state == state
    os.utime(run / "stdout.log")  # it may be evaluating
    assert snapshot_of(run).state == "running"
    slow = write_run(tmp_path / "slow", [record(n, step_ms=60_000.0) for n in (1, 2, 3)])
    for seconds, is_stalled in ((290, False), (310, True)):  # of a minute between two records
        set_age(slow / "run_0", seconds)
        assert snapshot_of(slow).is_stalled == is_stalled
    set_age(slow / "run_0", -1e6)  # a clock that is ahead of ours
    assert snapshot_of(slow).state == "running"
    set_age(slow / "run_0", 1e6)
    end_run(slow / "run_0")
    assert not snapshot_of(slow).is_stalled


def test_no_file_reaches_the_terminal_as_it_is(tmp_path, told):
    root = write_run(tmp_path / "run\x1b]0;owned\x07\u202e", [record(1), record(2, loss=1e299)])
    run = root / "run_0"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps({'step': HOSTILE})}\n{HOSTILE.splitlines()[0]}\n")
    (run / "outcome.json").write_text(json.dumps({"schema_version": 1, "status": HOSTILE}))
    look = snapshot_of(root)
    for text in (look.name, look.state, *(text for row in rows_of(look) for text in row)):
        assert text.isprintable(), ascii(text)
    assert len(look.problems) == 2
    for line in told("watch", root, "--once").split("\n"):
        assert line.isprintable(), ascii(line)


@settings(deadline=None, max_examples=20)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**62), 2**62))
def test_any_number_is_written(tmp_path_factory, number):
    values = dict.fromkeys(("samples_per_s", "step_ms", "loss"), number)
    records = [record(step, **values) for step in (1, 5, 2**61, 2**62)]
    look = snapshot_of(write_run(tmp_path_factory.mktemp("any"), records))
    assert all(value.isprintable() for value in numbers(look).values())

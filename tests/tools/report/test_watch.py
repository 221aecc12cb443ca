"""`watch`: the state of a run, its numbers, the remaining time, and nothing raw on the terminal."""

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.report.watch import look_at, rows_of
from mlperf_bert.errors import UserError
from run_cases import end_run, record, write_run

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\r\n\x00\ud800\u0301" + "\u4e2d" * 50


def running(directory):
    records = [record(step, 0.05 * step if step % 3 == 0 else None) for step in range(1, 15)]
    said = ("evaluation at 160 samples: accuracy 0.1000 (0.5 s)",)
    return write_run(directory, records, said=said)


def set_age(run, seconds):
    for name in ("config.toml", "metrics.jsonl", "stdout.log"):
        if (run / name).exists():
            os.utime(run / name, (time.time() - seconds,) * 2)


def numbers(look):
    return dict(rows_of(look))


def test_a_run_under_way(tmp_path):
    look = look_at(running(tmp_path / "run"))
    assert (look.name, look.state) == ("run/run_0", "running")
    assert numbers(look) == {
        "step": "14 of 20  ################-------- 70%",
        "samples": "224",
        "loss": "4.9860",
        "accuracy": "0.6000, target 0.99",
        "rate": "800.0 samples/s",
        "left": "at most 0.120 s to the last step",  # 6 steps of 16 samples
    }


def test_the_remaining_time_is_that_of_the_newest_rates(tmp_path):
    rates = [9e9] * 4 + [0.5] * 6 + [2.0] * 6  # of the last 12 the median is 1.25
    records = [record(step, samples_per_s=rate) for step, rate in enumerate(rates, 1)]
    look = look_at(write_run(tmp_path / "run", records))
    assert look.rate == 1.25 and look.left_s == pytest.approx(4 * 16 / 1.25)
    assert numbers(look)["left"] == "at most 51.2 s to the last step"
    for rate in (None, 0.0, -1.0):
        look = look_at(write_run(tmp_path / str(rate), [record(1, samples_per_s=rate)]))
        assert numbers(look)["left"] == "not known to the last step"


def test_a_run_that_writes_nothing_is_stalled(tmp_path):
    run = running(tmp_path / "run") / "run_0"
    for seconds, state in ((50, "running"), (90, "stalled: nothing written for 90.0 s")):
        set_age(run, seconds)
        assert look_at(run).state == state
    os.utime(run / "stdout.log")  # it may be evaluating
    assert look_at(run).state == "running"
    slow = write_run(tmp_path / "slow", [record(n, step_ms=60_000.0) for n in (1, 2, 3)])
    for seconds, is_stalled in ((290, False), (310, True)):  # of a minute between two records
        set_age(slow / "run_0", seconds)
        assert look_at(slow).is_stalled == is_stalled
    set_age(slow / "run_0", -1e6)  # a clock that is ahead of ours
    assert look_at(slow).state == "running"
    set_age(slow / "run_0", 1e6)
    end_run(slow / "run_0")
    assert not look_at(slow).is_stalled


def test_before_the_first_metrics(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nothing"):
        look = look_at(tmp_path / name)
        assert look.state == "no run has begun here yet" and rows_of(look) == []
    look = look_at(write_run(tmp_path / "begun", said=["attention: grouped"]))
    set_age(tmp_path / "begun" / "run_0", 1e6)
    assert look.state == "starting: no metrics yet"
    assert numbers(look) == {}


def test_how_a_run_ended(tmp_path):
    run = running(tmp_path / "run")
    ends = (
        ("success", None, "ended: target reached"),
        ("aborted", None, "ended: target missed"),
        ("aborted", "SIGTERM", "ended: stopped by SIGTERM"),
        ("aborted", "\x1b]0;owned\x07", r"ended: stopped by \x1b]0;owned\x07"),
    )
    for status, stopped_by, words in ends:
        end_run(run / "run_0", status, stopped_by)
        look = look_at(run)
        assert look.state == words and look.has_ended and "left" not in numbers(look)
        assert numbers(look)["ended"] == "20 steps, 320 samples, 61.0 s of training"
    without = write_run(tmp_path / "w", overrides=["eval.target_accuracy=none"], ended="success")
    assert look_at(without).state == "ended: finished, no target"


def test_what_is_odd_is_shown(tmp_path):
    records = [record(1, 0.5, skipped_steps=2), record(2, 0.25, loss=None, skipped_steps=1)]
    run = write_run(tmp_path / "run", records) / "run_0"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("x\n{}\n")
    (run / "config.toml").write_text("[run\n")
    look = look_at(run)
    found = numbers(look)
    assert (found["loss"], found["accuracy"]) == ("no number", "0.2500, best 0.5000")
    assert found["skipped"] == "3 steps without an update" and found["step"] == "2"
    metrics, config = look.problems
    assert "line 3: is no record" in metrics and metrics.endswith("; skipped (and 1 more)")
    assert "config.toml" in config


def test_no_file_reaches_the_terminal_as_it_is(tmp_path, told):
    root = write_run(tmp_path / "run\x1b]0;owned\x07\u202e", [record(1), record(2, loss=1e299)])
    run = root / "run_0"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps({'step': HOSTILE})}\n{HOSTILE.splitlines()[0]}\n")
    (run / "outcome.json").write_text(json.dumps({"schema_version": 1, "status": HOSTILE}))
    look = look_at(root)
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
    look = look_at(write_run(tmp_path_factory.mktemp("any"), records))
    assert all(value.isprintable() for value in numbers(look).values())


def test_once_prints_every_run_and_so_does_what_is_no_terminal(tmp_path, told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    one = running(tmp_path / "one")
    two = write_run(tmp_path / "two", [record(20, 0.99)], ended="success")
    once = told("watch", one, two, "--once")
    assert once == told("watch", one, two) and "\x1b" not in once
    lines = once.splitlines()
    assert lines[0] == "one/run_0  running" and "two/run_0  ended: target reached" in lines
    assert all(len(line) <= 60 for line in lines)


def test_mistakes_are_one_line(tmp_path, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ("missing --once", "does not exist"),
        ("file --once", "give a run directory"),
        ("a\x1b[31m --once", "a\\x1b[31m"),
    ):
        assert words in told("watch", *arguments.split(" "), status=2)
    with pytest.raises(UserError, match="give a run directory"):
        look_at(tmp_path / "file")

"""`watch` at the command line: one frame, JSON, which run, mistakes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_cases import Told, end_run, lines_of, tiny, write_watched

from bert_tools.report.tensorboard import LiveScalars
from bert_tools.report.watch_look import Watcher

Watched = Callable[[Path], Any]


@pytest.fixture
def watched(told: Told) -> Callable[[Path], Any]:
    return lambda path: json.loads(told("watch", path, "--json"))


def test_once_prints_one_frame_and_so_does_what_is_no_terminal(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    write_watched(tmp_path / "run", [tiny(step) for step in range(1, 9)])
    once = told("watch", tmp_path / "run", "--once")
    assert once == told("watch", tmp_path / "run")
    lines = once.splitlines()
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines)
    assert "8 of 20" in once and "\x1b" not in once


def test_the_newest_of_several_runs_or_the_one_that_is_named(
    tmp_path: Path, watched: Watched
) -> None:
    for index in (0, 2, 10):
        write_watched(tmp_path, [tiny(index + 1)], index=index)
    for name in ("run_x", "run_", "run_9999999", "other_12"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.toml").write_text("")  # somebody's
    (tmp_path / "run_17").write_text("")  # and no run
    assert watched(tmp_path)["last_record"]["step"] == 11
    assert watched(tmp_path / "run_2")["last_record"]["step"] == 3


def test_json_says_what_is_known(tmp_path: Path, watched: Watched) -> None:
    records = [tiny(step, 0.05 * step, skipped_steps=1) for step in range(1, 9)]
    run = write_watched(tmp_path / "run", records)
    found = watched(tmp_path / "run")
    assert found["schema_version"] == 1
    assert found["phase"] == "running" and found["run"] == "run/run_0"
    assert found["last_record"] == records[-1]
    assert (found["max_steps"], found["target_accuracy"]) == (20, 0.99)
    assert found["last_accuracy"] == found["best_accuracy"] == 0.4
    assert found["skipped_steps"] == 8
    assert found["to_last_step_s"] == pytest.approx(12 * 16 / 800)
    assert 0 < found["to_target_s"]["low"] < found["to_target_s"]["high"]
    assert found["alerts"] == []
    end_run(run)
    found = watched(tmp_path / "run")
    assert found["phase"] == "ended" and found["outcome"]["status"] == "success"
    assert found["to_last_step_s"] is None and found["silent_s"] is None


def test_a_run_that_was_left_alone_is_silent(tmp_path: Path, watched: Watched) -> None:
    run = write_watched(tmp_path / "run", [tiny(1)])
    os.utime(run / "metrics.jsonl", (1e9, 1e9))
    found = watched(tmp_path / "run")
    assert found["state"] == "silent" and found["alerts"][0]["kind"] == "silent"
    os.utime(run / "metrics.jsonl", (1e10, 1e10))  # a clock that is ahead of ours
    found = watched(tmp_path / "run")
    assert found["state"] == "running" and found["alerts"] == []


def test_the_start_up_of_a_resumed_run_is_not_judged(tmp_path: Path, watched: Watched) -> None:
    run = write_watched(tmp_path / "run", [tiny(1)], log=["target NOT reached"])

    def state_when(config_s: float, metrics_s: float, log_s: float) -> str:
        """By the seconds at which the files were last written; now is far later."""
        for name, seconds in zip(
            ("config.toml", "metrics.jsonl", "stdout.log"),
            (config_s, metrics_s, log_s),
            strict=True,
        ):
            os.utime(run / name, (seconds, seconds))
        found = watched(tmp_path / "run")
        return str(found["state"])

    now_s = time.time()
    assert state_when(1e9, 1e9 + 9, 1e9 + 9) == "silent"
    assert state_when(1.5e9, 1.5e9 + 9, 1e9) == "running"  # its metrics were cut back since
    assert state_when(1.5e9, 1e9, 1e9) == "running"  # not even that
    assert state_when(1.5e9, 1e9, 1.5e9 + 9) == "silent"  # it had started, long ago
    assert state_when(now_s - 99, now_s - 98, now_s) == "running"  # it has started just now
    with (run / "stdout.log").open("a") as file:
        file.write("12:00:00 sampler uniform, balance none\n12:00:01 attention: grouped\n")
    assert state_when(1e9, 1e9 + 9, 1e9 + 9) == "running"  # it may be capturing its step
    with (run / "stdout.log").open("a") as file:
        file.write("12:00:02 step 2/20  43 samples/s  1,045 tokens/s\n")
    assert state_when(1e9, 1e9 + 9, 1e9 + 9) == "silent"


def test_numbers_become_scalars_as_they_come(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = tmp_path / "scalars"
    run = write_watched(tmp_path / "run", [tiny(1, 0.1), tiny(2)])
    watcher = Watcher(tmp_path / "run", LiveScalars(scalars))

    def losses(name: str) -> list[tuple[int, float]]:
        watcher.whole_look()
        events = reader.EventAccumulator(str(scalars / name))
        events.Reload()
        return [(each.step, pytest.approx(each.value)) for each in events.Scalars("loss")]

    assert losses("run_0") == [(1, 4.999), (2, 4.998)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines_of([tiny(3)]))
    assert losses("run_0")[2:] == [(3, 4.997)]
    (run / "metrics.jsonl").write_text(lines_of([tiny(2), tiny(4)]))  # went on from step 2
    assert [step for step, _ in losses("run_0")] == [1, 2, 3, 4]
    write_watched(tmp_path / "run", [tiny(7)], index=1)
    assert losses("run_1") == [(7, 4.993)]


def test_before_the_first_metrics(tmp_path: Path, told: Told) -> None:
    (tmp_path / "empty").mkdir()
    assert "no run has begun here yet" in told("watch", tmp_path / "empty", "--once")
    write_watched(tmp_path / "begun", log=["attention: grouped"])
    once = told("watch", tmp_path / "begun", "--once")
    assert "start-up" in once and "attention: grouped" in once


def test_mistakes_are_one_line(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for arguments, words in {
        "missing --once": "does not exist",
        "missing --json": "does not exist",
        "file --once": "give a run directory",
        ". --interval 0": "--interval: is 0 s",
        ". --interval nan": "--interval: is nan s",
        "a\x1b[31m --once": "a\\x1b[31m",
    }.items():
        assert words in told("watch", *arguments.split(" "), status=2)


def test_a_directory_that_cannot_be_read_for_a_while_is_waited_for(tmp_path: Path) -> None:
    run = write_watched(tmp_path / "run", [tiny(1)])
    watcher = Watcher(tmp_path / "run")
    assert watcher.look()[0].alerts == ()
    (tmp_path / "run").rename(tmp_path / "aside")
    (tmp_path / "run").write_text("")  # as good as a file server that does not answer
    watcher.look()
    (tmp_path / "run").unlink()
    (tmp_path / "aside").rename(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines_of([tiny(2)]))
    last = watcher.look()[0].history.last
    assert last is not None and last["step"] == 2

"""`watch` on a terminal: of a real training from before its first file to its end, and by hand."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from run_cases import end_run, lines_of, tiny, write_watched
from terminal_cases import PATIENCE_S, WATCH, Terminal

from bert_tools.report.watch_files import Remarks
from mlperf_bert.common.errors import STOPPED

LONG = ("run.max_steps=90000", "schedule.decay_steps=90000", "run.log_interval_steps=5")


@contextmanager
def training(config: Path, data: Path, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real run, in a process of its own; longer than anybody waits."""
    sets = [word for override in LONG for word in ("--set", override)]
    places = ["--config", str(config), "--data", str(data), "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlperf_bert", "train", *places, *sets],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def has_curve(text: str) -> bool:
    return any("\u2800" < char <= "\u28ff" for char in text)


def is_drawn(terminal: Terminal, rows: int) -> bool:
    return terminal.lines[0].endswith("running") and "Ctrl-C leaves" in terminal.lines[rows - 1]


def test_a_real_training_is_watched_to_its_end(
    synthetic_data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Terminal(run_dir, "--interval", "0.1") as terminal:
        terminal.until(lambda: "no run has begun here yet" in terminal.text)
        assert terminal.is_alternate and terminal.screen.cursor.hidden
        with training(tiny_config, synthetic_data, run_dir) as process:
            terminal.until(lambda: is_drawn(terminal, 24) and has_curve(terminal.text))
            first = terminal.lines
            assert first[0].startswith("run/run_0") and first[0].endswith("running")
            # Alerts of a busy machine take lines of the smaller sizes.
            terminal.resize(132, 40)
            terminal.until(lambda: is_drawn(terminal, 40))
            assert len(terminal.lines[0]) == 132 and has_curve(terminal.text)
            for words in (
                " of 90,000",
                "to the last step",
                "samples/s",
                "tokens/s",
                "imbalance",
                "iB on rank 0",
                "skipped",
                "mlm_accuracy, target 0.99",
            ):
                assert words in terminal.text
            terminal.resize(60, 16)
            terminal.until(lambda: is_drawn(terminal, 16))
            assert len(terminal.lines[0]) == 60

            terminal.resize(120, 40)
            terminal.until(
                lambda: is_drawn(terminal, 40) and "no evaluation yet" not in terminal.text
            )

            with Terminal(run_dir, "--interval", "0.1") as other:
                other.until(lambda: "running" in other.lines[0])
                other.type(b"\x03")
                assert other.until_left() == 0
                assert not other.is_alternate and not other.screen.cursor.hidden
                assert other.settings == other.settings_before
                assert "Traceback" not in other.text
            assert process.poll() is None  # the run goes on
            process.send_signal(signal.SIGTERM)
            assert terminal.until_left() == 0
            assert process.wait() == STOPPED
        assert not terminal.is_alternate and not terminal.screen.cursor.hidden
        assert "stopped by SIGTERM" in terminal.text and has_curve(terminal.text)
        assert "of training" in terminal.text
    remarks, starting = Remarks(), []
    for line in (run_dir / "run_0" / "stdout.log").read_bytes().splitlines():
        remarks.add(line)
        starting.append(remarks.is_start_up)
    assert True in starting and not starting[-1]
    assert remarks.evaluation_s is not None


def test_what_is_written_meanwhile_is_shown(tmp_path: Path) -> None:
    run = write_watched(tmp_path / "runs")
    with Terminal(tmp_path / "runs", "--interval", "0.1") as terminal:
        terminal.until(lambda: "not written any metrics yet" in terminal.text)
        (run / "metrics.jsonl").write_text(lines_of([tiny(1)]))
        terminal.until(lambda: "1 of 20" in terminal.text)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines_of([tiny(2, 0.125)]))
            file.write(lines_of([tiny(3)])[:50])  # half a line
        terminal.until(lambda: "2 of 20" in terminal.text and "0.1250 of 0.99" in terminal.text)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines_of([tiny(3)])[50:])
        terminal.until(lambda: "3 of 20" in terminal.text)
        (run / "metrics.jsonl").write_text(lines_of([tiny(2)]))  # resumed from an earlier step
        terminal.until(lambda: "2 of 20" in terminal.text and "no evaluation yet" in terminal.text)
        write_watched(tmp_path / "runs", [tiny(7)], index=1)  # the next of several
        terminal.until(lambda: "run_1" in terminal.lines[0] and "7 of 20" in terminal.text)
        end_run(tmp_path / "runs" / "run_1")
        assert terminal.until_left() == 0
        assert "ended: target reached" in terminal.text


def test_after_the_end_the_next_run_may_be_waited_for(tmp_path: Path) -> None:
    end_run(write_watched(tmp_path / "runs", [tiny(20, 0.99)]))
    with Terminal(tmp_path / "runs", "--interval", "0.1", "--on-end", "wait") as terminal:
        terminal.until(lambda: "ended: target reached" in terminal.text)
        write_watched(tmp_path / "runs", [tiny(3)], index=1)
        terminal.until(lambda: "runs/run_1" in terminal.text and "3 of 20" in terminal.text)
        terminal.type(b"\x03")
        assert terminal.until_left() == 0


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(tmp_path: Path) -> None:
    write_watched(tmp_path / "runs", [tiny(1)])
    with Terminal("--norc", "-i", program=["bash"]) as terminal:
        line = shlex.join([*WATCH, str(tmp_path / "runs"), "--interval", "0.1"])
        terminal.type(f"{line}\n".encode())
        terminal.until(lambda: terminal.is_alternate and "1 of 20" in terminal.text)
        terminal.type(b"\x1a")
        terminal.until(lambda: "Stopped" in terminal.text)
        assert not terminal.is_alternate and not terminal.screen.cursor.hidden
        terminal.type(b"clear; echo he''llo; fg\n")
        terminal.until(lambda: terminal.is_alternate and "1 of 20" in terminal.text)
        terminal.type(b"\x03")
        terminal.until(lambda: not terminal.is_alternate)
        terminal.type(b"echo status $?\n")
        terminal.until(lambda: "status 0" in terminal.text)


def test_a_signal_that_ends_it_leaves_the_terminal_clean(tmp_path: Path) -> None:
    write_watched(tmp_path / "runs", [tiny(1)])
    with Terminal(tmp_path / "runs") as terminal:
        terminal.until(lambda: "1 of 20" in terminal.text)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.until_left() == 0
        assert not terminal.is_alternate and not terminal.screen.cursor.hidden


def test_a_terminal_that_is_closed_ends_it(tmp_path: Path) -> None:
    run = write_watched(tmp_path / "runs", [tiny(1)])
    with (tmp_path / "errors").open("w") as errors, Terminal(run, stderr=errors) as terminal:
        terminal.until(lambda: "1 of 20" in terminal.text)
        terminal.hang_up()
        assert terminal.process.wait(PATIENCE_S) == 141
    assert (tmp_path / "errors").read_text() == ""


def test_no_colour_and_a_terminal_that_cannot_draw(tmp_path: Path) -> None:
    run = write_watched(tmp_path / "runs", [tiny(1, skipped_steps=1, loss=None)])
    with Terminal(run, "--once", LC_ALL="C") as coloured:
        assert coloured.until_left() == 0
    with Terminal(run, "--once", LC_ALL="C", NO_COLOR="1") as plain:
        assert plain.until_left() == 0
    assert b"\x1b[1;31m" in coloured.raw and b"\x1b[1;31m" not in plain.raw  # an alert's red
    assert coloured.text == plain.text
    with Terminal(run, "--interval", "0.1", TERM="dumb") as dumb:
        dumb.until(lambda: "step 1 of 20" in dumb.text)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines_of([tiny(2)]))
        dumb.until(lambda: "step 2 of 20" in dumb.text)
        end_run(run, "aborted", stopped_by="SIGTERM")
        assert dumb.until_left() == 0
        assert "stopped by SIGTERM" in dumb.text and b"\x1b" not in dumb.raw

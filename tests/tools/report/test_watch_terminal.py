"""`watch` on a terminal: what is written meanwhile is shown, and the terminal is left clean."""

import signal

import pytest
from terminal_cases import PATIENCE_S, WATCH, Terminal

from run_cases import end_run, lines_of, record, write_run


def test_what_is_written_meanwhile_is_shown_until_all_runs_have_ended(tmp_path):
    root = tmp_path / "runs"
    with Terminal(root) as terminal:
        terminal.until(lambda: "no run has" in " ".join(terminal.text.split()))
        run = write_run(root) / "run_0"
        terminal.until(lambda: "starting, no metrics yet" in terminal.text)
        (run / "metrics.jsonl").write_text(lines_of([record(1)]))
        terminal.until(lambda: "1 of 20" in terminal.text and "running" in terminal.text)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines_of([record(2, 0.125)]))
            file.write(lines_of([record(3)])[:50])  # half a line
        terminal.until(lambda: "2 of 20" in terminal.text and "0.1250" in terminal.text)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines_of([record(3)])[50:])
        terminal.until(lambda: "3 of 20" in terminal.text)
        (run / "metrics.jsonl").write_text(lines_of([record(2)]))  # resumed from an earlier step
        terminal.until(lambda: "no evaluation yet" in terminal.text)
        write_run(root, [record(7)], index=1)  # the next of several
        terminal.until(lambda: "run_1" in terminal.text and "7 of 20" in terminal.text)
        terminal.resize(60, 16)
        end_run(root / "run_1")
        assert terminal.until_left() == 0
        assert "ended: target reached" in terminal.text and not terminal.screen.cursor.hidden


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_who_leaves_leaves_the_terminal_clean(how, tmp_path):
    run = write_run(tmp_path / "runs", [record(1)])
    with Terminal(run) as terminal:
        terminal.until(lambda: "1 of 20" in terminal.text)
        if how == "Ctrl-C":
            terminal.type(b"\x03")
        else:
            terminal.process.send_signal(signal.SIGTERM)
        assert terminal.until_left() == 0
        assert not terminal.screen.cursor.hidden and terminal.settings == terminal.settings_before
        assert "1 of 20" in terminal.text and "Traceback" not in terminal.text


@pytest.mark.parametrize("ignored", ["", "HUP"])
def test_a_terminal_that_is_closed_ends_it(ignored, tmp_path):
    run = write_run(tmp_path / "runs", [record(1)])
    program = ("bash", "-c", f"trap '' {ignored or 'USR1'}; exec \"$@\"", "bash", *WATCH)
    errors = (tmp_path / "errors").open("w")
    with errors, Terminal(run, program=program, stderr=errors) as terminal:
        terminal.until(lambda: "1 of 20" in terminal.text)
        terminal.hang_up()
        assert terminal.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_no_colour_and_a_terminal_that_cannot_draw(tmp_path):
    run = write_run(tmp_path / "runs", [record(1)], ended="aborted")
    shown = {}
    for name, environ in {
        "coloured": {},
        "plain": {"NO_COLOR": "1"},
        "dumb": {"TERM": "dumb"},
    }.items():
        with Terminal(run, **environ) as terminal:
            assert terminal.until_left() == 0
        shown[name] = terminal.raw
        assert "ended: target missed" in terminal.text
    assert b"\x1b[1;31m" in shown["coloured"]  # the red of a miss
    assert b"\x1b[1;31m" not in shown["plain"] and b"\x1b" not in shown["dumb"]

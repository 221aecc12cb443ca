"""Progress of a measurement: nothing is silent for long, on a terminal and in a log."""

import time
from io import StringIO

import pytest

from bert_tools.bench.progress import LOG_INTERVAL_S, Progress


class Terminal(StringIO):
    """A terminal that is always 30 columns wide (COLUMNS)."""

    def isatty(self):
        return True


def wait_for(stream, text):
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_a_silent_activity_is_repeated_with_its_time():
    assert LOG_INTERVAL_S <= 3
    out = StringIO()
    with Progress(out, log_interval_s=0.05) as progress:
        progress.start("compiling a model", note="usually a minute")
        wait_for(out, "compiling a model: 0 s so far\n")
        progress.start("measuring", seconds=9.0, total=5)
        progress.advance()
        wait_for(out, "measuring: 0 s so far, about 9 s left, 1 of 5 steps done\n")
        progress.say("step 1/5")
    lines = out.getvalue().splitlines()
    assert lines[0] == "compiling a model (usually a minute)"
    assert "measuring (about 9 s)" in lines and lines[-1] == "step 1/5"


def test_a_terminal_shows_it_in_place_and_an_error_erases_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("bert_tools.bench.progress.TERMINAL_INTERVAL_S", 0.05)
    out = Terminal()
    with pytest.raises(ValueError, match="an error"), Progress(out) as progress:
        progress.start("compiling a model, which takes long")
        wait_for(out, "\r\x1b[Kcompiling a model, which take")
        raise ValueError("an error")
    assert "which takes long:" not in out.getvalue()
    assert out.getvalue().count("\n") == 1 and out.getvalue().endswith("\r\x1b[K")

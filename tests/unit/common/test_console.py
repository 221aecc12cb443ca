"""A line that moves: on stderr only, with rate and time remaining."""

import re

import pytest

from mlperf_bert.common import console


def test_plain_lines_say_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    with console.Counted("planned", "steps", 3) as steps:
        for _ in range(3):
            steps.advance()
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"planned {number} of 3 steps, \d+ steps/s, \d+ s left", line)
    assert len(lines) == 3


def test_a_short_measurement_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Counted("planned", "steps", 2) as steps:
        steps.advance()
        steps.advance()
    assert capsys.readouterr().err == ""

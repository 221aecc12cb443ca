"""Lines of progress: on stderr only, with rate and time remaining."""

import re

import pytest

from bert_tools.common.counted import Counted
from mlperf_bert.run import console


def test_plain_lines_say_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for interval_s, count in ((10.0, 0), (0.0, 3)):  # a short measurement prints nothing
        monkeypatch.setattr(console, "LINE_INTERVAL_S", interval_s)
        with Counted("planned", "steps", 3) as steps:
            for _ in range(3):
                steps.advance()
        output = capsys.readouterr()
        lines = output.err.splitlines()
        assert (output.out, len(lines)) == ("", count)
        for number, line in enumerate(lines, start=1):
            assert re.fullmatch(rf"planned {number} of 3 steps, \d+ steps/s, \d+ s left", line)

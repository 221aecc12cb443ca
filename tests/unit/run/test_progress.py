"""What a person sees: all the promised figures, and a copy on file."""

import errno
import io
from pathlib import Path

import pytest

from mlperf_bert.run.progress import Reporter, progress_line

RECORD = {
    "step": 120,
    "samples": 3840,
    "samples_per_s": 412.4,
    "tokens_per_s": 21_456.7,
    "loss": 5.12345,
    "learning_rate": 0.0021,
    "step_ms": 500.0,
}


def test_progress_line_has_every_figure() -> None:
    line = progress_line(RECORD, 0.2034, max_steps=8000)
    for words in (
        "step 120/8000",
        "412 samples/s",
        "21,457 tokens/s",
        "loss 5.1235",
        "lr 2.100e-03",
        "accuracy 0.2034",
        "1:05:40 left",
    ):
        assert words in line
    assert "accuracy -" in progress_line(RECORD, None, max_steps=8000)


def test_plain_lines_off_a_terminal_and_on_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "stdout.log"
    with Reporter(log, max_steps=8000) as reporter:
        reporter.line("evaluation [bold]12[/bold]")
        reporter.progress(RECORD, None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "evaluation [bold]12[/bold]"  # text is never taken for markup
    assert printed[1].startswith("step 120/8000")
    assert [line.split(" ", 1)[1] for line in log.read_text().splitlines()] == printed


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(None, max_steps=10) as reporter:
        reporter.line("never seen")
        reporter.progress(RECORD, None)
    assert capsys.readouterr().out == ""


class FullDisk(io.StringIO):
    """Takes nothing until there is room again."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_what_found_no_room_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    monkeypatch.setattr("sys.stdout", disk)
    with Reporter(tmp_path / "stdout.log", max_steps=10) as reporter:
        reporter.line("lost")
        disk.is_full = False
        reporter.line("shown")
    assert disk.getvalue() == "shown\n"
    assert "lost" in (tmp_path / "stdout.log").read_text()

"""metrics.jsonl of a resumed run, and what a full disk does to it."""

import json
from pathlib import Path

import pytest

from mlperf_bert.common.atomic import LineFile
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.run.metrics import MetricsFile


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_makes_later_records_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (5, 10, 15):
        first.write({"step": step, "loss": float("nan")})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 20, "lo')  # a run killed while it wrote
    second = MetricsFile(path, after_step=10)
    second.write({"step": 12, "loss": 1.0})
    second.close()
    assert steps(path) == [5, 10, 12]
    assert json.loads(path.read_text().splitlines()[0])["loss"] is None


def test_a_new_run_writes_over_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("kept\n")
    with pytest.raises(ConfigError, match="File exists"):
        MetricsFile(path)
    MetricsFile(None, after_step=3).write({"step": 1})
    assert path.read_text() == "kept\n"


class FullFor:
    """A raw file whose writes fail for a while, after half of the line."""

    def __init__(self, file: object, failures: int) -> None:
        self.file, self.failures = file, failures

    def write(self, contents: bytes) -> int:
        if self.failures:
            self.failures -= 1
            self.file.write(contents[: len(contents) // 2])  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        return self.file.write(contents)  # type: ignore[attr-defined,no-any-return]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = tmp_path / "lines"
    lines = LineFile(path, warnings.append)
    lines.append("one")
    lines._file = FullFor(lines._file, 2)  # type: ignore[assignment]
    for line in ("two", "three", "four"):
        lines.append(line)
    lines.close()
    assert path.read_text() == "one\nfour\n"
    assert len(warnings) == 1 and "No space left on device" in warnings[0]

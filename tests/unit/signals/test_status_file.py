"""The file that tells a run's status: whole at any time, and never a reason to fail."""

import re
import threading
from pathlib import Path

import pytest

from mlperf_bert.common import errors
from mlperf_bert.signals.signal_watch import write_status
from support import REPOSITORY


def test_readers_see_one_whole_status_while_ranks_write_it(tmp_path: Path) -> None:
    path = tmp_path / "status_0"
    assert write_status(path, 3)
    ranks = [threading.Thread(target=_write_often, args=(path,)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    seen = set()
    while any(rank.is_alive() for rank in ranks):
        seen.add(path.read_text())
    assert seen <= {"3\n", "75\n"}
    assert path.read_text() == "75\n"
    assert list(tmp_path.iterdir()) == [path]


def _write_often(path: Path) -> None:
    for _ in range(50):
        write_status(path, 75)


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none/status_0"
    assert not write_status(path, 75)
    said = f"{path} cannot be written (No such file or directory): it was to tell status 75"
    assert capsys.readouterr().err == f"mlperf_bert: warning: {said}\n"


def test_a_directory_in_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "status_0"
    path.mkdir()
    assert not write_status(path, 75)
    assert list(tmp_path.iterdir()) == [path]


def test_the_shell_knows_the_same_statuses() -> None:
    script = (REPOSITORY / "run_and_time.sh").read_text()
    names = re.findall(r"^([A-Z_]+)=(\d+)$", script, re.MULTILINE)
    assert {"TARGET_MISSED", "STOPPED"} <= {name for name, _ in names}
    for name, number in names:
        assert getattr(errors, name) == int(number)

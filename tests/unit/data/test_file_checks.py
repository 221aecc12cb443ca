"""Files of a prepared set: of the right size and digest, or refused without any waiting."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import check_digest, check_size, file_digest, file_size, map_file

CONTENTS = b"12345"
DIGEST = hashlib.sha256(CONTENTS).hexdigest()
CHECKS: dict[str, Callable[[Path], object]] = {
    "size": lambda path: file_size(path, "mend it"),
    "right size": lambda path: check_size(path, 5, "mend it"),
    "digest": lambda path: file_digest(path, "mend it"),
    "right digest": lambda path: check_digest(path, DIGEST, "mend it"),
    "map": lambda path: map_file(path, 5, "mend it"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of five bytes."""
    made = tmp_path / "file"
    made.write_bytes(CONTENTS)
    return made


def test_a_right_file_is_accepted(path: Path) -> None:
    assert file_size(path, "") == 5
    check_size(path, 5, "")
    assert file_digest(path, "") == DIGEST
    check_digest(path, DIGEST, "")
    with map_file(path, 5, "") as mapped:
        assert mapped[:] == CONTENTS
        with pytest.raises(TypeError):
            mapped[0] = 0


def test_another_size_or_digest_is_told(path: Path) -> None:
    for check in (check_size, map_file):
        with pytest.raises(DataError, match="is 5 bytes where 6 belong; mend it"):
            check(path, 6, "mend it")
    with pytest.raises(DataError, match=r"sha256 differs\); mend it"):
        check_digest(path, "0" * 64, "mend it")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "loop", "nothing", "no name"])
def test_what_is_no_file_is_refused(
    kind: str, check: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / ("a\0b" if kind == "no name" else "place")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(DataError, match="; mend it"):
        check(path)


def test_a_file_that_is_refused_is_closed_again(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DataError):
        file_digest(tmp_path, "")
    assert os.listdir("/proc/self/fd") == before

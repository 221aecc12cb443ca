"""Files that anybody may have written: bounded, regular; and what of them is shown."""

import hashlib
import json
import os

import pytest

from mlperf_bert.errors import CheckpointError, DataError, one_line
from mlperf_bert.files import (
    bare_name,
    check_digest,
    check_size,
    file_digest,
    file_sha256,
    file_size,
    in_brief,
    map_file,
    new_directory,
    parse_json_object,
    read_json,
    read_regular_file,
)

CONTENTS = b"12345"
DIGEST = hashlib.sha256(CONTENTS).hexdigest()
CHECKS = {
    "size": lambda path: file_size(path, "mend it"),
    "right size": lambda path: check_size(path, 5, "mend it"),
    "digest": lambda path: file_digest(path, "mend it"),
    "right digest": lambda path: check_digest(path, DIGEST, "mend it"),
    "map": lambda path: map_file(path, 5, "mend it"),
    "sha256": file_sha256,
    "read": lambda path: read_regular_file(path, 10),
}


@pytest.fixture
def path(tmp_path):
    """A file of five bytes."""
    made = tmp_path / "file"
    made.write_bytes(CONTENTS)
    return made


def test_a_file_is_read_up_to_its_limit(path):
    assert read_regular_file(path, 5) == CONTENTS
    with pytest.raises(OSError, match="is larger than 4 bytes"):
        read_regular_file(path, 4)
    (path.parent / "link").symlink_to(path)
    assert read_regular_file(path.parent / "link", 5) == CONTENTS
    large = bytes(range(256)) * 5000  # more than one buffer
    path.write_bytes(large)
    assert file_sha256(path) == hashlib.sha256(large).hexdigest()


def test_only_a_json_object_is_read():
    texts = {"[]": "not a JSON object", "{": "Expecting", '{"a":' * 100_000: "nested too|Expecting"}
    for text, reason in texts.items():
        with pytest.raises(ValueError, match=reason):
            parse_json_object(text)
    assert parse_json_object('{"a": {"a": 1}}') == {"a": {"a": 1}}


def test_a_large_json_file_is_read(path):
    path.write_bytes(b'{"a": 1}' + b" " * 10**7)  # such as a tokenizer.json of many languages
    assert read_json(path, missing="", remedy="") == {"a": 1}


def test_values_from_outside_are_short_and_printable():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    values = [deep, {"a": deep}, 16**5000, -(10**300), "x" * 10**6, "\ud800\x1b[2J\n", b"\0" * 99]
    for value in [*values, None, True, 0.1, float("nan"), 7]:
        assert in_brief(value).isprintable() and len(in_brief(value)) <= 60
    assert in_brief(7) == "7" and in_brief("caf\u00e9") == r"'caf\xe9'"
    assert in_brief(16**5000) == "an integer of 20001 bits"
    assert in_brief([1]) == "a list"


def test_an_error_is_one_line_whatever_the_names_in_it():
    name = "a\nmlperf_bert: all is well\x1b[2J\u202e\udc80"
    error = DataError(f"/data/{name}: seed", "is missing", "add it")
    assert str(error) == (
        r"/data/a\nmlperf_bert: all is well\x1b[2J\u202e\udc80: seed: is missing; add it"
    )
    assert error.args[0] == f"/data/{name}: seed"  # as given, where it is not shown
    assert one_line("caf\u00e9 \u4e00") == "caf\u00e9 \u4e00"
    long = str(DataError("x" * 10**6, "is too long", "shorten it"))
    assert len(long) < 1300 and long.endswith("x: is too long; shorten it")
    assert json.dumps(str(error)).isascii()


def test_a_right_file_is_accepted_and_another_size_or_digest_told(path):
    assert file_size(path, "") == 5 and file_digest(path, "") == DIGEST
    check_size(path, 5, "")
    check_digest(path, DIGEST, "")
    with map_file(path, 5, "") as mapped:
        assert mapped[:] == CONTENTS
        with pytest.raises(TypeError):
            mapped[0] = 0
    for check in (check_size, map_file):
        with pytest.raises(DataError, match="has 5 bytes instead of 6; mend it"):
            check(path, 6, "mend it")
    with pytest.raises(DataError, match=r"SHA-256 differs from the one in the manifest; mend it"):
        check_digest(path, "0" * 64, "mend it")


def test_a_new_directory_is_made_where_a_link_leads_and_beside_remains(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("none")
    for name in ("empty", "none", "new"):  # left by a process of our number that was killed
        (tmp_path / f".{name}.{os.getpid()}.partial").mkdir()
    before = len(list(tmp_path.iterdir()))
    for name in ("link", "dangling", "new"):
        with new_directory(tmp_path / name, 1) as made:
            (made / "file").write_text(name)
        assert (tmp_path / name / "file").read_text() == name
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == before + 2
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "usual"))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("usual")
    inside = f"mount point, .*; use a new directory inside it, such as {tmp_path / 'usual'}/model"
    with pytest.raises(CheckpointError, match=inside), new_directory(tmp_path / "link", 1):
        pytest.fail("work was done that cannot be kept")


def test_a_bare_name_leads_nowhere_else():
    assert bare_name("a.hdf5") == "a.hdf5"
    for name in ("../a", "/etc/passwd", "..", ""):
        with pytest.raises(ValueError, match="is not a file name without a directory"):
            bare_name(name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/tty", "directory", "loop", "nothing"])
def test_what_is_no_file_is_not_waited_for_and_closed_again(kind, check, tmp_path):
    path = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(path)  # without a writer
    elif kind.startswith("/dev"):
        path.symlink_to(kind)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    paths = [path, tmp_path / "a\0b", tmp_path / "\ud800"] if kind == "nothing" else [path]
    before = os.listdir("/proc/self/fd")
    for each in paths:
        with pytest.raises((DataError, OSError)) as caught:
            check(each)
        assert "; mend it" in str(caught.value) or caught.value.strerror
    assert os.listdir("/proc/self/fd") == before

"""A user's own text lost, mended or changed; and options that are refused before it is read."""

import gzip
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.prepare import own_parts
from mlperf_bert.prepare.own_text import OwnText, prepare_own_text
from own_texts import SETTINGS, contents, made_up_texts, make, own_text


@pytest.fixture
def texts() -> list[str]:
    return made_up_texts()


@pytest.fixture
def wanted(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> OwnText:
    """Small settings, the texts in one file, and several jobs of it."""
    monkeypatch.setattr(own_parts, "LEAST_PART_BYTES", 4000)
    return own_text(tmp_path / "text.txt", texts)


@pytest.mark.parametrize(
    ("change", "workers", "problem"),
    [
        ({"vocab_size": 100}, 1, "--vocab-size: is 100"),
        ({"settings": replace(SETTINGS, max_seq_length=4)}, 1, "max_seq_length: is 4"),
        ({"settings": replace(SETTINGS, dupe_factor=-1)}, 1, "dupe_factor: is -1"),
        ({}, 0, "workers: is 0"),
        ({}, -3, "workers: is -3"),
    ],
)
def test_options_are_checked_before_the_text_is_read(
    wanted: OwnText, tmp_path: Path, change: dict[str, int], workers: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        prepare_own_text(replace(wanted, **change), tmp_path / "out", workers=workers, quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["text", "text/data", "text/../text/a/b", "."])
def test_output_is_not_read_as_text(wanted: OwnText, tmp_path: Path, out: str) -> None:
    (tmp_path / "text").mkdir()
    wanted.source.rename(tmp_path / "text" / "a.txt")
    wanted = replace(wanted, source=tmp_path / "text")
    with pytest.raises(ConfigError, match=r"--out: is .* read as text of --corpus"):
        prepare_own_text(wanted, tmp_path / out, workers=1, quiet=True)
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["a.txt"]


def test_a_vocabulary_beside_the_text_is_no_text(wanted: OwnText, tmp_path: Path) -> None:
    expected = contents(make(wanted, tmp_path / "first"))
    (tmp_path / "text").mkdir()
    wanted.source.rename(tmp_path / "text" / "a.txt")
    vocab = tmp_path / "text" / "vocab.txt"
    vocab.write_bytes(expected["vocab.txt"])
    beside = replace(wanted, source=tmp_path / "text", vocab_path=vocab)
    assert contents(make(beside, tmp_path / "out")) == expected


def test_what_was_lost_is_made_again(wanted: OwnText, tmp_path: Path) -> None:
    out = make(wanted, tmp_path / "out")
    expected = contents(out)
    shutil.rmtree(out / "text")  # which may go
    os.utime(wanted.source, (1, 1))  # the same text
    assert not prepare_own_text(wanted, out, workers=1, quiet=True)
    next((out / "train" / "shards").glob("*.hdf5")).unlink()
    (out / "vocab.txt").unlink()
    make(wanted, out)
    assert contents(out) == expected


def test_a_mended_text_is_not_cleaned_all_over(
    wanted: OwnText, tmp_path: Path, texts: list[str]
) -> None:
    directory = tmp_path / "books"
    directory.mkdir()
    for number in range(5):
        text = "\n\n".join(texts[30 * number : 30 * number + 30]).encode()
        (directory / f"{number}.txt.gz").write_bytes(gzip.compress(text, mtime=0))
    wanted = replace(wanted, source=directory)
    expected = contents(make(wanted, tmp_path / "whole"))
    damaged = directory / "4.txt.gz"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-8])
    out = tmp_path / "out"
    with pytest.raises(DataError, match="is no whole gzip file"):
        make(wanted, out)
    done = {path: path.stat().st_mtime_ns for path in (out / "text").glob("job-*.json")}
    assert done
    damaged.write_bytes(whole)
    make(wanted, out)
    assert contents(out) == expected
    assert done == {path: path.stat().st_mtime_ns for path in done}


def test_text_that_changes_before_the_sets_are_begun(
    wanted: OwnText, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original = tmp_path / "out", wanted.source.read_text()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mlperf_bert.prepare.own_text.prepare_pair", _interrupt)
        make(wanted, out)
    assert (out / "vocab.txt").exists()
    wanted.source.write_text(original.replace("wakord", "wakwort"))
    expected = contents(make(wanted, tmp_path / "other"))
    assert contents(make(wanted, out)) == expected


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt

"""The official text, here a small stand-in: checked, in ranges on several machines, joined."""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.data.index import Manifest
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare import mlcommons
from mlperf_bert.prepare.mlcommons import OFFICIAL, Official, parse_parts
from support import REPOSITORY, contents, write_synthetic_text
from verify_cases import write_vocabulary

GOLDEN = REPOSITORY / "tests" / "golden" / "data"
TABLE = REPOSITORY / "benchmarks/bert/implementations/pytorch/dataset_files.txt"
PARTS = 4


@dataclass(frozen=True)
class Text:
    """The stand-in text, and its known facts."""

    directory: Path
    official: Official


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    directory = tmp_path / "text"
    directory.mkdir()
    small = Official(parts=PARTS)
    for number in range(PARTS):
        write_synthetic_text(directory / small.part(number), 12, seed=number)
    write_synthetic_text(directory / "eval.txt", 12, seed=99)
    write_vocabulary(directory / "vocab.txt")
    sizes = [(directory / small.part(number)).stat().st_size for number in range(PARTS)]
    known = [directory / name for name in ("eval.txt", "vocab.txt", small.part(0))]
    official = Official(
        parts=PARTS,
        part_bytes=(min(sizes), max(sizes)),
        files={
            path.name: (path.stat().st_size, hashlib.md5(path.read_bytes()).hexdigest())
            for path in known
        },
        num_samples=17,
        eval_samples=20,
    )
    monkeypatch.setattr(mlcommons, "OFFICIAL", official)
    return Text(directory, official)


def call(text: Text, out: Path, *words: object) -> int:
    return main(
        [str(each) for each in ("prepare", "--mlcommons", text.directory, "--out", out, *words)]
    )


def digests(printed: str) -> list[str]:
    return re.findall("^examples sha256 ([0-9a-f]{64})$", printed, re.M)


def test_one_machine_or_several_ranges_or_orders_give_the_same(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(text, tmp_path / "one", "--workers", 1) == 0
    printed = capsys.readouterr().out
    train, held_out = (Manifest.load(tmp_path / "one" / name) for name in ("train", "eval"))
    settings = (train.max_seq_length, train.max_predictions, train.dupe_factor, train.seed)
    assert settings == (512, 76, 10, 12345)
    assert held_out.num_samples == 20
    assert held_out.baseline is not None
    assert f"{train.num_samples:,} training examples, NOT as published (17)" in printed
    expected, whole = contents(tmp_path / "one"), digests(printed)
    assert len(whole) == 2
    # Two machines with directories of their own; parts in another order.
    for out, parts in (("b", "1-2"), ("c", "3"), ("c", "0-0")):
        assert call(text, tmp_path / out, "--parts", parts, "--workers", 1) == 0
        assert len(digests(capsys.readouterr().out)) == 1
    for out, missing in (("b", 0), ("c", 1)):
        assert call(text, tmp_path / out, "--join") == 2
        line = f"has no shard of part {missing}, and of 1 other parts; make them with --parts"
        assert line in capsys.readouterr().err
        assert not (tmp_path / out / "train" / "index").exists()
    for path in (tmp_path / "c" / "train" / "shards").iterdir():
        shutil.copy(path, tmp_path / "b" / "train" / "shards")
    assert call(text, tmp_path / "b", "--join") == 0
    assert digests(capsys.readouterr().out) == whole
    assert contents(tmp_path / "b") == expected


def test_a_shard_that_was_cut_on_the_way_counts_as_missing(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(text, tmp_path / "a", "--parts", "0-3", "--workers", 1) == 0
    shard = tmp_path / "a" / "train" / "shards" / f"{text.official.part(3)}.hdf5"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert call(text, tmp_path / "a", "--join") == 2
    assert "has no shard of part 3, and of 0 other parts" in capsys.readouterr().err


def test_the_same_text_twice_is_refused(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    first, other = (text.directory / text.official.part(number) for number in (1, 2))
    shutil.copy(first, other)
    assert call(text, out, "--parts", f"0-{PARTS - 1}", "--workers", 1) == 0
    assert call(text, out, "--join") == 2
    problem = f"{other.name}.hdf5: was made from the same text as {first.name}.hdf5"
    assert problem in capsys.readouterr().err


def test_shards_of_other_text_are_not_joined(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(text, out, "--parts", f"0-{PARTS - 1}", "--workers", 1) == 0
    first, second = (text.directory / text.official.part(number) for number in (1, 2))
    shutil.copy(first, second)
    assert call(text, out, "--join") == 2
    assert "was finished with text sha256 = " in capsys.readouterr().err
    assert not (out / "train" / "index").exists()


def test_all_parts_are_looked_at_before_any_is_prepared(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text.directory / text.official.part(PARTS - 1)).unlink()
    assert call(text, tmp_path / "out", "--workers", 1) == 2
    assert "No such file or directory; fetch it with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_not_official_is_refused_before_any_work(text: Text, tmp_path: Path) -> None:
    places = mlcommons.Places(text.directory, text.directory / "vocab.txt", tmp_path / "out")
    first, last = (text.directory / text.official.part(number) for number in (0, PARTS - 1))
    for path, changed, problem in (
        (first, first.read_bytes()[:-1] + b"!", "has md5 .*, not "),
        (first, first.read_bytes() + b"x", "has .* bytes, not "),
        (last, last.read_bytes() * 3, "official parts .* to "),
        (places.vocab, b"[PAD]\n", "vocab.txt: has 6 bytes"),
        (last, None, "No such file or directory; fetch it with"),
    ):
        before = path.read_bytes()
        path.unlink() if changed is None else path.write_bytes(changed)
        with pytest.raises(DataError, match=problem):
            mlcommons.prepare_parts(places, range(PARTS), 1)
        path.write_bytes(before)
    assert not (tmp_path / "out").exists()


def test_published_facts_are_those_of_the_download_table() -> None:
    table = {}
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            num_bytes, md5, name = line.split()
            table[name] = (num_bytes, md5)
    assert [OFFICIAL.part(number) for number in range(500)] == sorted(
        name for name in table if name.startswith("part-")
    )
    known = {name: (int(size), md5) for name, (size, md5) in table.items() if size != "-"}
    assert OFFICIAL.files.items() <= known.items()
    parts = {name for name in known if name.startswith("part-")}
    assert parts <= OFFICIAL.files.keys()
    low, high = OFFICIAL.part_bytes
    assert all(low < known[name][0] < high for name in parts)


@pytest.mark.parametrize("words", ["", "-", "3-", "-3", "5-4", "0-500", "a", "1,2", "٣", "0-1-2"])
def test_ranges_that_are_none(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--parts: is .*; give A-B, from 0 to 499"):
        parse_parts(words)


def test_options_that_do_not_go_together(
    text: Text, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(text, tmp_path / "out", "--parts", "0", "--join") == 2
    assert "--join: does not go with --parts" in capsys.readouterr().err
    assert call(text, tmp_path / "out", "--seed", "1") == 2
    assert "--seed: does not go with --mlcommons" in capsys.readouterr().err

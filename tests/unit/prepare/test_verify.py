"""`verify`: what shows without reading a sample is found and named, printed and raised."""

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import write_json
from mlperf_bert.data.index import INDEX_ARRAYS, Manifest, sidecar_path
from mlperf_bert.prepare.verify.check import check_manifest, check_sidecars
from mlperf_bert.prepare.verify.report import MAX_PROBLEM_LINES, add_arguments, run
from verify_cases import (
    SPECIAL,
    check,
    failed,
    first_checks,
    flip,
    mend_digests,
    prepare_set,
    shard,
    write_signed,
    write_vocabulary,
)


def test_a_good_pair_and_each_of_its_sets_pass(made: Path) -> None:
    for directory in (made, made / "train", made / "eval"):
        report = check(directory)
        assert report.problems() == []
        assert all(one.status == "ok" for part in report.sets for one in part.checks)
        report.raise_if_wrong()


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_the_command_prints_a_table(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(made, "--full", "--workers", "1") == 0
    printed = capsys.readouterr()
    for name, num_shards in (("train", 3), ("eval", 1)):
        num_samples = Manifest.load(made / name).num_samples
        assert f"{num_shards} shards, {num_samples:,} examples" in printed.out
    assert "ok      shard digests       3 of 3" in printed.out
    assert "4 of 4" in printed.err
    for workers in (-1, 0, 5000):
        with pytest.raises(ConfigError, match="workers"):
            call(made, f"--workers={workers}")


def test_the_command_lists_every_problem_and_raises_the_first(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_files = MAX_PROBLEM_LINES + 10
    num_checks = sum(len(part.checks) for part in check(pair).sets)
    for number in range(num_files):
        (pair / "train" / "shards" / f"{number}.hdf5").touch()
    shard(pair).unlink()
    expected = rf"2 of {num_checks} checks failed, the first: .*b\.hdf5: No such"
    with pytest.raises(DataError, match=expected):
        call(pair)
    printed = capsys.readouterr().out
    assert "WRONG   shard sizes         2 of 3" in printed
    assert printed.count("is not in the manifest") == MAX_PROBLEM_LINES - 1
    assert f"and {num_files + 1 - MAX_PROBLEM_LINES} more" in printed


def test_json(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(shard(pair), 5)
    with pytest.raises(DataError):
        call(pair, "--full", "--json", "--workers", "1")
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["mode"], values["is_right"]) == (2, "full", False)
    found = {one["name"]: one for one in values["sets"]["train"]["checks"]}
    assert found["shard digests"]["status"] == "WRONG"
    assert found["shard digests"]["problems"][0]["where"] == str(shard(pair))
    assert values["sets"]["eval"]["statistics"]["random_next_share"] == pytest.approx(0.5, abs=0.2)
    manifest = Manifest.load(pair / "eval")
    assert values["sets"]["eval"]["statistics"]["samples"] == manifest.num_samples


def test_small_sets_are_hashed_and_large_ones_only_in_full(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(shard(pair), 5)
    problems = failed(check(pair))
    assert set(problems) == {"shard digests"} and str(shard(pair)) in problems["shard digests"]
    assert "WRONG   shard digests       2 of 3" in check(pair).to_text()
    num_bytes = sum(path.stat().st_size for path in pair.rglob("*.hdf5"))
    for limit, is_found in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr("mlperf_bert.prepare.verify.check.SMALL_BYTES", limit)
        report = check(pair)
        assert bool(failed(report)) == is_found
    assert "skipped shard digests       not read: 0.0 GiB in all; --full reads" in report.to_text()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [Path.unlink, cut, make_pipe, make_directory])
@pytest.mark.parametrize(
    ("name", "check_name"),
    [
        ("shards/b.hdf5", "shard sizes"),
        ("shards/b.hdf5.json", "sidecars"),
        ("index/dataset.json", "manifest"),
        ("index/lengths.u16", "index files"),
        ("vocab.txt", "vocabulary"),
    ],
)
def test_files_gone_cut_or_of_another_kind(
    pair: Path, name: str, check_name: str, damage: Callable[[Path], None]
) -> None:
    damage(pair / "train" / name)
    problems = failed(check(pair))
    assert str(pair / "train" / name) in problems[check_name]
    assert name != "shards/b.hdf5" or set(problems) == {check_name}


def test_every_flipped_bit_of_a_sidecar_is_found(pair: Path) -> None:
    set_dir = pair / "train"
    path = sidecar_path(shard(pair))
    manifest = Manifest.load(set_dir)
    manifest = replace(manifest, shards=tuple(e for e in manifest.shards if e.file == "b.hdf5"))
    size = path.stat().st_size
    assert size > 1000
    for bit in range(8 * size):
        flip(path, bit)
        problems = check_sidecars(set_dir, manifest)[0].problems
        assert problems and str(path) in str(problems[0]), bit
        flip(path, bit)
    assert check_sidecars(set_dir, manifest)[0].problems == ()


def test_every_flipped_bit_of_a_manifest_that_changes_a_value_is_found(pair: Path) -> None:
    path = pair / "eval" / "index" / "dataset.json"
    before = json.loads(path.read_bytes())
    harmless = 0
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        found, _ = check_manifest(pair / "eval")
        if not found.problems:
            assert json.loads(path.read_bytes()) == before, bit  # as 1e5 and 1E5
            harmless += 1
        flip(path, bit)
    assert harmless < 10


def test_flipped_bits_of_vocabulary_and_index_are_found(pair: Path) -> None:
    names = ["index/lengths.u16", "index/masked_counts.u8", "index/order_by_length.u32"]
    for name in ("vocab.txt", *names):
        path = pair / "train" / name
        for bit in np.random.default_rng(0).integers(0, 8 * path.stat().st_size, 20).tolist():
            flip(path, bit)
            check_name = "vocabulary" if name == "vocab.txt" else "index files"
            assert str(path) in failed(check(pair / "train"))[check_name]
            flip(path, bit)


@pytest.mark.parametrize(
    ("more_words", "changes", "wrong"),
    [
        ([], {"seed": 7}, "seed = 7 (not "),
        ([], {"max_seq_length": 48}, "max_seq_length = 48 (not "),
        ([], {"max_predictions": 9}, "max_predictions = 9 (not "),
        ([], {"dupe_factor": 3}, "dupe_factor = 3 (not "),
        ([], {"pick_eval": 20}, "pick_eval = 20 (not None)"),
        (["more"], {}, "vocabulary_sha256 = "),
    ],
)
def test_a_shard_of_another_preparation(
    made: Path,
    pair: Path,
    tmp_path: Path,
    more_words: list[str],
    changes: dict[str, int],
    wrong: str,
) -> None:
    vocab = write_vocabulary(tmp_path / "words.txt", [*SPECIAL, *more_words])
    prepare_set([made.parent / "b.txt"], tmp_path / "other", vocab=vocab, **changes)
    other = shard(tmp_path, "b", "other")
    shutil.copy(other, shard(pair))
    shutil.copy(sidecar_path(other), sidecar_path(shard(pair)))
    problems = failed(check(pair))
    assert {"sidecars", "settings alike"} <= set(problems)
    assert f"{shard(pair)}: was made with {wrong}" in problems["settings alike"]
    # Even where a forged manifest fits:
    mend_digests(pair / "train")
    assert set(failed(check(pair))) == {"settings alike"}


def other_words(made: Path, pair: Path) -> None:
    vocab = write_vocabulary(pair.parent / "other.txt", [*SPECIAL, "more"])
    prepare_set([made.parent / "held.txt"], pair / "eval", vocab=vocab)


def text_that_is_trained_on(made: Path, pair: Path) -> None:
    prepare_set([made.parent / "a.txt"], pair / "eval", vocab=made.parent / "words.txt")


def one_text_twice(made: Path, pair: Path) -> None:
    texts = [made.parent / "held.txt", pair.parent / "again.txt"]
    shutil.copy(*texts)
    prepare_set(texts, pair / "eval", vocab=made.parent / "words.txt")


@pytest.mark.parametrize(
    ("prepare_again", "name", "words"),
    [
        (other_words, "one vocabulary", "has the vocabulary"),
        (text_that_is_trained_on, "separate texts", "from the same text as train's a.hdf5"),
        (one_text_twice, "different texts", "held.hdf5: was made from the same text as again.hdf5"),
        (lambda made, pair: None, "manifest", "not a prepared set"),
    ],
)
def test_a_held_out_set_that_does_not_fit(
    made: Path, pair: Path, prepare_again: Callable[[Path, Path], None], name: str, words: str
) -> None:
    shutil.rmtree(pair / "eval")
    prepare_again(made, pair)
    assert words in failed(check(pair))[name]


def test_files_that_do_not_belong_and_notes_of_the_user(pair: Path) -> None:
    for name in (".notes.tmp", ".notes.77.tmp", ".vocab.txt.tmp"):
        (pair / "train" / name).touch()
    assert failed(check(pair)) == {}
    names = ("shards/x.hdf5", "shards/.b.hdf5.1.tmp", "index/x", "index/.x.tmp", ".vocab.txt.1.tmp")
    for name in names:
        (pair / "train" / name).touch()
        assert failed(check(pair))["no other files"].startswith(str(pair / "train" / name))
        (pair / "train" / name).unlink()


def test_another_directory_altogether(tmp_path: Path) -> None:
    assert "not a prepared set" in failed(check(tmp_path))["manifest"]
    with pytest.raises(DataError, match="is not a directory"):
        check(tmp_path / "none")


@pytest.mark.parametrize(
    ("file", "check_name"),
    [("\ud800", "manifest"), ("b\n\x1b[31m", "sidecars"), ("x" * 5000, "manifest")],
)
def test_hostile_names_make_a_report_of_plain_lines(pair: Path, file: str, check_name: str) -> None:
    path = pair / "train" / "index" / "dataset.json"
    text = Manifest.load(pair / "train").to_json().decode()
    path.write_text(text.replace('"b.hdf5"', json.dumps(file)))
    for is_signed in (False, True):
        report = check(pair)
        problems = failed(report)
        assert problems
        lines = report.to_text()
        lines.encode("ascii")
        assert all(line.isprintable() for line in lines.split("\n"))
        assert json.loads(report.to_json())["is_right"] is False
        if not is_signed:
            values = json.loads(path.read_bytes())
            write_signed(path, values)
    assert check_name in problems


MANIFEST = "train/index/dataset.json"


def test_all_samples_of_no_token(pair: Path) -> None:
    values = json.loads((pair / MANIFEST).read_bytes())
    histogram = values["length_histogram"]
    values["length_histogram"] = [sum(histogram)] + [0] * (len(histogram) - 1)
    write_signed(pair / MANIFEST, values)
    report = check(pair)
    assert "does not count the lengths" in failed(report)["index files"]
    assert "mean length 0.0" in report.to_text()


def test_far_more_samples_than_the_shard_has_room_for(pair: Path) -> None:
    count = 2**32 - 1000
    path = sidecar_path(shard(pair))
    sidecar = json.loads(path.read_bytes())
    sidecar |= {"num_samples": count, "shard_bytes": 2**55}
    for name, place in sidecar["datasets"].items():
        place["count"] = count + name.endswith("offsets")
    path.write_bytes(write_json(sidecar))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    values = json.loads((pair / MANIFEST).read_bytes())
    (entry,) = (one for one in values["shards"] if one["file"] == "b.hdf5")
    values["shards"] = [{**entry, "num_samples": count, "sidecar_sha256": digest}]
    values["num_samples"] = count
    values["length_histogram"] = [0] * values["max_seq_length"] + [count]
    for file, (_, dtype) in zip(values["index_files"], INDEX_ARRAYS[2], strict=True):
        file["size_bytes"] = count * int(dtype[-1])
    write_signed(pair / MANIFEST, values)
    report = check(pair, full=True)
    assert f"where {2**55} belong" in failed(report)["shard sizes"]
    found = first_checks(report)
    assert "not read: b.hdf5" in found["shard contents"].summary


def test_an_unknown_key_nested_to_any_depth(pair: Path) -> None:
    path = pair / MANIFEST
    text = path.read_text()
    problems = []
    for depth in range(900, 1000):
        nested = "[" * depth + "]" * depth
        path.write_text(text.replace("{", '{"x": ' + nested + ",", 1))
        problems += check_manifest(pair / "train")[0].problems
    assert len(problems) == 100
    assert any("nested too deeply" in str(problem) for problem in problems)

"""The fast check of `verify`: what shows without reading a sample is found and named."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import write_json
from mlperf_bert.data.index import INDEX_ARRAYS, Manifest, sidecar_path
from mlperf_bert.prepare.verify.check import check_manifest, check_sidecars
from support import write_synthetic_text
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


OTHERS: dict[str, dict[str, int]] = {
    "seed": {"seed": 7},
    "length": {"max_seq_length": 48},
    "predictions": {"max_predictions": 9},
    "dupe factor": {"dupe_factor": 3},
}


def other_set(tmp_path: Path, made: Path, changes: dict[str, int]) -> Path:
    vocab = made.parent / "words.txt"
    prepare_set([made.parent / "b.txt"], tmp_path / "other", vocab=vocab, **changes)
    return tmp_path / "other"


def bring(path: Path, target: Path) -> None:
    shutil.copy(path, target)
    shutil.copy(sidecar_path(path), sidecar_path(target))


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_shard_of_another_preparation(
    made: Path, pair: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    bring(other_set(tmp_path, made, changes) / "shards" / "b.hdf5", shard(pair))
    problems = failed(check(pair))
    assert {"sidecars", "settings alike"} <= set(problems)
    name, value = next(iter(changes.items()))
    assert f"{shard(pair)}: was made with {name} = {value} (not " in problems["settings alike"]
    # Even where a forged manifest fits:
    mend_digests(pair / "train")
    assert set(failed(check(pair))) == {"settings alike"}


def test_a_shard_made_with_another_vocabulary(made: Path, pair: Path, tmp_path: Path) -> None:
    vocab = write_vocabulary(tmp_path / "other.txt", [*SPECIAL, "more"])
    prepare_set([made.parent / "b.txt"], tmp_path / "other", vocab=vocab)
    bring(tmp_path / "other" / "shards" / "b.hdf5", shard(pair))
    mend_digests(pair / "train")
    problems = failed(check(pair))
    assert f"{shard(pair)}: was made with vocabulary_sha256 = " in problems["settings alike"]


def test_settings_outside_the_manifest_must_agree_too(
    made: Path, pair: Path, tmp_path: Path
) -> None:
    bring(other_set(tmp_path, made, {"pick_eval": 20}) / "shards" / "b.hdf5", shard(pair))
    mend_digests(pair / "train")
    assert (
        "b.hdf5: was made with pick_eval = 20 (not None)" in failed(check(pair))["settings alike"]
    )


def test_the_same_text_twice(made: Path, tmp_path: Path) -> None:
    texts = [made.parent / "a.txt", tmp_path / "again.txt"]
    shutil.copy(*texts)
    prepare_set(texts, tmp_path / "set")
    problems = failed(check(tmp_path / "set"))
    assert "again.hdf5: was made from the same text as a.hdf5" in problems["different texts"]


def test_files_that_do_not_belong_and_notes_of_the_user(pair: Path) -> None:
    for name in (".notes.tmp", ".notes.77.tmp", ".vocab.txt.tmp"):
        (pair / "train" / name).touch()
    assert failed(check(pair)) == {}
    names = ("shards/x.hdf5", "shards/.b.hdf5.1.tmp", "index/x", "index/.x.tmp", ".vocab.txt.1.tmp")
    for name in names:
        (pair / "train" / name).touch()
        assert failed(check(pair))["no other files"].startswith(str(pair / "train" / name))
        (pair / "train" / name).unlink()


def test_train_and_eval_of_different_vocabularies(pair: Path, tmp_path: Path) -> None:
    shutil.rmtree(pair / "eval")
    write_synthetic_text(tmp_path / "text.txt", 20, seed=9)
    vocab = write_vocabulary(tmp_path / "other.txt", [*SPECIAL, "more"])
    prepare_set([tmp_path / "text.txt"], pair / "eval", vocab=vocab)
    assert "has the vocabulary" in failed(check(pair))["one vocabulary"]


def test_a_held_out_text_that_is_trained_on(made: Path, pair: Path) -> None:
    shutil.rmtree(pair / "eval")
    prepare_set([made.parent / "a.txt"], pair / "eval", vocab=made.parent / "words.txt")
    problems = failed(check(pair))
    assert "from the same text as train's a.hdf5" in problems["separate texts"]


def test_a_missing_half_of_the_pair(pair: Path) -> None:
    shutil.rmtree(pair / "eval")
    assert "not a prepared set" in failed(check(pair))["manifest"]


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
    for file, (_, dtype) in zip(values["index_files"], INDEX_ARRAYS, strict=True):
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
        problems.append(failed(check(pair))["manifest"])
    assert any("nested too deeply" in problem for problem in problems)

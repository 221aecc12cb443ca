"""`verify`: what shows without reading a sample is found and named, printed and raised."""

import json
import re
import shutil

import numpy as np
import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.data.index import Manifest, sidecar_path
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.verify import check_shard_files
from mlperf_bert.run import console
from support import refusal
from verify_cases import (
    SPECIAL,
    check,
    flip,
    mend_digests,
    prepare_set,
    problems,
    shard,
    spoil,
    write_signed,
    write_vocabulary,
)

MANIFEST = "index/dataset.json"


def test_a_good_pair_and_each_of_its_sets_pass(made):
    for directory in (made, made / "train", made / "eval"):
        report = check(directory)
        assert report.problems == []
        shards, examples = report.num_shards, f"{report.num_examples:,}"
        verdict = (
            f"OK: {shards} shards with {examples} examples, and the fast check found no problem"
        )
        assert report.to_text().splitlines()[-1] == verdict
        report.raise_if_wrong()


def test_the_command_prints_what_the_sets_hold(made, capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    assert main(["verify", str(made), "--full", "--workers", "1"]) == 0
    printed = capsys.readouterr()
    for name, num_shards in (("train", 3), ("eval", 1)):
        num_samples = Manifest.load(made / name).num_samples
        assert f"{name}: {num_shards} shards, {num_samples:,} examples, " in printed.out
    assert "unknown words: " in printed.out
    assert "verifying shards: " in printed.err and "verifying" not in printed.out
    for workers in (-1, 0, 5000):
        assert "workers: is" in refusal(capsys, "verify", made, f"--workers={workers}")


def test_the_command_lists_the_problems_and_raises_the_first(pair, capsys):
    for damaged in (shard(pair), *(pair / "train" / "index").glob("*.u*")):
        damaged.unlink()
    assert main(["verify", str(pair)]) == 2
    printed = capsys.readouterr()
    assert re.search(r"4 problems, the first: .*b\.hdf5: No such", printed.err)
    assert "3 shards hashed" in printed.out
    assert printed.out.endswith("\nFAILED: 4 problems, listed above\n")
    assert printed.out.count("No such file") == 4


def test_a_shard_of_longer_limits_is_not_read(pair):
    spoil(shard(pair), lambda arrays: None, max_seq_length=128)
    (found,) = problems(pair, full=True).splitlines()
    assert f"{shard(pair)}: was prepared with max_seq_length = 128" in found


@pytest.mark.parametrize(
    ("key", "change", "problem"),
    [
        ("length_histogram", lambda counts: counts[::-1], "length_histogram: does not match"),
        ("vocabulary_file", lambda _: "../config.toml", "tokenizer.json, not '../config.toml'"),
        ("segments", lambda _: "triple", "segments must be pair or single, not 'triple'"),
        ("mask_id", lambda _: 5, "vocab.txt: has mask_id = 4, but the manifest has 5"),
    ],
)
def test_a_forged_manifest(pair, key, change, problem):
    path = pair / "train" / MANIFEST
    values = json.loads(path.read_bytes())
    write_signed(path, {**values, key: change(values.get(key))})
    assert problem in problems(pair, full=True)


def test_small_sets_are_hashed_and_large_ones_only_in_full(pair, monkeypatch):
    flip(shard(pair), 5)
    assert f"{shard(pair)}: the file's SHA-256 differs" in problems(pair)
    num_bytes = sum(path.stat().st_size for path in pair.rglob("*.hdf5"))
    for limit, is_found in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr("mlperf_bert.prepare.verify.SMALL_BYTES", limit)
        report = check(pair)
        assert bool(report.problems) == is_found
    assert "shards not hashed, because they have 0.0 GiB in all; use --full" in report.to_text()


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.longest)])
@pytest.mark.parametrize(("name", "most_harmless"), [("shards/b.hdf5.json", 0), (MANIFEST, 10)])
def test_every_flipped_bit_that_changes_a_value_is_found(pair, name, most_harmless, step):
    set_dir = pair / "train"
    (entry,) = (one for one in Manifest.load(set_dir).shards if one.file == "b.hdf5")
    before = json.loads((set_dir / name).read_bytes())
    size = (set_dir / name).stat().st_size
    assert size > 1000
    harmless = 0
    for bit in range(0, 8 * size, step):
        flip(set_dir / name, bit)
        try:
            Manifest.load(set_dir)
            check_shard_files(set_dir, entry)
        except DataError as error:
            assert str(set_dir / name) in str(error), bit
        else:
            assert json.loads((set_dir / name).read_bytes()) == before, bit  # as 1e5 and 1E5
            harmless += 1
        flip(set_dir / name, bit)
    assert harmless <= most_harmless


def test_flipped_bits_of_the_other_files_are_found(pair):
    index = ("index/lengths.u16", "index/masked_counts.u8", "index/order_by_length.u32")
    for name in ("vocab.txt", "shards/b.hdf5", *index):
        path = pair / "train" / name
        last = 8 * path.stat().st_size - 1
        for bit in [0, *np.random.default_rng(0).integers(0, last, 18).tolist(), last]:
            flip(path, bit)
            assert str(path) in problems(pair / "train")
            flip(path, bit)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"dupe_factor": 3}, "dupe_factor = 3 instead of "),
        ({"pick_eval": 20}, "pick_eval = 20 instead of None"),
    ],
)
def test_a_shard_of_another_preparation(made, pair, tmp_path, changes, wrong):
    vocab = made.parent / "words.txt"
    prepare_set([made.parent / "b.txt"], tmp_path / "other", vocab=vocab, **changes)
    other = shard(tmp_path, "b", "other")
    shutil.copy(other, shard(pair))
    shutil.copy(sidecar_path(other), sidecar_path(shard(pair)))
    assert str(sidecar_path(shard(pair))) in problems(pair)
    # Even where a forged manifest fits:
    mend_digests(pair / "train")
    assert problems(pair).startswith(f"{shard(pair)}: was prepared with {wrong}")


def test_what_is_no_set_and_a_held_out_one_that_does_not_fit(made, pair):
    shutil.rmtree(pair / "eval")
    assert "not a prepared set" in problems(pair)
    assert "not a prepared set" in problems(made.parent)
    with pytest.raises(DataError, match="no such directory"):
        check(pair / "eval")
    vocab = write_vocabulary(pair.parent / "other.txt", [*SPECIAL, "more"])
    prepare_set([made.parent / "held.txt"], pair / "eval", vocab=vocab)
    assert "has the vocabulary" in problems(pair)


@pytest.mark.parametrize("file", ["\ud800", "b\n\x1b[31m", "x" * 5000])
def test_odd_names_make_a_report_of_plain_lines(pair, file):
    path = pair / "train" / MANIFEST
    text = Manifest.load(pair / "train").to_json().decode()
    path.write_text(text.replace('"b.hdf5"', json.dumps(file)))
    for is_signed in (False, True):
        report = check(pair)
        assert report.problems
        lines = report.to_text()
        lines.encode("ascii")
        assert all(line.isprintable() for line in lines.split("\n"))
        if not is_signed:
            write_signed(path, json.loads(path.read_bytes()))

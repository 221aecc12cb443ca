"""`prepare --text`: round trip, restart, options, refusals, and nothing half-written."""

import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from import_cases import VOCAB, shard_of
from mlperf_bert.__main__ import main
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare.build import measure_baseline
from mlperf_bert.run import console
from support import contents, refusal


def test_restart_keeps_finished_shards_and_gives_the_same_bytes(
    prepare, from_text, texts, tmp_path
):
    set_dir = Path(shutil.copytree(from_text, tmp_path / "set"))
    kept, lost = shard_of(set_dir, "part-0"), shard_of(set_dir, "part-1")
    kept_stat = kept.stat()
    shutil.rmtree(set_dir / "index")
    os.truncate(lost, lost.stat().st_size - 1)
    prepare(texts)
    assert contents(set_dir) == contents(from_text)
    now = kept.stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept_stat.st_ino, kept_stat.st_mtime_ns)


def test_a_restart_replaces_a_damaged_shard_of_the_right_size(prepare, from_text, texts, tmp_path):
    set_dir = Path(shutil.copytree(from_text, tmp_path / "set"))
    with h5py.File(shard_of(set_dir, "part-0"), "r+") as file:
        file["input_ids"][1] = 65_535
    prepare(texts)
    assert contents(set_dir) == contents(from_text)


def test_a_text_that_is_passed_twice_is_refused(prepare, texts, tmp_path):
    twin = Path(shutil.copy(texts[0], tmp_path / "twin.txt"))
    with pytest.raises(DataError, match=r"twin\.hdf5: was prepared from the same text as part-0"):
        prepare([*texts, twin])


def test_another_preparation_in_the_same_directory_is_refused(prepare, from_text, texts, tmp_path):
    other = tmp_path / "vocab.txt"
    other.write_bytes(VOCAB.read_bytes() + b"more\n")
    changed = Path(shutil.copy(texts[0], tmp_path))
    changed.write_text("Changed.\n\nAltogether.\n")
    twin = Path(shutil.copy(texts[0], tmp_path / "part-0.text"))
    set_dir = shutil.copytree(from_text, tmp_path / "set")
    before = contents(set_dir)
    changes = [
        ({"seed": 1}, "seed = 12345 instead of 1"),
        ({"dupe_factor": 4}, "dupe_factor = 5"),
        ({"max_seq_length": 128}, "max_seq_length = 64"),
        ({"max_predictions": 9}, "max_predictions = 10"),
        ({"vocab": other}, "differs from the vocabulary that was passed"),
        ({"paths": [changed, texts[1]]}, "text sha256"),
        ({"paths": [*texts, twin]}, "same base name"),
        ({"paths": texts[:1]}, r"part-1\.hdf5: is the shard of a file that was not passed"),
    ]
    for change, problem in changes:
        with pytest.raises(DataError, match=problem):
            prepare(**{"paths": texts, **change})
        assert contents(set_dir) == before


def test_pick_eval_takes_evenly_and_stores_the_baseline(prepare, from_text, texts, tmp_path):
    everything = Manifest.load(from_text)
    assert everything.baseline is None
    count = everything.shards[0].num_samples
    with pytest.raises(DataError, match=f"gives {count} examples, but 5000 were"):
        prepare(texts[:1], pick_eval=5000)
    assert contents(tmp_path / "set").keys() == {"vocab.txt"}
    picked = prepare(texts[:1], pick_eval=7)
    ids = np.array([int(i * count / 7) for i in range(7)])
    expected = SampleReader(from_text, everything).read(ids)
    reader = SampleReader(tmp_path / "set", picked)
    found = reader.read(np.arange(7))
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)
    assert picked.baseline == measure_baseline(tmp_path / "set", picked)
    assert picked.baseline.masked_tokens == len(found.masked_ids)


def test_baseline_is_what_it_says(prepare, texts, tmp_path):
    manifest = prepare(texts, with_baseline=True)
    reader = SampleReader(tmp_path / "set", manifest)
    inputs, labels = [], []
    for number in range(manifest.num_samples):
        sample = reader.read(np.array([number]))
        inputs += sample.input_ids[sample.masked_positions].tolist()
        labels += sample.masked_ids.tolist()
    at_mask = [b for a, b in zip(inputs, labels, strict=True) if a == manifest.mask_id]
    best = max(set(at_mask), key=at_mask.count)
    guesses = [best if a == manifest.mask_id else a for a in inputs]
    right = sum(a == b for a, b in zip(guesses, labels, strict=True))
    baseline = manifest.baseline
    assert baseline.context_free_accuracy == right / len(labels)
    assert baseline.mask_only_accuracy == at_mask.count(best) / len(at_mask)
    assert (baseline.masked_tokens, baseline.mask_inputs) == (len(labels), len(at_mask))


SPECIAL = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n"
NO_FILE = object()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": NO_FILE}, "part-2.*No such file"),
        ({"text": b""}, "part-2.*is empty"),
        ({"text": b" \n\n \n"}, "part-2.*is empty"),
        ({"text": b"Fine.\n\nNot \xff fine.\n"}, "part-2.*not UTF-8 text at byte 11"),
        ({"text": b"Only one.\nDocument here.\n"}, "part-2.*has 1 documents"),
        ({"text": b"\x01\n\n\x02\n"}, "part-2.*has 0 documents"),
        ({"text": b"\0\0\n", "segments": "single"}, "part-2.*0 documents with words"),
        ({"vocab": NO_FILE}, "No such file"),
        ({"vocab": SPECIAL + b"a\n"}, r"special token \[MASK\] is missing"),
        ({"vocab": SPECIAL + b"[MASK]\na\nb\na\n"}, "line 8: token 'a' is already on line 6"),
        ({"vocab": SPECIAL + b"[MASK]\n"}, "has only special tokens and no word pieces"),
        ({"vocab": b"[PAD]\n\n[UNK]\n"}, "line 2: the line is empty"),
        ({"vocab": b"[PAD]\n\xff\n"}, "not UTF-8 text at byte 6"),
        ({"max_seq_length": 7}, "max_seq_length: is 7"),
        ({"max_predictions": 65_536}, "max_predictions: is 65536"),
        ({"dupe_factor": 0}, "dupe_factor: is 0"),
        ({"workers": 0}, "workers: is 0"),
        ({"pick_eval": 5}, "needs exactly one text file, but 2 were passed"),
    ],
)
def test_what_cannot_be_prepared_is_said_and_leaves_no_set(
    prepare, texts, tmp_path, change, problem
):
    files = {"text": tmp_path / "part-2.txt", "vocab": tmp_path / "words.txt"}
    for name in files.keys() & change.keys():
        if change[name] is not NO_FILE:
            files[name].write_bytes(change[name])
        change = {**change, name: files[name]}
    paths = [*texts, change.pop("text")] if "text" in change else texts
    with pytest.raises((DataError, ConfigError), match=problem):
        prepare(paths, **change)
    left = contents(tmp_path / "set").keys()
    assert not [name for name in left if name.startswith("index") or name.endswith(".tmp")]
    assert not [name for name in left if "part-2" in name or paths is texts]


def test_failure_while_writing_leaves_nothing(prepare, texts, tmp_path, monkeypatch):
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=no_space))
    with pytest.raises(DataError, match="No space left"):
        prepare(texts)
    assert contents(tmp_path / "set") == {}


LEFT_BY_KILLED_RUNS = [
    "shards/.part-0.hdf5.77-0123abcd.tmp",
    "shards/.part-1.hdf5.json.77-0123abcd.tmp",
]
OF_THE_USER = [".notes.tmp", "shards/.notes.77.tmp", "shards/.part.x.tmp"]


def test_left_overs_go_and_files_of_the_user_stay(prepare, from_text, texts, tmp_path):
    set_dir = Path(shutil.copytree(from_text, tmp_path / "set"))
    for name in LEFT_BY_KILLED_RUNS + OF_THE_USER:
        (set_dir / name).write_text("something")
    with pytest.raises(DataError, match="seed = 12345"):
        prepare(texts, seed=1)
    assert all((set_dir / name).exists() for name in LEFT_BY_KILLED_RUNS)  # nothing touched
    prepare(texts)
    found = {path.relative_to(set_dir).as_posix() for path in set_dir.rglob(".*")}
    assert found == set(OF_THE_USER)


def test_text_with_defaults(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    out = tmp_path / "set"
    words = ["prepare", "--text", *texts, "--vocab", VOCAB, "--out", out, "--workers", 1]
    assert main([str(word) for word in words]) == 0
    manifest = Manifest.load(out)
    settings = (manifest.max_seq_length, manifest.max_predictions, manifest.dupe_factor)
    assert (*settings, manifest.seed) == (512, 76, 10, 12345)
    printed = capsys.readouterr().out
    assert re.search(r"^preparing texts: \d+ of \d+ kB, [\d.]+ per s, 0:\d\d:\d\d left\n", printed)
    assert f"{manifest.num_samples} examples in 2 shards" in printed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--text a.txt --out d", "--vocab: is missing"),
        ("--text a.txt --vocab v --out d --config c.toml", "--config: cannot be used"),
        ("--embedded --out d", "--config: is missing"),
        ("--embedded --config c.toml --out d --workers 2", "--workers: cannot be used"),
        ("--embedded --config c.toml --out d --dupe-factor 2", "--dupe-factor"),
        ("--hdf5 a --vocab v --out d --seed 1", "--seed: cannot be used with"),
    ],
)
def test_options_that_do_not_go_together(capsys, words, problem):
    assert problem in refusal(capsys, "prepare", *words.split())

"""A whole run on one rank: its record, its files, and how it ends early."""

import json
import os
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_tools.squad.comparison import RESULT
from bert_tools.squad.fine_tune import fine_tune
from bert_tools.squad.model import start_from
from checkpoint_cases import CPU, ONE_RANK, trained
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, load_vocabulary
from squad_cases import qa, set_of, small_settings
from support import contents

WORDS = [f"w{number}" for number in range(20)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory of questions and their vocabulary."""
    directory = tmp_path_factory.mktemp("questions")
    (directory / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    for name, first in (("train", 0), ("dev", 3)):
        paragraphs = []
        for number in range(first, first + 6):
            text = " ".join(WORDS[number : number + 9])
            answer = WORDS[number + 2]
            asked = [
                qa(f"{name}{number}a", f"{WORDS[number]} ?", (answer, text.index(answer))),
                qa(f"{name}{number}b", "w19 ?"),
            ]
            paragraphs.append((text, asked))
        (directory / f"{name}.json").write_text(json.dumps(set_of(*paragraphs)))
    return directory


def tune(inputs, run_dir, engine="single", record_only=False, **changes):
    """A run of a small model; the record."""
    same = {"updates": 10, "noise_every": 4, "stride": 4}
    same |= {"layers": 2, "hidden": 32, "heads": 2, "vocab": inputs / "vocab.txt"}
    same |= {"train": inputs / "train.json", "dev": inputs / "dev.json"}
    given = small_settings(engine, **same | changes)
    return fine_tune(given, run_dir, ONE_RANK, CPU, record_only=record_only)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "single"
    return run_dir, tune(inputs, run_dir)


def test_the_record_is_complete(run):
    run_dir, returned = run
    record = json.loads((run_dir / RESULT).read_text())
    assert record == json.loads(json.dumps(returned))
    assert record["schema_version"] == 3 and record["engine"] == "single"
    assert record["updates"] == len(record["losses"]) == len(record["grad_norms"]) == 10
    assert record["samples"] == 80 and record["samples_per_s"] > 0
    assert [each["update"] for each in record["noise"]] == [4, 8]
    assert record["data"]["train_questions"] == record["data"]["train_windows"] == 12
    assert record["answerable"]["questions"] == record["unanswerable"]["questions"] == 6
    assert record["bubble_measured"] is None and record["timeline"] == []
    assert record["memory_mib"] > 1 and 0 < record["cores"] <= (os.cpu_count() or 1)
    assert record["seconds"]["end_to_end"] > record["seconds"]["train"] > 0
    assert record["init"] == "random"
    assert len(json.loads((run_dir / "predictions.json").read_text())) == 12


def test_a_run_repeats_bit_by_bit(run, inputs, tmp_path):
    again = tune(inputs, tmp_path)
    assert again["losses"] == run[1]["losses"]
    assert again["validation_loss"] == run[1]["validation_loss"]
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (tmp_path, run[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert tune(inputs, tmp_path / "2", seed=2, record_only=True)["losses"] != run[1]["losses"]
    assert os.listdir(tmp_path / "2") == [RESULT]
    record = tune(inputs, tmp_path / "3", vocab=None, updates=1)  # words are the questions' own
    words = load_vocabulary(tmp_path / "3" / "model" / "vocab.txt")
    assert words.sha256 == record["data"]["vocabulary_sha256"] and "w7" in words.ids


def test_what_cannot_be_run_has_no_result(run, inputs, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="--engine: ddp:2 needs 2 ranks"):
        tune(inputs, tmp_path, "ddp:2")
    with pytest.raises(
        ConfigError, match="--max-length: is 33, but the model reads at most 32 tokens"
    ):
        tune(inputs, tmp_path, init_checkpoint=checkpoint, max_length=33)
    with pytest.raises(ConfigError, match=r"--learning-rate: is 1e\+30, .* diverged"):
        tune(inputs, tmp_path, learning_rate=1e30, updates=3)
    assert os.listdir(tmp_path) == []
    shutil.copytree(run[0] / "model", tmp_path / "model")  # as a kill before the record
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="model: exists already"):
        tune(inputs, tmp_path, updates=2)
    assert contents(tmp_path) == before


def test_a_signal_ends_it_and_nothing_is_written(inputs, tmp_path, monkeypatch, capfd):
    seen = []

    def is_due(_self):
        seen.append(True)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return len(seen) == 2

    monkeypatch.setattr(ProgressLines, "is_due", is_due)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert tune(inputs, tmp_path) is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert os.listdir(tmp_path) == []
    found = capfd.readouterr()
    assert "SIGTERM: stopped after update 3, and wrote nothing" in found.err
    assert re.search(
        r"single: update 2/10 +[\d.]+ samples/s +loss [\d.]+ +0:00:\d\d left", found.err
    )
    assert found.out == ""  # stdout may be a command's JSON


def pretrained(directory, inputs, *settings):
    """A checkpoint as pre-training leaves it, with the vocabulary beside."""
    saved = trained(directory / "run", inputs / "vocab.txt", "model.vocab_size=25", *settings)
    (saved / "vocab.txt").write_bytes((inputs / "vocab.txt").read_bytes())
    return saved


@pytest.fixture(scope="module")
def checkpoint(inputs, tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("pretrained"), inputs)


def test_a_run_begins_with_a_checkpoints_weights(inputs, checkpoint, tmp_path):
    stored = load_file(checkpoint / "model.safetensors")
    words, start = start_from(checkpoint, None, seed=1)
    assert words.sha256 == load_vocabulary(inputs / "vocab.txt").sha256
    assert start.model.num_layers == 2
    own = {name for name in start.weights if name not in stored}
    assert {name.partition(".")[0] for name in own} == {"qa_outputs"}
    for name in start.weights.keys() - own:
        assert torch.equal(start.weights[name], stored[name])
    record = tune(inputs, tmp_path, updates=2, vocab=None, init_checkpoint=checkpoint)
    assert record is not None and len(record["init"]) == 64
    assert record["model"]["layers"] == 2
    learnt = load_file(tmp_path / "model" / "model.safetensors")
    assert learnt.keys() == start.weights.keys()
    assert not torch.equal(learnt[min(own)], start.weights[min(own)])


def test_damaged_or_other_checkpoints_are_refused(inputs, checkpoint, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS[::-1]]) + "\n")
    with pytest.raises(CheckpointError, match="is not the vocabulary"):
        start_from(checkpoint, tmp_path / "vocab.txt", seed=1)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    save_file({"other": torch.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="is damaged, because its size or digest differs"):
        start_from(copy, None, seed=1)
    modern = ("model.architecture=modern", "model.objective=mlm", "model.attention_window=4")
    with pytest.raises(ConfigError, match="is not a BERT model"):
        start_from(pretrained(tmp_path, inputs, *modern), None, seed=1)

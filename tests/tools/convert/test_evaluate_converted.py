"""Weights of others are evaluated as ours are: on any ranks, with what is known of them."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from huggingface_cases import convert, make_theirs, save_theirs, tensors_of

from bert_tools.bench.baseline import padded_inputs
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_manifest, resolve
from mlperf_bert.data.batch import IGNORED, make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import TARGET_MISSED
from mlperf_bert.run import console
from support import metrics_records, refusal


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, words):
    """A converted BERT that guesses at random."""
    folder = tmp_path_factory.mktemp("evaluated")
    save_theirs(folder / "theirs", "BertForPreTraining")
    convert(folder / "theirs", folder / "ours", words)
    return folder / "ours"


def evaluate(checkpoint, data, *options):
    return main(["evaluate", "--checkpoint", str(checkpoint), "--data", str(data), *options])


@pytest.fixture(scope="module")
def result(checkpoint, synthetic_data):
    """The result of `evaluate` on one rank."""
    with redirect_stdout(StringIO()) as printed:
        assert evaluate(checkpoint, synthetic_data, "--json") == 0
    return json.loads(printed.getvalue())


def test_the_accuracy_is_theirs(result, synthetic_data):
    index = LengthIndex.open(synthetic_data / "eval")
    ids = np.arange(index.manifest.num_samples)
    samples = SampleReader(synthetic_data / "eval", index.manifest).read(ids)
    batch = make_batch(samples, ids, mlm_denominator=1.0, nsp_denominator=1.0)
    padded = padded_inputs(batch, batch.max_seqlen)
    labels = padded.pop("labels")
    padded.pop("next_sentence_label")
    with torch.inference_mode():
        guesses = make_theirs("BertForPreTraining")(**padded).prediction_logits.argmax(-1)
    used = labels != IGNORED
    assert result["masked_tokens"] == int(used.sum()) > 500
    assert result["correct"] == int((guesses == labels)[used].sum()) > 0
    assert result["sequences"] == len(ids) and result["ranks"] == 1
    assert result["origin"]["format"] == "huggingface"


def test_it_says_how_far_it_is_and_what_was_drawn(
    tmp_path, words, synthetic_data, capsys, monkeypatch
):
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr("mlperf_bert.evaluation.evaluate.TOKENS_CPU", 600)
    save_theirs(tmp_path / "bare", "BertModel")
    convert(tmp_path / "bare", tmp_path / "ours", words, "draw")
    capsys.readouterr()
    assert evaluate(tmp_path / "ours", synthetic_data) == 0
    said = capsys.readouterr()
    assert "masked-LM head" in said.out
    lines = said.err.splitlines()
    assert len(lines) > 3
    for done, line in enumerate(lines, start=1):
        assert line.startswith(f"evaluating: {done} of {len(lines)} batches, ")
    assert lines[-1].endswith(" per s, 0:00:00 left")


def test_other_data_is_told_in_words_of_the_checkpoint(
    checkpoint, synthetic_data, tmp_path, capsys
):
    small = shutil.copytree(checkpoint, tmp_path / "small")
    whole = (small / "manifest.json").read_text()
    for section, setting, smaller in (
        ("data", "max_seq_length", 8),
        ("data", "max_predictions", 1),
        ("model", "vocab_size", 60),
    ):
        values = json.loads(whole)
        values["config"][section][setting] = smaller
        (small / "manifest.json").write_text(json.dumps(values))
        given = ("--checkpoint", small, "--data", synthetic_data)
        error = refusal(capsys, "evaluate", *given)
        assert f"--data: {smaller} " in error and "the data in" in error
        assert f"({section}.{setting} of the checkpoint)" in error
        assert f"use data that was prepared for {small}" in error


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.longest)])
def test_a_run_begins_from_it_and_does_not_go_on_from_it(
    ranks, result, checkpoint, synthetic_data, tiny_config, tmp_path, capsys
):
    first = shutil.copytree(checkpoint, tmp_path / "first")
    still = ["run.max_steps=1", "run.warm_up_steps=0", "optim.learning_rate=0.0"]
    still += ["model.num_heads=4", "model.intermediate_size=48", "model.layer_norm_epsilon=1e-7"]
    still += [f"parallel.ranks_per_node={ranks}", f"parallel.local_batch_size={16 // ranks}"]
    options = ["train", "--config", str(tiny_config), "--data", str(synthetic_data)]
    options += [f"--set={setting}" for setting in still]
    begin = ["--init-checkpoint", str(first)]
    assert main([*options, *begin, "--run-dir", str(tmp_path / "begun")]) == TARGET_MISSED
    assert metrics_records(tmp_path / "begun")[-1]["mlm_accuracy"] == result["mlm_accuracy"]
    saved = tmp_path / "begun" / "run_0" / "checkpoints"
    origin = read_manifest(resolve(saved)).origin
    assert origin == {"initialized_from": "huggingface, theirs"}
    ours, theirs = tensors_of(resolve(saved)), tensors_of(first)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = ("--run-dir", tmp_path / "other", "--set", "parallel.ranks_per_node=1")
    for setting, stated in (("num_heads=2", 4), ("layer_norm_epsilon=1e-6", 1e-7)):
        error = refusal(capsys, *options, *begin, *other, "--set", f"model.{setting}")
        assert f"have {stated}; set it to {stated}" in error
    assert "--init-checkpoint" in refusal(capsys, *options, *other, "--resume", first)
    shutil.rmtree(first)  # a run that goes on does not need it
    more = ["--set=run.max_steps=2", "--run-dir", str(tmp_path / "more"), "--resume", str(saved)]
    assert main([*options, *begin, *more]) == TARGET_MISSED
    later = read_manifest(resolve(tmp_path / "more" / "run_0" / "checkpoints"))
    assert (later.step, later.origin) == (2, origin)

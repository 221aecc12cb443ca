"""Training begins from a directory in Hugging Face's form after a conversion, and not before."""

import shutil

import pytest
from huggingface_cases import NUM_WORDS, PADDED, WORDS, save_theirs, tensors_of

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_config, resolve
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed import spawn
from mlperf_bert.run import console
from support import refusal, write_synthetic_text


@pytest.fixture
def bert(tmp_path, words):
    """A BertModel without heads, with its vocabulary."""
    save_theirs(tmp_path / "bert", "BertModel", max_position_embeddings=64)
    shutil.copy(words, tmp_path / "bert" / "vocab.txt")
    return tmp_path / "bert"


def test_train_says_how_to_convert(bert, tiny_config, synthetic_data, monkeypatch, capsys):
    monkeypatch.setattr(console, "SILENCE_S", (300.0, 300.0))  # no more lines on a busy machine
    told = f"convert {bert} --from huggingface --out NEW"
    begin = ("--init-checkpoint", bert)
    place = ("--data", synthetic_data, "--run-dir", bert.parent / "run")
    assert told in refusal(capsys, "train", "--config", tiny_config, *place, *begin)
    assert told in refusal(capsys, "config", "validate", tiny_config, *place[:2], *begin)
    step = ("--only", "choose", "--out", bert.parent / "run", "--set", "run.device=cpu")
    assert told in refusal(capsys, "pretrain", __file__, *step, *begin)
    assert not (bert.parent / "run").exists()


def test_convert_writes_a_config_to_go_on_with(bert, tmp_path, capsys):
    ours = tmp_path / "ours"
    options = ["--from", "huggingface", "--missing", "draw", "--out", str(ours)]
    assert main(["convert", str(bert), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"train --data DATA --config {ours / 'train.toml'} --init-checkpoint {ours}" in lines[-1]
    model = read_config(ours).model
    assert (model.vocab_size, model.num_heads, model.objective) == (NUM_WORDS, 4, "mlm")
    found = load_config(ours / "train.toml", (), ours)
    assert found.model.hidden_size == 32 and found.data.max_seq_length == 64
    assert found.optim.learning_rate == 2e-4
    choose = ["pretrain", __file__, "--only", "choose", "--out", "out", "--set", "run.device=cpu"]
    assert main([*choose, "--init-checkpoint", str(ours)]) == 0
    chosen = capsys.readouterr().out
    assert "\nmax_seq_length = 64\n" in chosen
    assert main([*choose, "--set", f"run.init_checkpoint={ours}"]) == 0
    assert capsys.readouterr().out == chosen
    (tmp_path / "chosen.toml").write_text(chosen)
    assert main([*choose, "--config", str(tmp_path / "chosen.toml")]) == 0
    assert capsys.readouterr().out == chosen


def test_own_text_converts_it_once(bert, tmp_path, monkeypatch, capsys):
    """In this process alone: its workers and its rank have tests of their own."""
    monkeypatch.setattr("bert_tools.pretrain.choose.usable_cpus", lambda: {0})
    monkeypatch.setattr(spawn, "run_on_ranks", lambda words, _ranks, **_: main(words))
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    write_synthetic_text(text / "a.txt", 160, seed=0)  # the words of these weights
    settings = ("schedule.decay_steps=4", "parallel.ranks_per_node=1", "run.device=cpu")
    words = ["--init-checkpoint", str(bert), "--set=mlperf.enforce_rules=false"]
    words += [f"--set={each}" for each in settings]
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "text", "--out", "out", *words]) == 0
    told = capsys.readouterr().out
    first = out / "first_weights"
    assert f"converted {bert} (BertModel) to {first} (it has no masked-LM head, " in told
    trained = tensors_of(resolve(out / "run" / "run_0" / "checkpoints"))
    assert trained.keys() == tensors_of(first).keys()
    assert trained[WORDS].shape == (PADDED, 32)
    assert "huggingface, bert, BertModel" in (out / "exported" / "README.md").read_text()
    shutil.rmtree(out / "exported")
    shutil.rmtree(bert)
    monkeypatch.chdir(text)
    # A resumed call needs only what was converted, from any directory.
    assert main(["pretrain", ".", "--out", "../out", *words]) == 0
    assert (out / "exported" / "model.safetensors").is_file()
    assert "converted" not in capsys.readouterr().out
    assert " before training)" in (out / "exported" / "README.md").read_text()
    shutil.rmtree(first)
    run = out / "run" / "run_0"
    (run / "data").symlink_to(out / "data")
    assert main(["pretrain", ".", "--only", "finish", "--out", str(run)]) == 0
    said = f"{first}: no such directory, so the accuracy before training is not known\n"
    assert said in capsys.readouterr().err
    card = (run / "exported" / "README.md").read_text()
    assert "context-free baseline)" in card and "before training" not in card

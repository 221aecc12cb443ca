"""A run begins with a directory in Hugging Face's form: its model, its weights, and without it."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import CPU, NUM_WORDS, PADDED, WORD_BIAS, WORDS, save_theirs, tensors_of
from torch import Tensor

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.first_weights import recorded_model, take_model, vocabulary_of
from mlperf_bert.checkpoint.huggingface.weights import PADDING_BIAS
from mlperf_bert.checkpoint.load import load_first_weights
from mlperf_bert.checkpoint.manifest import read_config, read_manifest, read_state, resolve
from mlperf_bert.config.files import load_config
from mlperf_bert.model.bert import BertForPretraining
from support import TINY_CONFIG, refusal


@pytest.fixture
def bert(tmp_path: Path, words: Path) -> Path:
    """A BertModel without heads, with its vocabulary."""
    save_theirs(tmp_path / "bert", "BertModel", max_position_embeddings=64)
    shutil.copy(words, tmp_path / "bert" / "vocab.txt")
    return tmp_path / "bert"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny config without a [model] section."""
    head, _, tail = TINY_CONFIG.partition("[model]\n")
    path = tmp_path / "no_model.toml"
    path.write_text(f"{head}[{tail.partition('[')[2]}")
    return path


def loaded(config: Path, bert: Path, words: Path, seed: int) -> dict[str, Tensor]:
    found = load_config(config, (), bert, take_model)
    model = BertForPretraining(found.model, CPU)
    digest = hashlib.sha256(words.read_bytes()).hexdigest()
    assert "has no masked-LM head: drawn by the seed" in load_first_weights(
        model, found, digest, seed
    )
    return model.state_dict()


def test_two_ranks_begin_with_it_and_go_on_without_it(
    bert: Path, config: Path, words: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    theirs, first = tensors_of(bert), loaded(config, bert, words, seed=11)
    digest = hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest()

    def train(into: str, ranks: int, *more: object) -> int:
        place = ("--config", config, "--data", synthetic_data, "--run-dir", tmp_path / into)
        each = f"parallel.local_batch_size={16 // ranks}"
        shared = ("--set", f"parallel.ranks_per_node={ranks}", "--set", each)
        rate = ("--set", "optim.learning_rate=0.0", "--set", "run.warm_up_steps=0")
        words = ("train", *place, "--init-checkpoint", bert, *shared, *rate, *more)
        return main(list(map(str, words)))

    assert train("run", 2, "--set", "run.max_steps=1") == 3
    saved = tmp_path / "run" / "run_0" / "checkpoints"
    ours = tensors_of(resolve(saved))
    for name, tensor in theirs.items():
        if not name.startswith("pooler."):
            rows = ours[f"bert.{name}"][: len(tensor)]
            assert torch.equal(rows, tensor), name
    assert ours.keys() == first.keys()
    assert all(torch.equal(ours[name], first[name]) for name in ours)  # heads by the run's seed
    assert not any(ours[WORDS][NUM_WORDS:].any(dim=1))
    assert ours[WORD_BIAS][NUM_WORDS:].tolist() == [PADDING_BIAS] * (PADDED - NUM_WORDS)
    other = loaded(config, bert, words, seed=12)
    assert [name for name in first if not torch.equal(first[name], other[name])] == [
        "cls.predictions.transform.dense.weight"
    ]
    assert digest in read_manifest(resolve(saved)).origin["initialized_from"]
    shutil.rmtree(bert)
    assert train("more", 1, "--set", "run.max_steps=2", "--resume", saved) == 3
    assert recorded_model("auto", tmp_path / "run" / "run_0")["hidden_size"] == 32
    more = tmp_path / "more" / "run_0" / "checkpoints"
    assert read_state(resolve(more)).step == 2
    assert read_config(more).model == read_config(saved).model


def test_the_model_is_what_the_weights_say(bert: Path, config: Path, capsys: Any) -> None:
    for setting, value in (("hidden_size", "32"), ("layer_norm_epsilon", "1e-07")):
        asked = ["config", "get", str(config), f"model.{setting}"]
        assert main([*asked, "--init-checkpoint", str(bert)]) == 0
        assert capsys.readouterr().out == f"{value}\n"
    model = load_config(config, (), bert, take_model).model
    assert (model.vocab_size, model.num_heads, model.objective) == (NUM_WORDS, 4, "mlm")
    assert vocabulary_of(bert) == bert / "vocab.txt"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.num_heads=2", "is 2, the weights in BERT have 4; set it to 4, or leave it out"),
        (
            f"model.vocab_size={PADDED}",
            f"the weights in BERT have {NUM_WORDS}; set it to {NUM_WORDS}, or",
        ),
        ("model.num_headz=2", "--set: 'model.num_headz': no such setting"),
        ("model.hidden_size=33", "is 33, the weights in BERT have 32; set it to 32, or"),
        ("data.max_seq_length=65", "is 65; set it to 64 (position embeddings) at most"),
        ("mlperf.division=closed", "in Hugging Face's form; the closed division starts from"),
        (f"run.init_checkpoint_sha256={'0' * 64}", "the weights in BERT have DIGEST; give the"),
    ],
)
def test_what_contradicts_is_one_line(
    setting: str, said: str, bert: Path, config: Path, synthetic_data: Path, capsys: Any
) -> None:
    digest = hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest()
    said = said.replace("BERT", str(bert)).replace("DIGEST", digest)
    place = ("--data", synthetic_data, "--run-dir", bert.parent / "run", "--init-checkpoint", bert)
    assert said in refusal(capsys, "train", "--config", config, *place, "--set", setting)
    assert not (bert.parent / "run").exists()


def test_another_vocabulary_or_another_model_is_one_line(
    bert: Path, config: Path, synthetic_data: Path, capsys: Any
) -> None:
    place = ("--data", synthetic_data, "--run-dir", bert.parent / "run", "--init-checkpoint", bert)
    words = (bert / "vocab.txt").read_bytes()
    (bert / "vocab.txt").write_bytes(words.replace(b"\n", b"x\n", 7).replace(b"]x", b"]"))
    assert "another vocabulary" in refusal(capsys, "train", "--config", config, *place)
    (bert / "vocab.txt").write_bytes(words)
    settings = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**settings, "hidden_act": "relu"}))
    assert "hidden_act: is 'relu'" in refusal(capsys, "train", "--config", config, *place)
    (bert / "config.json").write_text(json.dumps({**settings, "intermediate_size": 40}))
    assert "intermediate_size" in refusal(capsys, "train", "--config", config, *place)


def test_the_file_may_fit_the_weights_by_a_change_alone(
    bert: Path, config: Path, capsys: Any
) -> None:
    """The closed walk shrinks a file of 512 tokens; the weights know fewer positions."""
    text = config.read_text().replace("max_seq_length = 32", "max_seq_length = 512")
    config.write_text(text)
    assert "max_seq_length = 512" in text
    shorter = ("data.max_seq_length=32",)
    assert load_config(config, shorter, bert, take_model).data.max_seq_length == 32
    config.write_text(text + "[nothing]\n")
    place = ["train", "--config", str(config), "--init-checkpoint", str(bert), "--data", "D"]
    assert f"{config}: [nothing]" in refusal(capsys, *place, "--set", shorter[0])


def test_a_next_sentence_head_that_is_asked_for_is_drawn(
    bert: Path, config: Path, words: Path
) -> None:
    wanted = load_config(config, ("model.objective=mlm_nsp",), bert, take_model)
    model = BertForPretraining(wanted.model, CPU)
    line = load_first_weights(model, wanted, hashlib.sha256(words.read_bytes()).hexdigest(), 3)
    assert "no masked-LM head and no next-sentence head" in line
    pooler = model.state_dict()["bert.pooler.dense.weight"]
    assert torch.equal(pooler, tensors_of(bert)["pooler.dense.weight"])


def test_convert_writes_a_config_to_go_on_with(bert: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["convert", "--from", "huggingface", "--missing", "draw", str(bert)]
    assert main([*words, "--out", str(tmp_path / "ours")]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert f"own-text TEXT --out NEW --init-checkpoint {tmp_path / 'ours'}" in lines[0]
    assert f"train --data DATA --config {tmp_path / 'ours' / 'train.toml'}" in lines[1]
    found = load_config(tmp_path / "ours" / "train.toml", (), tmp_path / "ours", take_model)
    assert found.model.hidden_size == 32 and found.data.max_seq_length == 64
    assert found.optim.learning_rate == 2e-4
    given = ["--init-checkpoint", str(bert), "--set", "run.device=cpu"]
    assert main(["own-text", __file__, "--only", "choose", "--out", "out", *given]) == 0
    assert "\ndata.max_seq_length=64\n" in capsys.readouterr().out

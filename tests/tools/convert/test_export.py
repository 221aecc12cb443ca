"""Checkpoints as `transformers` loads them: equal scores, equal words, and back bit for bit."""

import json
import os
from dataclasses import replace

import pytest
import torch
from huggingface_cases import (
    NUM_WORDS,
    PADDED,
    a_batch,
    convert,
    load_ours,
    real_rows,
    save_theirs,
    tensors_of,
    trained,
)

from bert_tools.huggingface.export import export_huggingface
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.vocabulary.word_pieces import Tokenizer, load_vocabulary
from resume_cases import run_train
from support import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "data"


def load_theirs(directory, form):
    """With nothing missing and nothing left over."""
    import transformers

    assert os.environ["HF_HUB_OFFLINE"] == "1"
    model, loaded = getattr(transformers, form).from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loaded.values()), loaded
    return model.eval()


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm"])
def test_transformers_computes_the_same(objective, tmp_path, words, synthetic_data):
    import transformers

    checkpoint = trained(tmp_path / "run", words, f"model.objective={objective}")
    done = export_huggingface(checkpoint, tmp_path / "out", words)
    form = "BertForPreTraining" if objective == "mlm_nsp" else "BertForMaskedLM"
    assert done.startswith(f"{form} of step 7: ") and done.endswith(f" {PADDED} rows of words")
    theirs = load_theirs(tmp_path / "out", form)
    masked_lm = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    batch, inputs = a_batch(synthetic_data)
    with torch.inference_mode():
        ours = load_ours(checkpoint)(batch)
        found, alone = theirs(**inputs), masked_lm(**inputs)
    for mlm in (found.prediction_logits if objective == "mlm_nsp" else found.logits, alone.logits):
        wanted = real_rows(mlm, inputs)[batch.masked_token_index]
        assert wanted.std() > 0.1
        assert (ours.mlm - wanted).abs().max() < 1e-5
    if objective == "mlm_nsp":
        assert (ours.nsp - found.seq_relationship_logits).abs().max() < 1e-5


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm"])
def test_out_and_in_again_is_bit_for_bit(objective, tmp_path, words):
    checkpoint = trained(tmp_path / "run", words, f"model.objective={objective}")
    export_huggingface(checkpoint, tmp_path / "out", words)
    found = convert(tmp_path / "out", tmp_path / "again", words)
    same = ((tmp_path / "again" / name).read_bytes() for name in ("model.safetensors", "vocab.txt"))
    assert list(same) == [(checkpoint / "model.safetensors").read_bytes(), words.read_bytes()]
    assert not found.drawn and not found.ignored
    model = read_config(checkpoint).model
    assert read_config(tmp_path / "again").model == replace(
        model, initializer_range=model.initializer_range
    )


@pytest.mark.parametrize("form", ["BertForPreTraining", "BertForMaskedLM"])
def test_in_and_out_again_is_bit_for_bit(form, tmp_path, words):
    save_theirs(tmp_path / "theirs", form)
    convert(tmp_path / "theirs", tmp_path / "ours", words)
    assert (
        main(
            ["export", str(tmp_path / "ours"), "--to", "huggingface", "--out", str(tmp_path / "o")]
        )
        == 0
    )
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "o")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    stated = json.loads((tmp_path / "theirs" / "config.json").read_text())
    written = json.loads((tmp_path / "o" / "config.json").read_text())
    assert written["vocab_size"] == NUM_WORDS
    assert {key: stated.get(key, value) for key, value in written.items()} == written


def test_words_are_split_as_ours(tmp_path):
    import transformers

    vocabulary = load_vocabulary(GOLDEN / "own_vocab.txt")
    checkpoint = trained(
        tmp_path / "run", GOLDEN / "own_vocab.txt", f"model.vocab_size={len(vocabulary)}"
    )
    export_huggingface(checkpoint, tmp_path / "out", GOLDEN / "own_vocab.txt")
    ours = Tokenizer(vocabulary)
    text = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8")
    # Not a capital sigma at the end of a word, which theirs makes an ordinary small one.
    lines = [line for line in text.splitlines() if "\u03a3" not in line]
    assert len(lines) > 70
    lines += ["Caf\u00e9 [MASK] \u4e2d\u6587", "w" * 250, ""]
    for loaded, longest in (
        (transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), 200),
        (transformers.BertTokenizer.from_pretrained(tmp_path / "out"), 100),
    ):
        assert loaded.model_max_length == 32
        assert (loaded.mask_token_id, loaded.pad_token_id) == (
            vocabulary.mask_id,
            vocabulary.pad_id,
        )
        for line in [*lines, "w" * longest]:
            wanted = memoryview(ours.encode(line.replace("[MASK]", ""))).cast("H").tolist()
            found = loaded(line, add_special_tokens=False)["input_ids"]
            assert [token for token in found if token != vocabulary.mask_id] == wanted
        pair = loaded("the", "a")
        assert pair["input_ids"][0] == vocabulary.cls_id
        assert pair["token_type_ids"][-2:] == [1, 1]


def test_the_vocabulary_must_be_its_own(tmp_path, words, capsys):
    checkpoint = str(trained(tmp_path / "run", words))
    to = ["--to", "huggingface", "--out", str(tmp_path / "out")]
    assert main(["export", checkpoint, *to]) == 2
    assert "with --vocab" in capsys.readouterr().err
    assert main(["export", checkpoint, *to, "--vocab", str(GOLDEN / "own_vocab.txt")]) == 2
    assert not (tmp_path / "out").exists()
    assert main(["export", checkpoint, *to, "--vocab", str(words)]) == 0
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == words.read_bytes()


def test_a_run_has_its_vocabulary_with_it(tiny_config, synthetic_data, tmp_path):
    run_train(tiny_config, synthetic_data, tmp_path / "run", "run.max_steps=2")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    checkpoints = str(tmp_path / "elsewhere/run_0/checkpoints")
    assert main(["export", checkpoints, "--to", "huggingface", "--out", str(tmp_path / "out")]) == 0
    vocabulary = (synthetic_data / "train/vocab.txt").read_bytes()
    assert (tmp_path / "out/vocab.txt").read_bytes() == vocabulary


def test_a_damaged_checkpoint_is_not_exported(tmp_path, words, capsys):
    checkpoint = trained(tmp_path / "run", words)
    path = checkpoint / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    options = ["--to", "huggingface", "--out", str(tmp_path / "out"), "--vocab", str(words)]
    assert main(["export", str(checkpoint), *options]) == 2
    error = capsys.readouterr().err
    assert "digest" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_place_that_is_taken_stays(tmp_path, words):
    checkpoint = trained(tmp_path / "run", words)
    (tmp_path / "out").write_text("kept")
    options = ["--to", "huggingface", "--out", str(tmp_path / "out"), "--vocab", str(words)]
    assert main(["export", str(checkpoint), *options]) == 2
    assert (tmp_path / "out").read_text() == "kept"

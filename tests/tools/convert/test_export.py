"""Checkpoints as `transformers` loads them: equal scores, equal words, and back bit for bit."""

import os
import shutil

import pytest
import torch
from huggingface_cases import MODERN, PADDED, a_batch, convert, load_ours, real_rows

from bert_tools.huggingface.export import export_huggingface
from checkpoint_cases import trained
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.vocabulary.word_pieces import Tokenizer, load_vocabulary
from support import REPOSITORY, refusal

GOLDEN = REPOSITORY / "tests" / "golden" / "data"


def load_theirs(directory, form):
    """With nothing missing, and left over what pairs of segments need where it is not asked for."""
    import transformers

    assert os.environ["HF_HUB_OFFLINE"] == "1"
    model, loaded = getattr(transformers, form).from_pretrained(
        directory,
        output_loading_info=True,
        attn_implementation="sdpa",
    )
    if form == "AutoModelForMaskedLM":
        pairs = ("bert.pooler.", "cls.seq_relationship.")
        assert all(name.startswith(pairs) for name in loaded.pop("unexpected_keys"))
    assert not any(loaded.values()), loaded
    return model.eval()


@pytest.mark.parametrize(
    ("form", "overrides"),
    [
        ("BertForPreTraining", ()),
        ("BertForMaskedLM", ("model.objective=mlm",)),
        ("ModernBertForMaskedLM", MODERN),
    ],
)
def test_transformers_computes_the_same_and_back_it_is_bit_for_bit(
    form, overrides, tmp_path, words, synthetic_data
):
    import transformers

    checkpoint, out = trained(tmp_path / "run", words, *overrides), tmp_path / "out"
    done = export_huggingface(checkpoint, out, words)
    assert done.startswith(f"{form} of step 7: ") and done.endswith(f" of {PADDED} rows")
    batch, inputs = a_batch(synthetic_data, form)
    assert inputs["attention_mask"].sum() < inputs["attention_mask"].numel()
    with torch.inference_mode():
        ours = load_ours(checkpoint)(batch)
        found = load_theirs(out, form)(**inputs)
        alone = load_theirs(out, "AutoModelForMaskedLM")(**inputs)
    for mlm in (found[0], alone.logits):
        wanted = real_rows(mlm, inputs)[batch.masked_token_index]
        assert wanted.std() > 0.1
        assert (ours.mlm - wanted).abs().max() < 1e-5
    if form == "BertForPreTraining":
        assert (ours.nsp - found.seq_relationship_logits).abs().max() < 1e-5
    assert not (out / "README.md").exists()  # which pretrain alone has facts for
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("the", "a").keys() == inputs.keys()
    assert tokenizer.model_max_length == 32
    again = convert(out, tmp_path / "again", words)
    assert not again.drawn and not again.ignored
    same = ((tmp_path / "again" / name).read_bytes() for name in ("model.safetensors", "vocab.txt"))
    assert list(same) == [(checkpoint / "model.safetensors").read_bytes(), words.read_bytes()]
    assert read_config(tmp_path / "again").model == read_config(checkpoint).model


def test_words_are_split_as_ours(tmp_path):
    """By both classes that load it; test_exported_words has every character."""
    import transformers

    own = shutil.copy(GOLDEN / "own_vocab.txt", tmp_path / "vocab.txt")  # as a run keeps it
    vocabulary = load_vocabulary(own)
    checkpoint = trained(tmp_path / "run_0", own, f"model.vocab_size={len(vocabulary)}")
    export_huggingface(checkpoint, tmp_path / "out")
    ours = Tokenizer(vocabulary)
    text = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8")
    # Not a capital sigma at the end of a word, which theirs makes an ordinary small one.
    lines = [line for line in text.splitlines() if "\u03a3" not in line]
    assert len(lines) > 70
    for name, longest in (("AutoTokenizer", 200), ("BertTokenizer", 100)):
        loaded = getattr(transformers, name).from_pretrained(tmp_path / "out")
        for line in [*lines, "Caf\u00e9 [MASK] \u4e2d\u6587", "w" * longest, "w" * 250, ""]:
            wanted = memoryview(ours.encode([line.replace("[MASK]", "")])[0]).cast("H").tolist()
            found = loaded(line, add_special_tokens=False)["input_ids"]
            assert [token for token in found if token != vocabulary.mask_id] == wanted
        assert loaded("the", "a")["token_type_ids"][-2:] == [1, 1]


def test_what_is_refused_writes_nothing(tmp_path, words, capsys):
    checkpoint, out = trained(tmp_path / "run", words), tmp_path / "out"
    to = ("export", checkpoint, "--to", "huggingface", "--out", out)
    assert "with --vocab" in refusal(capsys, *to)
    assert "own_vocab.txt" in refusal(capsys, *to, "--vocab", GOLDEN / "own_vocab.txt")
    out.write_text("kept")
    assert str(out) in refusal(capsys, *to, "--vocab", words)
    assert out.read_text() == "kept"
    out.unlink()
    path = checkpoint / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    assert "digest" in refusal(capsys, *to, "--vocab", words)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

"""Tokenizer files: special tokens by role, text split as `tokenizers` does, refused in one line."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.documents import tokenize_documents
from mlperf_bert.vocabulary.any_vocabulary import (
    load_any_vocabulary,
    load_tokenizer_file,
    make_encoder,
)
from own_texts import encode_lines
from support import prepare_small, run_cli
from verify_cases import problems

LINES = ["The model was trained on text.", "It was a text, it was: a model!", "</s> [MASK] <mask>"]
TEXT = "\u00e9\u4e00 a text, and a \ufdfa"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
HUGE = 2**31 - 1
SINGLE = {"max_seq_length": 24, "max_predictions": 4, "dupe_factor": 1, "segments": "single"}


def trained(model, trainer, **steps):
    """A tokenizer of as many tokens as two lines give."""
    made = Tokenizer(model)
    for name, step in steps.items():
        setattr(made, name, step)
    made.train_from_iterator(LINES[:2] * 9, trainer)
    return made


def byte_level(special=SPECIAL):
    """As RoBERTa's."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.ByteLevel(False))


def word_pieces():
    """As BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


def unigram():
    """As XLM-R's or ALBERT's."""
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    return trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())


MADE = {"byte level": byte_level, "word pieces": word_pieces, "unigram": unigram}


def saved(path, tokenizer, change=None):
    values = json.loads(tokenizer.to_str())
    if change is not None:
        change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", MADE)
def test_lines_are_split_as_the_library_does(tmp_path, kind):
    tokenizer = MADE[kind]()
    found = load_tokenizer_file(saved(tmp_path / "tokenizer.json", tokenizer))
    assert len(found) == tokenizer.get_vocab_size()
    for name in ("pad", "unk", "cls", "sep", "mask"):
        written = {"cls": "<s>", "sep": "</s>"}.get(name, f"<{name}>")
        wanted = f"[{name.upper()}]" if kind == "word pieces" else written
        assert getattr(found, f"{name}_id") == tokenizer.token_to_id(wanted)
    lines = [*LINES[:2], "", "model", TEXT]
    plain = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    found_lines = encode_lines(found, lines)
    assert [line.tolist() for line in found_lines] == plain
    assert {line.dtype for line in found_lines} == {np.dtype(np.uint16)}
    # Special tokens in the text are text.
    (ids,) = encode_lines(found, [LINES[2] + " model [SEP] <s>"])
    special = [found.pad_id, found.cls_id, found.sep_id, found.mask_id]
    assert len(ids) and not np.isin(ids, special).any()
    # Truncation, padding and what is put around the text do not count.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {"single": [text] * 50, "pair": [text, other], "special_tokens": {}}
    repeating = {"post_processor": {"type": "TemplateProcessing", **template}}
    path = saved(tmp_path / "tokenizer.json", tokenizer, lambda values: values.update(repeating))
    assert encode_lines(load_tokenizer_file(path), LINES[:1])[0].tolist() == plain[0]


def test_a_sentence_within_a_document_follows_white_space(tmp_path):
    path = saved(tmp_path / "tokenizer.json", byte_level())
    vocabulary = load_any_vocabulary(path)
    text = "was it\nwas it\n\nwas it"
    documents = tokenize_documents(text, make_encoder(vocabulary))
    sentences = np.split(documents.tokens, documents.sentence_offsets[1:-1])
    plain = [
        byte_level().encode(text, add_special_tokens=False).ids for text in ("was it", " was it")
    ]
    assert plain[0] != plain[1]
    assert [each.tolist() for each in sentences] == [plain[0], plain[1], plain[0]]


@pytest.mark.parametrize(
    ("before", "joint"),
    [
        ("It was.", " "),
        ("\u6587\u5b57\u3002", ""),  # Chinese, with its full stop
        ("\u6587\u5b57", ""),
        ("\u6587\u5b57.", ""),
        ("\u201c\u6587\u5b57\u3002\u201d", ""),  # closing quotes and dots are not wide
        ("\u6587\u5b57\u2026\u2026", ""),
        ("\u6587 Python\u3002", ""),
        ("\u6587 Python", " "),
        ("\uff76\uff85\uff61", ""),  # half-width katakana
        ("\ud55c\uad6d\uc5b4", " "),  # Korean has spaces
        ("\ud55c\uad6d\uc5b4\u300f", " "),
        ("good \U0001f600", " "),
    ],
)
def test_sentences_are_joined_as_their_script_joins_them(tmp_path, before, joint):
    path = saved(tmp_path / "tokenizer.json", byte_level())
    encoder = make_encoder(load_any_vocabulary(path))
    documents = tokenize_documents(f"{before}\n{before}", encoder)
    assert documents.tokens.tobytes() == encoder.encode([before + joint + before])[0]


BEFORE_A_TEXT = {
    "byte level": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    "metaspace": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
}


@pytest.mark.parametrize("kind", BEFORE_A_TEXT)
def test_a_space_before_a_text_is_none_before_a_sentence(tmp_path, kind):
    """Documents are split as the library splits them whole, whatever it puts before a text."""

    def change(values):
        values["pre_tokenizer"] = BEFORE_A_TEXT[kind]

    made = byte_level() if kind == "byte level" else unigram()
    path = saved(tmp_path / "tokenizer.json", made, change)
    sentences = ["\u6587\u5b57\u3002", "\u6587\u5b57\u3002", "was it.", "model", "was it"]
    encoder = make_encoder(load_any_vocabulary(path))
    documents = tokenize_documents("\n".join(sentences), encoder)
    library = Tokenizer.from_file(str(path))
    text = "\u6587\u5b57\u3002\u6587\u5b57\u3002was it. model was it"
    assert documents.tokens.tolist() == library.encode(text, add_special_tokens=False).ids
    last = documents.tokens[documents.sentence_offsets[-2] :]
    assert last.tolist() == library.encode("was it", add_special_tokens=False).ids


def test_a_special_token_without_a_role_is_a_word_of_the_text(tmp_path):
    made = byte_level()
    made.add_special_tokens(["<url>"])
    encoder = make_encoder(load_any_vocabulary(saved(tmp_path / "tokenizer.json", made)))
    (ids,) = encoder.encode(["was it <url>"])
    assert np.frombuffer(ids, encoder.dtype)[-1] == made.token_to_id("<url>")


def test_a_set_of_it_keeps_it_and_passes_verification(tmp_path):
    path = saved(tmp_path / "mine.json", byte_level())
    text, made = tmp_path / "text.txt", tmp_path / "set"
    text.write_text("\n\n".join(f"{LINES[0]}\n{LINES[1]}" for _ in range(20)))
    manifest = prepare_small([text], path, made, **SINGLE)
    assert (manifest.vocabulary_file, manifest.unk_id) == ("tokenizer.json", 3)
    assert (made / "tokenizer.json").read_bytes() == path.read_bytes()
    assert not (made / "vocab.txt").exists()
    assert problems(made, full=True) == ""
    assert SampleReader(made, manifest).read(np.arange(2)).input_ids[0] == manifest.cls_id
    with (made / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert "vocabulary" in problems(made)


def without(*names):
    return byte_level(tuple(name for name in SPECIAL if name not in names))


def test_a_vocabulary_of_bytes_needs_no_unknown_word(tmp_path):
    found = load_tokenizer_file(saved(tmp_path / "tokenizer.json", without("<unk>")))
    assert found.unk_id == found.pad_id


CHANGED = {
    "dropout": lambda values: values["model"].update(dropout=0.1),
    "huge id": lambda values: (
        values["added_tokens"].append({**values["added_tokens"][0], "content": "x", "id": HUGE}),
        values["model"]["vocab"].update(x=HUGE),
    ),
    "no model": lambda values: values.update(model=3),
    "unknown model": lambda values: values["model"].update(type="Pickle"),
}
GARBAGE = (b"", b"\xff\xfe", b"{", b"[]", b"{}", b'{"model": {}}', b'{"a": NaN}', b"[" * 100_000)


def refusal(path):
    with pytest.raises(DataError) as caught:
        load_any_vocabulary(path)
    line = str(caught.value)
    assert line.isprintable() and line.startswith(str(path))
    return line


def test_what_is_no_tokenizer_for_this_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    for name in ("<s>", "</s>", "<pad>", "<mask>"):
        line = refusal(saved(path, without(name)))
        assert "token is missing" in line and name in line
    for change in CHANGED.values():
        refusal(saved(path, byte_level(), change))
    for contents in GARBAGE:
        path.write_bytes(contents)
        refusal(path)
    refusal(tmp_path / "nowhere.json")


ENDLESS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}


def test_a_pattern_that_is_given_up_ends_in_one_line(tmp_path):
    pattern = {"pre_tokenizer": {**ENDLESS, "invert": False}}
    path = saved(tmp_path / "tokenizer.json", byte_level(), lambda values: values.update(pattern))
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for text in texts:
        text.write_text(LINES[0] + "\n" + "x" * 40 + "\n")
    places = ("--text", *texts, "--vocab", path, "--out", tmp_path / "set")
    done = run_cli("prepare", *places, "--workers", 2)
    assert done.returncode == 2
    # What the package prints when it panics comes before, and cannot be held back.
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"mlperf_bert: error: {path}: the tokenizer cannot split this text (")
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "set").rglob("*.hdf5*"))

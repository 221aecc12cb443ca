"""Tokenizers go in and out with the weights: `transformers` splits text as before, and as we do."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
from huggingface_cases import convert, save_theirs

from bert_tools.huggingface.export import export_huggingface
from bert_tools.huggingface.tokenizer import tokens_of, word_piece_tokenizer
from checkpoint_cases import trained
from mlperf_bert.errors import CheckpointError, DataError
from mlperf_bert.vocabulary.any_vocabulary import (
    file_name,
    load_any_vocabulary,
    load_new_vocabulary,
)
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, parse_vocabulary
from own_texts import encode_lines, save_byte_level

PIECES = "Caf\u00e9 Cafe caf\u00e9 cafe \u4e2d \u4e2d\u6587 a - a-a ##a one two ##b ##c b c"
WORDS = (*SPECIAL_TOKENS, *PIECES.split())
TEXTS = ("Caf\u00e9 [MASK] caf\u00e9 Cafe", "\u4e2d\u6587 a-a", "a" * 60, "one")


@pytest.fixture
def theirs(tmp_path):
    """A BERT of these words, without a tokenizer."""
    save_theirs(tmp_path / "theirs", "BertForPreTraining", vocab_size=len(WORDS))
    return tmp_path / "theirs"


BERTS = {  # the library's own sections for BERT
    "normalizer": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}


def write_tokenizer(folder, change):
    """Ours, or the library's own with other settings."""
    contents = "".join(f"{word}\n" for word in WORDS).encode()
    values = word_piece_tokenizer(parse_vocabulary(contents, "words"))
    values |= deepcopy(BERTS) if change else {}
    for section, settings in change.items():
        values[section] |= settings
    (folder / "tokenizer.json").write_text(json.dumps(values))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "vocab.txt").write_bytes(contents)


def converted(source, out, words=None):
    """The vocabulary that a conversion took."""
    found = convert(source, out, words).vocabulary
    assert (out / file_name(found)).read_bytes() == found.contents
    return out / file_name(found)


def ids_of(folder, texts=TEXTS):
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    return [loaded(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"lowercase": False}},
        {"normalizer": {"strip_accents": False}},
        {"normalizer": {"handle_chinese_chars": False}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"model": {"max_input_chars_per_word": 50}},
    ],
)
def test_another_tokenizer_is_kept(theirs, tmp_path, change):
    write_tokenizer(theirs, {})
    plain = ids_of(theirs)
    write_tokenizer(theirs, change)
    assert ids_of(theirs) != plain
    ours = converted(theirs, tmp_path / "ours")
    assert ours.name == "tokenizer.json"
    export_huggingface(tmp_path / "ours", tmp_path / "out")
    assert ids_of(tmp_path / "out") == ids_of(theirs)
    again = converted(tmp_path / "out", tmp_path / "again")
    assert (again.name, again.read_bytes()) == (ours.name, ours.read_bytes())
    vocabulary = load_any_vocabulary(ours)
    assert [tokens_of(TEXTS[0], vocabulary, 100)] == ids_of(theirs)[:1]


def test_a_list_is_taken_where_it_splits_as_the_model_did(theirs, tmp_path):
    write_tokenizer(theirs, {})
    assert converted(theirs, tmp_path / "both").name == "vocab.txt"
    swapped = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    listed = (theirs / "vocab.txt").read_bytes()
    (theirs / "vocab.txt").write_text("".join(f"{word}\n" for word in swapped))
    assert converted(theirs, tmp_path / "ours").name == "tokenizer.json"
    (theirs / "vocab.txt").write_bytes(listed)
    (theirs / "tokenizer.json").unlink()
    assert converted(theirs, tmp_path / "plain").name == "vocab.txt"
    given = Path(shutil.copy(theirs / "vocab.txt", tmp_path / "given.txt"))
    for setting in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        (theirs / "tokenizer_config.json").write_text(json.dumps({setting: False}))
        said = rf"{setting}: must not be false.*tokenizer.json with --vocab"
        with pytest.raises(CheckpointError, match=said):
            convert(theirs, tmp_path / "refused", None)
    assert converted(theirs, tmp_path / "told", given).name == "vocab.txt"


def test_a_pair_keeps_its_types_with_a_tokenizer_file(theirs, tmp_path):
    import transformers

    write_tokenizer(theirs, {"normalizer": {"lowercase": False}})
    converted(theirs, tmp_path / "ours")
    export_huggingface(tmp_path / "ours", tmp_path / "out")
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("one a", "two")
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    # As RoBERTa's, whose two segments have one type and two tokens between them.
    path = theirs / "tokenizer.json"
    values = json.loads(path.read_text())
    ends = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    roberta = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
    path.write_text(json.dumps(values | {"post_processor": roberta | ends}))
    converted(theirs, tmp_path / "again")
    export_huggingface(tmp_path / "again", tmp_path / "as trained")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "as trained")
    assert dict(loaded("one a", "two")) == dict(pair)


def test_a_cased_list_without_a_tokenizer_is_refused(theirs, tmp_path):
    write_tokenizer(theirs, {})
    (theirs / "tokenizer.json").unlink()
    cased = [*SPECIAL_TOKENS, *(f"Word{number}" for number in range(len(WORDS) - 5))]
    (theirs / "vocab.txt").write_text("".join(f"{word}\n" for word in cased))
    with pytest.raises(DataError, match=r"a cased vocabulary .*; pass the tokenizer\.json"):
        convert(theirs, tmp_path / "out", None)
    with pytest.raises(DataError, match="a cased vocabulary"):
        load_new_vocabulary(theirs / "vocab.txt")


def test_a_byte_level_export_splits_as_training_did(tmp_path):
    import transformers

    given = save_byte_level(tmp_path / "tokenizer.json", ["a word and another word", "a"] * 9)
    vocabulary = load_any_vocabulary(given)
    run = trained(tmp_path / "run", given, f"model.vocab_size={len(vocabulary)}")
    export_huggingface(run, tmp_path / "out", given)
    texts = ("a word and another", "a [MASK] and another [MASK] word", "[MASK] and")
    wanted = [
        [vocabulary.cls_id, *encode_lines(vocabulary, texts[:1])[0], vocabulary.sep_id],
        *(tokens_of(text, vocabulary, 100) for text in texts[1:]),
    ]
    theirs = tuple(text.replace("[MASK]", "<mask>") for text in texts)
    assert ids_of(tmp_path / "out", theirs) == wanted
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (loaded.mask_token, loaded.cls_token, loaded.pad_token) == ("<mask>", "<s>", "<pad>")
    # What has all that already stays as it is, byte for byte.
    complete = Path(shutil.copy(tmp_path / "out" / "tokenizer.json", tmp_path / "complete.json"))
    run = trained(tmp_path / "other", complete, f"model.vocab_size={len(vocabulary)}")
    export_huggingface(run, tmp_path / "same", complete)
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == complete.read_bytes()
    again = converted(tmp_path / "same", tmp_path / "same_again")
    assert again.read_bytes() == complete.read_bytes()

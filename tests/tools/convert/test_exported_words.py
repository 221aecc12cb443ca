"""The exported tokenizer splits every assigned character as training did."""

import json
import unicodedata

import pytest

from bert_tools.huggingface.tokenizer import word_piece_tokenizer
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, basic_words, parse_vocabulary

PLANE = 2**16
AT_A_TIME = 500


@pytest.fixture(scope="module")
def split():
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = parse_vocabulary("\n".join([*SPECIAL_TOKENS, "a"]).encode(), "vocab.txt")
    found = tokenizers.Tokenizer.from_str(json.dumps(word_piece_tokenizer(vocabulary)))

    def words(text):
        cleaned = found.normalizer.normalize_str(text)
        return [word for word, _ in found.pre_tokenizer.pre_tokenize_str(cleaned)]

    return words


@pytest.mark.parametrize(
    "plane",
    [0, 1, *(pytest.param(plane, marks=pytest.mark.longest) for plane in (2, 3, 14, 15, 16))],
)
def test_every_assigned_character(split, plane):
    codes = range(plane * PLANE, (plane + 1) * PLANE)
    chars = [char for char in map(chr, codes) if unicodedata.category(char) not in ("Cn", "Cs")]
    assert len(chars) > 200
    for start in range(0, len(chars), AT_A_TIME):
        text = " ".join(f"x{char}y {char}" for char in chars[start : start + AT_A_TIME])
        assert split(text) == basic_words(text)


def test_what_depends_on_its_neighbours(split):
    for text in (
        "ΟΔΟΣ ΣΑΣ Σ ΑΣ. ΑΣ-ΑΣ ΆΣ́ ΣΑ Α\u0301Σ",  # noqa: RUF001
        "İstanbul ẞ ﬁ ŉ ǅ",
        "a\u2028b\x85c\x1cd\u3000e\xa0f\u200bg",
        "각 한국 が e\u0301\u0327",
        "[MASK] ##a don't",
    ):
        assert split(text) == basic_words(text), text

"""Word pieces: the definition's rules, the fast way equal to it, and a vocabulary's training."""

import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers.implementations import BertWordPieceTokenizer

from mlperf_bert.errors import ConfigError
from mlperf_bert.prepare.train_vocabulary import train_vocabulary, vocabulary_of_words
from mlperf_bert.vocabulary.word_pieces import (
    SPECIAL_TOKENS,
    PlainTokenizer,
    Tokenizer,
    basic_words,
    parse_vocabulary,
)
from support import run_process


def vocabulary_of(*tokens):
    return parse_vocabulary("\n".join([*SPECIAL_TOKENS, *tokens]).encode(), "")


def encoded(tokenizer, line):
    return np.frombuffer(tokenizer.encode([line])[0], dtype=tokenizer.dtype).tolist()


@pytest.fixture(scope="module")
def letters():
    """A vocabulary in which most basic words have pieces, so that differences show."""
    found = {}
    for low, high in ((0x20, 0x52F), (0x590, 0x6FF), (0x1E00, 0x20CF), (0x3000, 0x30FF)):
        for code in range(low, high + 1):
            for char in "".join(basic_words(chr(code))):
                found[char] = None
                found["##" + char] = None
    return vocabulary_of(*found, "##ab", "abc", "the", "##ing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("crème Žižek", ["creme", "zizek"]),
        ("ΟΔΟΣ ΣΑΣ Σ", ["οδος", "σας", "σ"]),  # noqa: RUF001
        ("a\u0085b\u200dc", ["abc"]),
        ("a\tb\u00a0c\u3000d", ["a", "b", "c", "d"]),
        ("a\x00\ufffdb", ["ab"]),
        ("ab漢字cd", ["ab", "漢", "字", "cd"]),
        ("don't—stop", ["don", "'", "t", "—", "stop"]),
        ("x\u2028y", ["x", "y"]),
        ("\u0130", ["i"]),
        ("$5^2~", ["$", "5", "^", "2", "~"]),
    ],
)
def test_basic_words(text, words):
    assert basic_words(text) == words


@pytest.mark.parametrize(
    ("tokens", "text", "pieces"),
    [
        # The longest from the left, and no way back.
        ("un una ##ble ##able ##a", "unable UNABLEX", ["una", "##ble", "[UNK]"]),
        ("a ##a", "a" * 200, ["a", *["##a"] * 199]),
        ("a ##a", "a" * 201, ["[UNK]"]),
        ("[ ] mask", "[MASK]", ["[", "mask", "]"]),  # special tokens in the text are text
    ],
)
def test_pieces(tokens, text, pieces):
    vocabulary = vocabulary_of(*tokens.split())
    ids = PlainTokenizer(vocabulary).encode(text)
    assert ids == encoded(Tokenizer(vocabulary), text)
    assert [vocabulary.tokens[i] for i in ids] == pieces


# Spaces, other white space, controls and letters whose form depends on the whole word: whatever
# could make a line differ from the sum of its words.
TRICKY = st.sampled_from(
    " \t\r\u00a0\u0085\x1c\x00\u2028\u3000\u03a3\u03c3aB\u0130\u0301,-\u4e00\ufffd"
)


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(st.one_of(st.text(), st.text(TRICKY)), min_size=1, max_size=8))
def test_looking_words_up_changes_nothing(letters, lines):
    plain, tokenizer = PlainTokenizer(letters), Tokenizer(letters)
    for line in [*lines, *lines]:
        assert encoded(tokenizer, line) == plain.encode(line)


def test_known_words_are_forgotten_before_they_fill_the_memory(letters, monkeypatch):
    monkeypatch.setattr("mlperf_bert.vocabulary.word_pieces.MAX_KNOWN_WORDS", 3)
    plain, tokenizer = PlainTokenizer(letters), Tokenizer(letters)
    line = "the abc ab a the b thing " + "x" * 300
    assert encoded(tokenizer, line) == plain.encode(line)


@settings(max_examples=100, deadline=None)
@given(line=st.text(st.characters(max_codepoint=127)))
def test_library_agrees_on_ascii(letters, line):
    """An implementation by others; on ASCII the two differ only in special tokens in the text."""
    assume(not any(token in line for token in SPECIAL_TOKENS))
    library = BertWordPieceTokenizer(vocab=letters.ids, lowercase=True)
    assert encoded(Tokenizer(letters), line) == library.encode(line, add_special_tokens=False).ids


LINES = ["the thing sings the song", "the Thing! thinks; the things sing", "oh, oh oh."]


def test_size_is_exact_and_special_tokens_come_first():
    tokens = train_vocabulary(LINES, 50)
    assert len(tokens) == len(set(tokens)) == 50
    assert tuple(tokens[:5]) == SPECIAL_TOKENS
    assert {"the", "oh", "thing", "!", "##s"} <= set(tokens)
    filled_up = train_vocabulary(LINES, 300)
    assert len(filled_up) == 300
    assert filled_up[-1].startswith("[unused")
    with pytest.raises(ConfigError, match=r"model\.vocab_size: is 10"):
        train_vocabulary(LINES, 10)
    # The most frequent pair is merged first.
    assert next(token for token in filled_up if len(token) == 2) == "th"


def test_neither_line_order_nor_hash_seed_matters():
    tokens = train_vocabulary(LINES, 45)
    assert train_vocabulary(LINES[::-1], 45) == tokens
    code = (
        "from mlperf_bert.prepare.train_vocabulary import train_vocabulary\n"
        f"print(train_vocabulary({LINES!r}, 45))"
    )
    out = run_process(sys.executable, "-c", code, PYTHONHASHSEED="1")
    assert out.stdout.strip() == str(tokens)


def plain_merges(counts):
    """Each merged piece; all pairs are counted again for every merge."""
    words = {word: [word[0], *("##" + char for char in word[1:])] for word in counts}
    while True:
        pairs = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            return
        merged = best[0] + best[1].removeprefix("##")
        yield merged
        for pieces in words.values():
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == best:
                    pieces[at : at + 2] = [merged]
                at += 1


@settings(max_examples=200)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=8), st.integers(1, 9), max_size=12))
def test_merges_are_those_of_a_full_count_before_each(counts):
    tokens = vocabulary_of_words(counts, 200)
    alphabet = {word[0] for word in counts} | {f"##{char}" for word in counts for char in word[1:]}
    expected = dict.fromkeys([*SPECIAL_TOKENS, *sorted(alphabet), *plain_merges(counts)])
    assert [token for token in tokens if not token.startswith("[unused")] == list(expected)

"""Word pieces: the definition's rules one by one, and the library path equal to it."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, Vocabulary
from mlperf_bert.prepare.wordpiece import FAST_RANGES, PlainTokenizer, Tokenizer, basic_words


def vocabulary_of(*tokens: str) -> Vocabulary:
    every = (*SPECIAL_TOKENS, *tokens)
    return Vocabulary(every, {token: i for i, token in enumerate(every)}, "0" * 64, b"")


@pytest.fixture(scope="module")
def letters() -> Vocabulary:
    """A vocabulary in which most basic words have pieces, so that differences show."""
    found: dict[str, None] = {}
    for low, high in (*FAST_RANGES, (0x300, 0x36F), (0x590, 0x6FF), (0x1F00, 0x1FFF)):
        for code in range(low, high + 1):
            for word in basic_words(chr(code)):
                for char in word:
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
def test_basic_words(text: str, words: list[str]) -> None:
    assert basic_words(text) == words


def test_greedy_longest_match_from_the_left() -> None:
    vocabulary = vocabulary_of("un", "una", "##ble", "##able", "##a")
    pieces = [vocabulary.tokens[i] for i in PlainTokenizer(vocabulary).encode("unable UNABLEX")]
    assert pieces == ["una", "##ble", "[UNK]"]


@pytest.mark.parametrize(("length", "count"), [(200, 200), (201, 1)])
def test_words_over_200_characters_are_unknown(length: int, count: int) -> None:
    vocabulary = vocabulary_of("a", "##a")
    for ids in (
        PlainTokenizer(vocabulary).encode("a" * length),
        Tokenizer(vocabulary).encode_lines(["a" * length])[0],
    ):
        assert len(ids) == count
        assert (ids[0] == vocabulary.unk_id) == (length > 200)


def test_special_tokens_in_the_text_are_ordinary_text() -> None:
    vocabulary = vocabulary_of("[", "]", "mask")
    ids = Tokenizer(vocabulary).encode_lines(["[MASK]"])[0]
    assert [vocabulary.tokens[i] for i in ids] == ["[", "mask", "]"]


def test_every_fast_code_point_agrees_alone_and_between_letters(letters: Vocabulary) -> None:
    plain, tokenizer = PlainTokenizer(letters), Tokenizer(letters)
    lines = []
    for low, high in FAST_RANGES:
        for code in range(low, high + 1):
            char = chr(code)
            lines += [char, f"a{char}b A{char}{char}", f" {char} .{char}, {char}a"]
    assert all(tokenizer.is_safe(line) for line in lines)
    encoded = tokenizer.encode_lines(lines)
    wrong = [line for line, ids in zip(lines, encoded, strict=True) if ids != plain.encode(line)]
    assert wrong == []


def test_no_fast_code_point_depends_on_its_neighbours() -> None:
    # The argument that equality per code point is equality per line rests on this.
    for low, high in FAST_RANGES:
        for code in range(low, high + 1):
            assert code != 0x3A3
            for char in unicodedata.normalize("NFD", chr(code).lower()):
                assert unicodedata.combining(char) == 0 or unicodedata.category(char) == "Mn"


FAST_CHARS = st.one_of(*(st.characters(min_codepoint=a, max_codepoint=b) for a, b in FAST_RANGES))


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(st.one_of(st.text(), st.text(FAST_CHARS)), min_size=1, max_size=8))
def test_both_paths_agree_on_random_unicode(letters: Vocabulary, lines: list[str]) -> None:
    plain = PlainTokenizer(letters)
    assert Tokenizer(letters).encode_lines(lines) == [plain.encode(line) for line in lines]

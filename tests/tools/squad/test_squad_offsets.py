"""Tokens with the characters they stand for: those that `prepare` makes, at the right places."""

import sys
from collections.abc import Sequence

import pytest

from bert_tools.squad.offsets import make_offset_encoder
from bert_tools.squad.questions import read_questions
from bert_tools.squad.settings import QUICK_DEV, QUICK_TRAIN
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import PlainTokenizer, Vocabulary, basic_words
from squad_cases import vocabulary_of


def quick_texts() -> list[str]:
    """Every context and question of the quick set."""
    questions = [each for path in (QUICK_TRAIN, QUICK_DEV) for each in read_questions(path)]
    return [text for each in questions for text in (each.context, each.question)]


def pieces_of(texts: Sequence[str]) -> Vocabulary:
    """A vocabulary in which each of the words is whole, in two pieces or in single letters."""
    found: dict[str, None] = {}
    for number, word in enumerate(sorted({w for text in texts for w in basic_words(text)})):
        half = len(word) // 2 or 1
        pieces = ([word], [word[:half], word[half:]], list(word))[number % 3]
        found |= {pieces[0]: None} | {f"##{piece}": None for piece in pieces[1:] if piece}
    return vocabulary_of(*found)


SENTENCES = ["The model reads the text.", "A node, two nodes: a cluster!", "Café au lait 漢字."]
OTHERS = (
    *SENTENCES,
    "ÉTÉ, Ångström; naïve (İstanbul) ΣΟΦός",
    "「漢字」 a_b $5 50% [SEP]\u00a0x\ty",
)


@pytest.mark.parametrize("texts", [quick_texts(), OTHERS], ids=["quick", "others"])
def test_word_pieces_are_those_of_prepare(texts: Sequence[str]) -> None:
    vocabulary = pieces_of(texts)
    plain, encode = PlainTokenizer(vocabulary), make_offset_encoder(vocabulary)
    for text in texts:
        tokens = encode(text)
        assert tokens.ids.tolist() == plain.encode(text)
        assert vocabulary.unk_id not in tokens.ids
        for token, start, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True):
            piece = vocabulary.tokens[token].removeprefix("##")
            alone = "".join(basic_words(text[start:end]))
            # The last sigma of a word has a form of its own, which shows only in the whole word.
            assert piece.replace("ς", "σ") == alone.replace("ς", "σ")  # noqa: RUF001


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The node,  the\tnode.", ["The", "node", ",", "the", "node", "."]),
        ("Cafés", ["Café", "s"]),
        ("the漢字node", ["the", "漢", "字", "node"]),
        ("no\u00adde\u200d node", ["no\u00adde", "node"]),  # invisible ones inside and after a word
        ("the [SEP] the", ["the", "[", "SEP", "]", "the"]),  # no end of a segment
        ("the nodes sunk the", ["the", "node", "s", "sunk", "the"]),  # sunk: unknown, one token
    ],
)
def test_parts_of_the_text(text: str, parts: list[str]) -> None:
    vocabulary = vocabulary_of("the", "node", "##s", "cafe", "漢", "字", ",", ".")
    tokens = make_offset_encoder(vocabulary)(text)
    spans = zip(tokens.starts, tokens.ends, strict=True)
    assert [text[start:end] for start, end in spans] == parts


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the package `tokenizers`"):
        make_offset_encoder(vocabulary_of("the"))

"""Tokens with the characters they stand for: those that `prepare` makes, at the right places."""

import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_tools.squad.offsets import make_offset_encoder
from bert_tools.squad.questions import read_questions
from bert_tools.squad.settings import QUICK_DEV, QUICK_TRAIN
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, make_encoder
from mlperf_bert.vocabulary.tokenizer_file import TokenizerFile, load
from mlperf_bert.vocabulary.word_pieces import PlainTokenizer, Vocabulary, basic_words
from squad_cases import vocabulary_of

# Letters of several lengths in either case, accents, marks that Unicode puts in another order,
# Korean (which comes apart), Chinese, all kinds of white space, and what cleaning drops.
ODD = "aAbßẞİıÉéñṨṩΣσςΟǅ가각ﬁﬃ漢字𠀀'-—¿$^ \t\n\r\u00a0\u2028\u3000\x00\x85\u00ad\u200d\ufffd"  # noqa: RUF001
ODD += "\u0301\u0307\u0323\u0345\u302e\u0f39\u1b44\u0f71\U0001d165\U0001d16d"
# Not st.text(one_of(...)): it draws odd ones far too seldom.
TEXTS = st.lists(
    st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=["Cs"])), max_size=40
).map("".join)


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


def tokenizer_file(kind: str, path: pytest.TempPathFactory) -> TokenizerFile:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if kind == "unigram":
        made = LibraryTokenizer(models.Unigram())
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    elif kind == "bytes":
        made = LibraryTokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(  # type: ignore[assignment]
            vocab_size=300, special_tokens=special, show_progress=False
        )
    else:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made = LibraryTokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(  # type: ignore[assignment]
            vocab_size=120, special_tokens=special, show_progress=False
        )
    made.train_from_iterator(SENTENCES * 5, trainer)
    place = path.mktemp(kind) / "tokenizer.json"
    made.save(str(place))
    return load(place)


@pytest.fixture(scope="module", params=["bytes", "unigram", "pieces"])
def file_vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AnyVocabulary:
    return tokenizer_file(request.param, tmp_path_factory)


@given(st.one_of(TEXTS, st.sampled_from(SENTENCES)))
@settings(max_examples=200, deadline=None)
def test_tokens_of_a_file_are_those_of_prepare(file_vocabulary: AnyVocabulary, text: str) -> None:
    tokens = make_offset_encoder(file_vocabulary)(text)
    encoder = make_encoder(file_vocabulary)
    assert tokens.ids.tolist() == np.frombuffer(encoder.encode(text), encoder.dtype).tolist()
    assert np.all((tokens.starts >= 0) & (tokens.starts <= tokens.ends))
    assert np.all(tokens.ends <= len(text))


@pytest.mark.parametrize("text", SENTENCES)
def test_a_files_tokens_cover_the_words(file_vocabulary: AnyVocabulary, text: str) -> None:
    tokens = make_offset_encoder(file_vocabulary)(text)
    covered = set()
    for start, end in zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True):
        covered |= set(range(start, end))
        assert not text[start:end].endswith(" ") or end - start == 1
    assert covered >= {place for place, char in enumerate(text) if char.isalnum()}


def test_what_reads_as_a_special_token_is_left_out_with_its_place(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = "The model</s> reads"
    vocabulary = tokenizer_file("bytes", tmp_path_factory)
    tokens = make_offset_encoder(vocabulary)(text)
    encoder = make_encoder(vocabulary)
    assert len(tokens.ids) == len(tokens.starts) == len(tokens.ends)
    assert tokens.ids.tolist() == np.frombuffer(encoder.encode(text), encoder.dtype).tolist()
    assert vocabulary.sep_id not in tokens.ids


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the package `tokenizers`"):
        make_offset_encoder(vocabulary_of("the"))

"""Windows over a text: laid out by hand, of any text, of the quick set; and their tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.squad.answers import find_answers, score, texts
from bert_tools.squad.questions import read_questions
from bert_tools.squad.settings import QUICK
from bert_tools.squad.windows import make_offset_encoder, make_windows
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import PlainTokenizer, basic_words
from squad_cases import qa, questions_of, vocabulary_of

CLS, SEP = 2, 3
# who is 5, leads is 6, and the words of the text are 10 to 19.
WORDS = ("who", "leads", "x", "y", "z", *(f"t{number}" for number in range(10)))
VOCABULARY = vocabulary_of(*WORDS)
TEXT = " ".join(WORDS[5:])  # word n begins at character 3 n


def asked(*answers, question="who leads"):
    return questions_of((TEXT, [qa("q", question, *answers)]))


def rows(windows):
    pieces = np.split(windows.input_ids, windows.offsets[1:-1])
    return [piece.tolist() for piece in pieces]


def test_windows_laid_out_by_hand():
    # Nine tokens less two of the question and three special ones leave room for four of the text's
    # ten; each window begins three later: 0 to 3, 3 to 6, 6 to 9.
    windows = make_windows(asked(("t4 t5", 12)), VOCABULARY, max_length=9, stride=3)
    assert rows(windows) == [
        [CLS, 5, 6, SEP, 10, 11, 12, 13, SEP],
        [CLS, 5, 6, SEP, 13, 14, 15, 16, SEP],
        [CLS, 5, 6, SEP, 16, 17, 18, 19, SEP],
    ]
    assert windows.segment_b_start.tolist() == [4, 4, 4]
    # t4 and t5 are tokens 5 and 6 of the second window; the others have no answer.
    assert (windows.starts.tolist(), windows.ends.tolist()) == ([0, 5, 0], [0, 6, 0])
    assert windows.first_piece.tolist() == [0, 3, 6]


LOST = "warning: set.json: no window contains the whole answer to 1 question, so"


def test_where_an_answer_stands():
    for answers, starts, ends in (
        # In two windows: last of the first window, first of the second.
        ([("t3", 9)], [7, 4, 0], [7, 4, 0]),
        # t2 to t5 needs four tokens of one window, which begin at 0, 3 and 6.
        ([("t2 t3 t4 t5", 6)], [0, 0, 0], [0, 0, 0]),
        ([], [0, 0, 0], [0, 0, 0]),  # impossible: no answer to lose
        ([("t1", 3), ("t0 t1", 0)], [5, 0, 0], [5, 0, 0]),  # of several, the first is trained
        # Half a word is its token: "2 t" touches t2 and t3, of both one character.
        ([("2 t", 7)], [6, 0, 0], [7, 0, 0]),
    ):
        windows = make_windows(asked(*answers), VOCABULARY, max_length=9, stride=3)
        assert (windows.starts.tolist(), windows.ends.tolist()) == (starts, ends)
        is_lost = bool(answers) and not any(starts)
        assert [each.startswith(LOST) for each in windows.remarks] == [True] * is_lost


def test_tokens_of_an_answer():
    for text, answer, token in (
        # t0 ( t1 ) without spaces: tokens 3 to 6 behind [CLS] who [SEP]; none beside t1 is of it.
        ("t0(t1)", ("t1", 3), 5),
        ("t0 \u00ad t1", ("\u00ad", 3), 0),  # a soft hyphen is dropped by cleaning: no token
    ):
        questions = questions_of((text, [qa("q", "who", answer)]))
        windows = make_windows(questions, vocabulary_of("who", "t0", "t1", "(", ")"))
        assert (windows.starts.tolist(), windows.ends.tolist()) == ([token], [token])
        assert bool(windows.remarks) == (token == 0)


def test_long_questions_are_cut_and_texts_without_tokens_have_a_window():
    questions = questions_of(
        (TEXT, [qa("q1", "who " + "leads " * 90), qa("q2", "who leads", ("t9", 27))]),
        ("\u00ad", [qa("q3", "who")]),
    )
    windows = make_windows(questions, VOCABULARY)
    first, second, third = rows(windows)
    assert first[:66] == [CLS, 5, *[6] * 63, SEP]
    assert second[:4] == [CLS, 5, 6, SEP] and third == [CLS, 5, SEP, SEP]
    assert windows.question_of.tolist() == [0, 1, 2]
    assert windows.starts.tolist() == [0, 13, 0]  # [CLS] who leads [SEP] t0 ... t9: 4 + 9


def test_lengths_that_leave_no_text_are_refused():
    assert len(make_windows(asked(), VOCABULARY, max_length=6, stride=1)) == 10
    with pytest.raises(
        ConfigError, match="--max-length: is 5, but question 'q' needs at least 6 tokens"
    ):
        make_windows(asked(), VOCABULARY, max_length=5)


@given(
    texts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=3),
    max_length=st.integers(5, 30),
    stride=st.integers(1, 40),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_every_window_is_what_it_says(texts, max_length, stride, data):
    paragraphs = []
    for number, text in enumerate(texts):
        first = data.draw(st.integers(0, len(text) - 1))
        last = data.draw(st.integers(first, len(text) - 1))
        answer = (" ".join(f"t{word}" for word in text[first : last + 1]), 3 * first)
        context = " ".join(f"t{word}" for word in text)
        paragraphs.append((context, [qa(f"q{number}", "who", answer)]))
    questions = questions_of(*paragraphs)
    windows = make_windows(questions, VOCABULARY, max_length=max_length, stride=stride)
    assert windows.lengths.max() <= max_length
    seen = [set() for _ in texts]
    is_held = [False] * len(texts)
    different = list(dict.fromkeys(map(tuple, texts)))  # whose pieces stand end to end
    begins = np.cumsum([0, *map(len, different)])
    for number, row in enumerate(rows(windows)):
        question = int(windows.question_of[number])
        text = tuple(texts[question])
        first = int(windows.first_piece[number] - begins[different.index(text)])
        words = [10 + word for word in text[first : first + len(row) - 4]]
        assert row == [CLS, 5, SEP, *words, SEP]
        seen[question] |= set(range(first, first + len(words)))
        start, end = int(windows.starts[number]), int(windows.ends[number])
        if start:
            pieces = windows.first_piece[number] + np.array([start, end]) - 3
            characters = slice(windows.piece_starts[pieces[0]], windows.piece_ends[pieces[1]])
            assert questions[question].context[characters] == questions[question].answers[0].text
            is_held[question] = True
        else:
            assert end == 0
    assert seen == [set(range(len(text))) for text in texts]
    lost = is_held.count(False)
    assert [f" whole answer to {lost} question" in each for each in windows.remarks] == [True] * (
        lost > 0
    )


@pytest.fixture(scope="module")
def sets():
    return {name: read_questions(QUICK / f"{name}.json") for name in ("train", "dev")}


def test_the_quick_set_has_every_kind_shares_nothing_and_can_be_answered(sets):
    every = [*sets["train"], *sets["dev"]]
    assert len(every) >= 60
    assert 3 * sum(question.is_impossible for question in every) == len(every)
    for part in ("id", "context", "question"):
        train, dev = ({getattr(each, part) for each in sets[name]} for name in ("train", "dev"))
        assert not train & dev
    for questions in sets.values():
        assert any(len(question.answers) > 1 for question in questions)
        windows = make_windows(questions, words_of(questions), max_length=64, stride=16)
        assert len(windows) > len(questions) and not windows.remarks
        # A window without the answer says so; what another window found must outweigh it.
        scores = np.zeros((len(windows.input_ids), 2))
        for column, places in enumerate((windows.starts, windows.ends)):
            scores[windows.offsets[:-1] + places, column] = 1
        scores[windows.offsets[:-1]] *= 0.5
        scored = score(questions, texts(questions, find_answers(questions, windows, scores)))["all"]
        assert (scored["exact_match"], scored["f1"]) == (100.0, 100.0)


def texts_of(questions):
    """Every context and question."""
    return [text for each in questions for text in (each.context, each.question)]


def words_of(questions):
    """A vocabulary of all their words."""
    words = {word: None for text in texts_of(questions) for word in basic_words(text)}
    return vocabulary_of(*words)


def pieces_of(texts):
    """A vocabulary in which each of the words is whole, in two pieces or in single letters."""
    found = {}
    for number, word in enumerate(sorted({w for text in texts for w in basic_words(text)})):
        half = len(word) // 2 or 1
        pieces = ([word], [word[:half], word[half:]], list(word))[number % 3]
        found |= {pieces[0]: None} | {f"##{piece}": None for piece in pieces[1:] if piece}
    return vocabulary_of(*found)


OTHERS = [
    "The model reads the text.",
    "A node, two nodes: a cluster!",
    "Café au lait 漢字.",
    "ÉTÉ, Ångström; naïve (İstanbul) ΣΟΦός",
    "no\u00adde\u200d node",  # invisible ones inside and after a word
    "「漢字」 a_b $5 50% [SEP]\u00a0x\ty",
]


def test_word_pieces_are_those_of_prepare(sets):
    texts = OTHERS + texts_of([*sets["train"], *sets["dev"]])
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

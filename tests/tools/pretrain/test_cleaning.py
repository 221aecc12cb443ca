"""Cleaning of own text: what is kept of text in any language."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from bert_tools.pretrain.cleaning import (
    MIN_CHARS,
    SENTENCE_CHARS,
    any_sentences,
    clean_document,
    clean_paragraph,
)

LONG = "enough letters to be kept as a document of its own"


def test_paragraphs():
    for text, expected in (
        ("e\u0301t\u00e9", "\u00e9t\u00e9"),
        ("a\u00adb\u200bc\ufeff\x00\x07d", "abcd"),
        ("a\u00a0\u3000\t\r\n\x0b\x85\u2028 b", "a b"),
        ("\u200e\u202etext\u202c", "text"),
        ("\u0645\u06cc\u200c\u062e\u0648", "\u0645\u06cc\u200c\u062e\u0648"),
        ("half \ud800 pair \ufffe", "half pair"),
    ):
        assert clean_paragraph(text) == expected


@given(st.text(st.characters(exclude_categories=())))
def test_a_cleaned_paragraph_is_clean(text):
    cleaned = clean_paragraph(text)
    cleaned.encode("utf-8")
    assert cleaned == " ".join(cleaned.split())
    assert all(unicodedata.category(char) not in {"Cc", "Cs", "Zl", "Zp"} for char in cleaned)


def test_sentences_of_several_scripts():
    for text, expected in (
        ("One. Two! three? Four", ["One.", "Two! three?", "Four"]),
        (
            "これは文です。次です。「はい。」終わり",
            ["これは文です。", "次です。", "「はい。」", "終わり"],
        ),
        ("यह वाक्य है। दूसरा।", ["यह वाक्य है।", "दूसरा।"]),
        ("هذه جملة. وهذه أخرى؟ نعم", ["هذه جملة.", "وهذه أخرى؟", "نعم"]),
        ("Dr. Wang sah ihn. Äpfel fielen.", ["Dr. Wang sah ihn.", "Äpfel fielen."]),
    ):
        assert list(any_sentences(text)) == expected


@given(st.text(st.sampled_from("ab .。\u4e00"), max_size=3000))
def test_sentences_are_short_and_lose_nothing(text):
    found = list(any_sentences(clean_paragraph(text)))
    assert all(0 < len(sentence) <= SENTENCE_CHARS for sentence in found)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")


def test_documents_are_left_out_for_a_reason():
    half_marks = "\u0915\u093f" * (MIN_CHARS // 2)
    for kept in ("a" * MIN_CHARS, "\u4e00" * MIN_CHARS, half_marks, LONG + "."):
        assert clean_document([kept]) == ([kept], {})
    for text, reason, characters in (
        ("a" * (MIN_CHARS - 1), "too short", MIN_CHARS - 1),
        ("12 34 | 56 " * 20, "few letters", 219),
        ("ab\ufffd " * 20, "not UTF-8", 80),
        (" \n", "too short", 0),
    ):
        assert clean_document([text]) == ([], {reason: characters})
    assert clean_document([LONG * 30 + "\ufffd"])[1] == {}


def test_pieces_end_sentences_and_are_judged_by_themselves():
    assert clean_document(["A title", LONG]) == (["A title", LONG], {})
    markdown = f"{LONG}\nwrapped.\n## Heading\n- an item\n  goes on\n* another\n12. third"
    pieces = [f"{LONG} wrapped.", "## Heading", "- an item goes on", "* another", "12. third"]
    table = "| name | time |\n|---|---|\n| first | 12.5 |\n| 3 | 1,250,000 | 17 | 22.5 |"
    code = "```python\nfor name in names:\n    print(name)\n```"
    rows = ["| name | time |", "| first | 12.5 |", "```python for name in names: print(name)"]
    left_out = len("|---|---|") + len("| 3 | 1,250,000 | 17 | 22.5 |") + len("```")
    assert clean_document([markdown, table, code]) == ([*pieces, *rows], {"few letters": left_out})

"""Sentences: what ends one."""

import pytest

from mlperf_bert.prepare.documents import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("He left. then came back.", ["He left. then came back."]),
        ("Mr. Smith met Dr. Jones. They spoke.", ["Mr. Smith met Dr. Jones.", "They spoke."]),
        ("J. R. Miller wrote it. We read it.", ["J. R. Miller wrote it.", "We read it."]),
        ("The U.S. Army came. It left.", ["The U.S. Army came.", "It left."]),
        ("So do I. You do too.", ["So do I.", "You do too."]),
        ('He said "No." "Why?" she asked.', ['He said "No."', '"Why?" she asked.']),
        ("It works (mostly.) Next one.", ["It works (mostly.)", "Next one."]),
        ("See no. 5 and et al. 2019 there.", ["See no. 5 and et al. 2019 there."]),
        ("Apples, pears, etc. The end.", ["Apples, pears, etc.", "The end."]),
        ("e.g. Python. 3 of them.", ["e.g. Python.", "3 of them."]),
        ("Pi is 3.14 or so. Version 1.2.3 is out.", ["Pi is 3.14 or so.", "Version 1.2.3 is out."]),
        ("Wait... What? Élan.", ["Wait...", "What?", "Élan."]),
        ("  spaced \n out.\tYes.  ", ["spaced out.", "Yes."]),
        ("", []),
        (" \n ", []),
    ],
)
def test_rule(text, sentences):
    assert split_sentences(text) == sentences


def test_no_text_is_lost():
    text = 'A b. C d? "E f!" (G h.) 4 i. j k. Mr. L... M'
    assert " ".join(split_sentences(text)) == text

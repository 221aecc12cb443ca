"""Splitting English prose into sentences by a small fixed rule.

A sentence ends at `.`, `!` or `?` (one or more), with any closing quotes and brackets after it,
when white space follows and then an upper-case letter, a digit or an opening quote or bracket. A
full stop does not end a sentence after a known abbreviation (Mr., e.g., vs.) or after a single
letter (an initial such as `J. Smith`, or `U.S.`), unless that letter is `I`.
"""

import re

_ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|st|sr|jr|gen|col|capt|lt|rev|hon|vol|fig|eq|sec|ch|pp|ed|eds|cf|vs"
    "|e\\.g|i\\.e|approx|dept|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
# These end sentences as well ("apples, pears, etc. The next ..."), so they hold together only with
# what can hardly start one: a digit ("no. 5", "et al. 2019").
_ABBREVIATION_OR_END = re.compile("etc|no|inc|ltd|co|corp|al", re.IGNORECASE)
_CANDIDATE = re.compile(r"""([.!?]+)(["'\u2019\u201d)\]]*)\s+(?=["'\u2018\u201c(\[]*[^\W_a-z])""")
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018]+$")


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, stripped, white space within each made single; none is empty."""
    text = " ".join(text.split())
    sentences = []
    start = 0
    for match in _CANDIDATE.finditer(text):
        if _ends_here(text, start, match):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    following = text[match.end() :].lstrip("\"'\u2018\u201c([")[:1]
    if not (following.isupper() or following.isdigit()):
        return False
    if match.group(1) != ".":
        return True
    found = _LAST_WORD.search(text[start : match.start()])
    word = found.group() if found else ""
    if _ABBREVIATION_OR_END.fullmatch(word):
        return not following.isdigit()
    if _ABBREVIATION.fullmatch(word):
        return False
    last_part = word.rpartition(".")[2]
    return not (len(last_part) == 1 and last_part.isalpha() and last_part != "I")

"""How much longer the steps of a tokenizer file can make a text, told from the file alone.

The `tokenizers` package runs every step that a file names. Each ByteLevel step writes a byte of
0x80 or above as a character of two such bytes, so that thirty of them make a terabyte of one "é";
where that package gets no memory it ends the process. Such files are refused before.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

MOST_GROWTH = 256
# Worst factors, in bytes of UTF-8, of steps that always do the same: one of each is in files in
# use and is free, further ones count. Kinds that are not here (Split, Digits, ...) add nothing.
_FIXED = {
    "ByteLevel": 4,  # a byte as two, and a space before each piece
    "Metaspace": 8,  # a space as a character of up to four bytes, and one before each piece
    "BertNormalizer": 3,  # spaces around Chinese characters, accents decomposed
    "Lowercase": 2,
    "NFC": 3,  # the four normal forms: tables of Unicode's UAX 15, section 12
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
}
_WITHOUT_TYPE = max(_FIXED.values())  # the package guesses the kind of a step that names none


def growth(values: dict[str, Any]) -> float:
    """How many times longer a text can get, beside what one step of each fixed kind does.

    Args:
        values: a whole tokenizer file, whose members may be anything.
    """
    product, seen = 1.0, set()
    for step in _steps([values.get("normalizer"), values.get("pre_tokenizer")]):
        product *= _factor(step)
        kind = step.get("type")
        if not isinstance(kind, str):
            kind = None
        if kind in seen:
            product *= _FIXED.get(kind, 1) if kind else _WITHOUT_TYPE
        seen.add(kind)
    return product


def _steps(value: object) -> Iterator[dict[str, Any]]:
    """Every object inside a value, however nested; not what a step looks for, which is no step."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += (inner for key, inner in each.items() if key != "pattern")
            yield each


def _factor(step: dict[str, Any]) -> float:
    """Of a step whose effect is written in it, whatever its name: texts that it puts in."""
    factor = 1.0
    content = step.get("content")
    if isinstance(content, str):
        pattern = step.get("pattern")
        found = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(found, str) and found:
            factor = max(1.0, _num_bytes(content) / _num_bytes(found))
        else:  # an expression may match nothing, between any two characters
            factor = 1.0 + _num_bytes(content)
    prepended = step.get("prepend")
    if isinstance(prepended, str):
        factor *= 1.0 + _num_bytes(prepended)
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        factor *= _longest_entry(charsmap)
    return factor


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _longest_entry(charsmap: str) -> int:
    """Bytes of the longest replacement in a character map of SentencePiece; at least 1.

    The map is the size of its tree (four bytes, little endian), the tree, and all replacements,
    each ended by a zero byte.
    """
    try:
        contents = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # the package refuses it
    texts = contents[4 + int.from_bytes(contents[:4], "little") :]
    return max(1, max(map(len, texts.split(b"\0"))))

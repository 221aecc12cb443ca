"""Decompresses Snappy's raw format, in which TensorFlow keeps blocks that become smaller by it.

Source: the format's description (https://github.com/google/snappy, format_description.txt): the
size as a varint, then elements, each a literal or a copy of bytes that came before.
"""

import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import varint
from mlperf_bert.common.compiled import compiled

_WELL, _CUT_SHORT, _TOO_MUCH, _TOO_FAR_BACK = 0, 1, 2, 3
_PROBLEMS = {
    _CUT_SHORT: "has compressed data that is cut short",
    _TOO_MUCH: "has compressed data that is not of the size it says",
    _TOO_FAR_BACK: "has compressed data that copies what is not there",
}


def decompress(compressed: NDArray[np.uint8], max_bytes: int) -> NDArray[np.uint8]:
    """The bytes that were compressed.

    Raises ValueError where they are damaged or more than `max_bytes`, before that many are made.
    """
    size, start = varint(compressed.data, 0)
    if size > max_bytes:
        raise ValueError(f"has compressed data that says it has more than {max_bytes:,} bytes")
    found = np.zeros(size, np.uint8)
    problem = _decompress(compressed, start, found)
    if problem != _WELL:
        raise ValueError(_PROBLEMS[problem])
    return found


@compiled
def _decompress(source: NDArray[np.uint8], place: int, found: NDArray[np.uint8]) -> int:
    """Fill `found` from the elements at `place`. Compiled code checks no bounds: this does."""
    filled = 0
    while place < len(source):
        place, count, back = _element(source, place)
        if place > len(source) or (back == 0 and count > len(source) - place):
            return _CUT_SHORT
        if count > len(found) - filled:
            return _TOO_MUCH
        if back > filled or back < 0:
            return _TOO_FAR_BACK
        if back == 0:
            for i in range(count):
                found[filled + i] = source[place + i]
            place += count
        else:
            for i in range(count):  # byte by byte: what is copied may be what was just written
                found[filled + i] = found[filled - back + i]
        filled += count
    return _WELL if filled == len(found) else _TOO_MUCH


@compiled
def _element(source: NDArray[np.uint8], place: int) -> tuple[int, int, int]:
    """The place after an element's tag, its bytes, and from how far back they are copied.

    Back is zero for a literal, whose bytes follow, and -1 for a copy from nowhere. The place may be
    beyond the end: then the element is cut short.
    """
    tag = int(source[place])
    kind = tag & 3
    # How many bytes of a number follow the tag: of a literal's size, or how far back to copy.
    extra = kind
    if kind == 3:
        extra = 4
    elif kind == 0:
        extra = max(0, (tag >> 2) - 59)
    number = 0
    for i in range(min(extra, len(source) - place - 1)):
        number |= int(source[place + 1 + i]) << 8 * i
    place += 1 + extra
    if kind == 0:
        return place, number + 1 if extra else (tag >> 2) + 1, 0
    if kind == 1:
        return place, (tag >> 2 & 7) + 4, (tag >> 5 << 8 | number) or -1
    return place, (tag >> 2) + 1, number or -1

"""Samples as bytes on the wire: real tokens only, in the narrowest types that hold them.

A packet is a header, then the arrays of `_FIELDS` one after the other; packets may follow each
other. Received `Samples` are views of the bytes, in the types of the wire. Shape letters: n
samples, T tokens of all of them, P masked positions of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import Samples

Bytes = NDArray[np.uint8]

SIZE_BYTES = 8  # bytes that announce a message

_HEADER_COUNT = 4  # int64: n, T, P, bytes of a token
_HEADER_BYTES = 8 * _HEADER_COUNT
_TOKEN = "token"  # stands for the vocabulary's token type

# Array -> place in the header of its number of elements, and its type on the wire.
_FIELDS: dict[str, tuple[int, str]] = {
    "input_ids": (1, _TOKEN),
    "masked_ids": (2, _TOKEN),
    "lengths": (0, "<u2"),
    "segment_b_start": (0, "<u2"),
    "masked_positions": (2, "<u2"),
    "masked_counts": (0, "<u2"),
    "next_sentence_label": (0, "|u1"),
}


def narrowed(samples: Samples, token: np.dtype[Any]) -> Samples:
    """Samples in the types of the wire; `token` is `vocabulary.word_pieces.token_dtype`'s."""
    return _made_of(lambda name: getattr(samples, name).astype(_dtype(name, token)))


def pack(samples: Samples) -> Bytes:
    """Narrowed samples as the bytes of one packet."""
    sizes = [len(samples.lengths), len(samples.input_ids), len(samples.masked_ids)]
    header = np.array([*sizes, samples.input_ids.dtype.itemsize], dtype="<i8")
    arrays = [getattr(samples, name) for name in _FIELDS]
    return np.concatenate([array.view(np.uint8) for array in (header, *arrays)])


def unpack(received: Bytes) -> list[Samples]:
    """The consecutive packets in some bytes, as views of them."""
    packets = []
    while len(received):
        *sizes, token_bytes = received[:_HEADER_BYTES].view("<i8").tolist()
        arrays, start = {}, _HEADER_BYTES
        for name, (of, _) in _FIELDS.items():
            kind = _dtype(name, np.dtype(f"<u{token_bytes}"))
            stop = start + sizes[of] * kind.itemsize
            arrays[name] = received[start:stop].view(kind)
            start = stop
        packets.append(Samples(**arrays))
        received = received[start:]
    return packets


def join(parts: Sequence[Samples]) -> Samples:
    """The samples of one or more parts together."""
    return _made_of(lambda name: np.concatenate([getattr(part, name) for part in parts]))


def take(samples: Samples, places: Int64Array) -> Samples:
    """The samples at `places`, int64 [m], in their order."""
    tokens, masked = _rows(samples.lengths, places), _rows(samples.masked_counts, places)
    index = (places, tokens, masked)
    return _made_of(lambda name: getattr(samples, name)[index[_FIELDS[name][0]]])


def split(samples: Samples, counts: Int64Array) -> list[Samples]:
    """Split consecutive samples into parts of `counts` samples each."""
    spans = zip(np.cumsum(counts) - counts, np.cumsum(counts), strict=True)
    return [take(samples, np.arange(start, stop)) for start, stop in spans]


def gathered_bytes(lengths: NDArray[Any], masked_counts: NDArray[Any], token: np.dtype[Any]) -> int:
    """Bytes that each of G ranks receives from the others in one step of an exchange.

    Both arrays come from the index, [G, A, b]: samples that the ranks of one group drew for A
    micro-batches. The group's messages are padded to the largest (data/exchange.py); SIZE_BYTES
    from each rank announce its size.
    """
    num_ranks, micro_batches, each = lengths.shape
    sizes = (
        micro_batches * each,
        *(array.sum(axis=(1, 2), dtype=np.int64) for array in (lengths, masked_counts)),
    )
    total = np.full(num_ranks, micro_batches * _HEADER_BYTES)
    for name, (of, _) in _FIELDS.items():
        total += sizes[of] * _dtype(name, token).itemsize
    return int((num_ranks - 1) * (total.max() + SIZE_BYTES))


def _dtype(name: str, token: np.dtype[Any]) -> np.dtype[Any]:
    dtype = _FIELDS[name][1]
    return token if dtype == _TOKEN else np.dtype(dtype)


def _made_of(array: Callable[[str], NDArray[Any]]) -> Samples:
    return Samples(**{name: array(name) for name in _FIELDS})


def _rows(counts: NDArray[Any], places: Int64Array) -> Int64Array:
    """Indices of the elements of the samples at `places`; a sample has `counts` elements."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[places].astype(np.int64)
    before = np.cumsum(taken) - taken
    rows: Int64Array = np.arange(taken.sum()) + np.repeat(starts[places] - before, taken)
    return rows

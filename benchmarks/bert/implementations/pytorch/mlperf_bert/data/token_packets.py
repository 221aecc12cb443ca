"""Encode samples as messages that contain only real tokens, in the smallest sufficient dtypes.

A packet is a header followed by the arrays of `_FIELDS`. A message may contain several packets.
Received `Samples` are views of the message's bytes and keep these dtypes.

Shape letters: n samples, T tokens in total, P masked positions in total.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import Samples

Bytes = NDArray[np.uint8]

SIZE_BYTES = 8  # bytes that announce the size of a message

_HEADER_COUNT = 4  # int64 numbers: n, T, P and the bytes per token id
_HEADER_BYTES = 8 * _HEADER_COUNT
_TOKEN = "token"  # placeholder for the dtype of a token id

# Array name -> index in the header of its number of elements, and its dtype in messages.
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
    """Convert samples to the dtypes used in messages, with token ids of dtype `token`."""
    return _make_samples(lambda name: getattr(samples, name).astype(_dtype(name, token)))


def pack(samples: Samples) -> Bytes:
    """Encode the results of `narrowed` as one packet."""
    sizes = [len(samples.lengths), len(samples.input_ids), len(samples.masked_ids)]
    header = np.array([*sizes, samples.input_ids.dtype.itemsize], dtype="<i8")
    arrays = [getattr(samples, name) for name in _FIELDS]
    return np.concatenate([array.view(np.uint8) for array in (header, *arrays)])


def unpack(received: Bytes) -> list[Samples]:
    """Decode all packets of a message as views of its bytes."""
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
    """Concatenate one or more `Samples`, in order."""
    return _make_samples(lambda name: np.concatenate([getattr(part, name) for part in parts]))


def take(samples: Samples, indices: Int64Array) -> Samples:
    """Return the samples at `indices`, int64 [m], in the order of the indices."""
    tokens, masked = _rows(samples.lengths, indices), _rows(samples.masked_counts, indices)
    by_field = (indices, tokens, masked)
    return _make_samples(lambda name: getattr(samples, name)[by_field[_FIELDS[name][0]]])


def split(samples: Samples, counts: Int64Array) -> list[Samples]:
    """Split samples into consecutive parts. Part i contains `counts[i]` samples."""
    spans = zip(np.cumsum(counts) - counts, np.cumsum(counts), strict=True)
    return [take(samples, np.arange(start, stop)) for start, stop in spans]


def gathered_bytes(lengths: NDArray[Any], masked_counts: NDArray[Any], token: np.dtype[Any]) -> int:
    """Return the number of bytes that a rank receives from others in one step of an exchange.

    The number is the same for each of the G ranks of a group. Both arrays contain numbers from the
    index, [G, A, b], for the samples drawn for the group's ranks and their A micro-batches.
    Messages are padded to the size of the group's largest message (data/exchange.py). In addition,
    each rank sends SIZE_BYTES to announce the size of its message.
    """
    num_ranks, micro_batches, batch_size = lengths.shape
    sizes = (
        micro_batches * batch_size,
        *(array.sum(axis=(1, 2), dtype=np.int64) for array in (lengths, masked_counts)),
    )
    total = np.full(num_ranks, micro_batches * _HEADER_BYTES)
    for name, (of, _) in _FIELDS.items():
        total += sizes[of] * _dtype(name, token).itemsize
    return int((num_ranks - 1) * (total.max() + SIZE_BYTES))


def _dtype(name: str, token: np.dtype[Any]) -> np.dtype[Any]:
    dtype = _FIELDS[name][1]
    return token if dtype == _TOKEN else np.dtype(dtype)


def _make_samples(array: Callable[[str], NDArray[Any]]) -> Samples:
    return Samples(**{name: array(name) for name in _FIELDS})


def _rows(counts: NDArray[Any], indices: Int64Array) -> Int64Array:
    """Return the indices of all elements that belong to the samples at `indices`.

    Sample i has `counts[i]` elements, which are stored one sample after the other.
    """
    starts = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[indices].astype(np.int64)
    before = np.cumsum(taken) - taken
    rows: Int64Array = np.arange(taken.sum()) + np.repeat(starts[indices] - before, taken)
    return rows

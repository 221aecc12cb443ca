"""Samples as bytes on the wire: real tokens only, in the narrowest types that hold them.

A packet is a header, then the arrays of `_FIELDS` one after the other; packets may follow each
other. Shape letters: n samples, T tokens of all of them, P masked positions of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import Samples

Bytes = NDArray[np.uint8]

SIZE_BYTES = 8  # that announce a message

_HEADER_COUNT = 4  # int64: n, T, P, bytes of a token
_HEADER_BYTES = 8 * _HEADER_COUNT
_TOKEN = "token"  # stands for the type of the vocabulary

# Array -> what it holds one element of (place in the header), and its type on the wire.
_FIELDS: dict[str, tuple[int, str]] = {
    "input_ids": (1, _TOKEN),
    "masked_ids": (2, _TOKEN),
    "lengths": (0, "<u2"),
    "segment_b_start": (0, "<u2"),
    "masked_positions": (2, "<u2"),
    "masked_counts": (0, "|u1"),  # as in the index, which holds at most 255
    "next_sentence_label": (0, "|u1"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The arrays of `Samples` in the types of the wire; they may be views of received bytes."""

    input_ids: NDArray[Any]  # [T]
    masked_ids: NDArray[Any]  # [P]
    lengths: NDArray[np.uint16]  # [n]
    segment_b_start: NDArray[np.uint16]  # [n]
    masked_positions: NDArray[np.uint16]  # [P]
    masked_counts: NDArray[np.uint8]  # [n]
    next_sentence_label: NDArray[np.uint8]  # [n]

    def samples(self) -> Samples:
        """The samples in the types that batches are made of."""
        return Samples(**{name: getattr(self, name).astype(np.int64) for name in _FIELDS})

    def take(self, places: Int64Array) -> "Packet":
        """The samples at `places`, int64 [m], in their order."""
        tokens = _rows(self.lengths, places)
        masked = _rows(self.masked_counts, places)
        index = {0: places, 1: tokens, 2: masked}
        return Packet(**{name: getattr(self, name)[index[of]] for name, (of, _) in _FIELDS.items()})

    def split(self, counts: Int64Array) -> list["Packet"]:
        """Neighbouring samples in parts of `counts` samples each."""
        stops = np.cumsum(counts)
        return [
            self.take(np.arange(stop - count, stop))
            for stop, count in zip(stops, counts, strict=True)
        ]

    def to_bytes(self) -> Bytes:
        """The packet as it travels, uint8 [`packet_bytes`]."""
        sizes = [len(self.lengths), len(self.input_ids), len(self.masked_ids)]
        header = np.array([*sizes, self.input_ids.dtype.itemsize], dtype="<i8")
        arrays = [getattr(self, name) for name in _FIELDS]
        return np.concatenate([array.view(np.uint8) for array in (header, *arrays)])


def token_dtype(vocab_size: int) -> str:
    """The type of a token on the wire: uint16 where the vocabulary allows it, else uint32."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def to_packet(samples: Samples, token: str) -> Packet:
    """Samples in the types of the wire; `token` is `token_dtype`'s."""
    return Packet(
        **{
            name: getattr(samples, name).astype(token if dtype == _TOKEN else dtype)
            for name, (_, dtype) in _FIELDS.items()
        }
    )


def pack(samples: Samples, token: str) -> Bytes:
    """Samples as the bytes of one packet; `token` is `token_dtype`'s."""
    return to_packet(samples, token).to_bytes()


def unpack(received: Bytes) -> list[Packet]:
    """The packets that follow each other in some bytes, as views of them."""
    packets = []
    while len(received):
        *sizes, token_bytes = received[:_HEADER_BYTES].view("<i8").tolist()
        arrays, start = {}, _HEADER_BYTES
        for name, (of, dtype) in _FIELDS.items():
            kind = np.dtype(f"<u{token_bytes}" if dtype == _TOKEN else dtype)
            stop = start + sizes[of] * kind.itemsize
            arrays[name] = received[start:stop].view(kind)
            start = stop
        packets.append(Packet(**arrays))
        received = received[start:]
    return packets


def join(packets: Sequence[Packet]) -> Packet:
    """The samples of one or more packets as one packet."""
    return Packet(
        **{name: np.concatenate([getattr(packet, name) for packet in packets]) for name in _FIELDS}
    )


def packet_bytes(lengths: NDArray[Any], masked_counts: NDArray[Any], token: str) -> Int64Array:
    """Bytes of packets of [..., n] samples each, from the two arrays of the index: int64 [...]."""
    sizes = (
        np.full(lengths.shape[:-1], lengths.shape[-1]),
        lengths.sum(axis=-1, dtype=np.int64),
        masked_counts.sum(axis=-1, dtype=np.int64),
    )
    total = np.full(lengths.shape[:-1], _HEADER_BYTES, dtype=np.int64)
    for of, dtype in _FIELDS.values():
        total += sizes[of] * np.dtype(token if dtype == _TOKEN else dtype).itemsize
    return total


def gathered_bytes(lengths: NDArray[Any], masked_counts: NDArray[Any], token: str) -> int:
    """Bytes that each of G ranks receives from the others in one step of an exchange.

    Both arrays are [G, A, b]: what the ranks of one group drew for A forwards. The messages of a
    group are padded to its largest (data/exchange.py); SIZE_BYTES from each rank announce its size.
    """
    per_rank = packet_bytes(lengths, masked_counts, token).sum(axis=1)
    return int((len(per_rank) - 1) * (per_rank.max() + SIZE_BYTES))


def _rows(counts: NDArray[Any], places: Int64Array) -> Int64Array:
    """Where the elements of the samples at `places` are, `counts` elements a sample."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[places].astype(np.int64)
    before = np.cumsum(taken) - taken
    rows: Int64Array = np.arange(taken.sum()) + np.repeat(starts[places] - before, taken)
    return rows

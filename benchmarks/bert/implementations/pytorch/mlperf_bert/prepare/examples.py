"""Documents of token ids to masked examples, identical to the MLPerf reference's token by token.

Every draw from the random stream is made in the reference's order; the loops here may be arranged
otherwise but must never draw more, fewer or in another order.
"""

import array
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.prepare.vocabulary import Vocabulary

Document = list[list[int]]  # sentences of token ids, none empty


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleArrays:
    """n examples laid end to end: the contents of one shard."""

    input_ids: NDArray[Any]  # uint16 or uint32, flat
    offsets: NDArray[np.int64]  # [n + 1]
    segment_b_start: NDArray[np.uint16]  # [n]: 2 + tokens of segment A
    masked_lm_positions: NDArray[np.uint16]  # flat, ascending within an example
    masked_lm_ids: NDArray[Any]  # flat, the original tokens
    masked_lm_offsets: NDArray[np.int64]  # [n + 1]
    next_sentence_label: NDArray[np.uint8]  # [n], 1: segment B comes from another document

    def __len__(self) -> int:
        return len(self.segment_b_start)


class ExampleMaker:
    """One pass of the reference procedure over the documents of one text file."""

    def __init__(
        self, vocabulary: Vocabulary, *, max_seq_length: int, max_predictions: int, seed: int
    ) -> None:
        self._room = max_seq_length - 3
        self._max_predictions = max_predictions
        self._cls_id = vocabulary.cls_id
        self._sep_id = vocabulary.sep_id
        self._mask_id = vocabulary.mask_id
        self._last_id = len(vocabulary) - 1
        self._rng = random.Random(seed)
        token_code = "H" if len(vocabulary) <= 65_536 else "I"
        self._input_ids = array.array(token_code)
        self._masked_ids = array.array(token_code)
        self._positions = array.array("H")
        self._offsets = array.array("q", [0])
        self._masked_offsets = array.array("q", [0])
        self._starts_of_b = array.array("H")
        self._next_labels = array.array("B")

    def make(self, documents: list[Document], dupe_factor: int) -> ExampleArrays:
        """All examples, shuffled. Call once; needs two documents at least, each with a sentence."""
        documents = list(documents)
        self._rng.shuffle(documents)
        for _ in range(dupe_factor):
            for number in range(len(documents)):
                self._add_document(documents, number)
        order = list(range(len(self._next_labels)))
        self._rng.shuffle(order)  # same draws as shuffling the examples themselves
        return take_examples(self._collected(), order)

    def _collected(self) -> ExampleArrays:
        return ExampleArrays(
            input_ids=np.frombuffer(self._input_ids, dtype=self._input_ids.typecode),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            segment_b_start=np.frombuffer(self._starts_of_b, dtype=np.uint16),
            masked_lm_positions=np.frombuffer(self._positions, dtype=np.uint16),
            masked_lm_ids=np.frombuffer(self._masked_ids, dtype=self._masked_ids.typecode),
            masked_lm_offsets=np.frombuffer(self._masked_offsets, dtype=np.int64),
            next_sentence_label=np.frombuffer(self._next_labels, dtype=np.uint8),
        )

    def _add_document(self, documents: list[Document], number: int) -> None:
        rng = self._rng
        document = documents[number]
        target = self._room
        if rng.random() < 0.1:
            target = rng.randint(2, self._room)
        chunk: Document = []
        length = 0
        i = 0
        while i < len(document):
            chunk.append(document[i])
            length += len(document[i])
            if i == len(document) - 1 or length >= target:
                end_of_a = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                segment_a = _joined(chunk[:end_of_a])
                if len(chunk) == 1 or rng.random() < 0.5:
                    segment_b = self._other_segment(documents, number, target - len(segment_a))
                    i -= len(chunk) - end_of_a  # what was not used is walked again
                    self._add_example(segment_a, segment_b, 1)
                else:
                    self._add_example(segment_a, _joined(chunk[end_of_a:]), 0)
                chunk = []
                length = 0
            i += 1

    def _other_segment(self, documents: list[Document], number: int, wanted: int) -> list[int]:
        """Sentences of a random other document, `wanted` tokens at least where it has them."""
        for _ in range(10):
            other = self._rng.randint(0, len(documents) - 1)
            if other != number:
                break
        sentences = documents[other]
        segment: list[int] = []
        for sentence in sentences[self._rng.randint(0, len(sentences) - 1) :]:
            segment += sentence
            if len(segment) >= wanted:
                break
        return segment

    def _add_example(self, segment_a: list[int], segment_b: list[int], next_label: int) -> None:
        segment_a, segment_b = self._shortened(segment_a, segment_b)
        tokens = [self._cls_id, *segment_a, self._sep_id, *segment_b, self._sep_id]
        start_of_b = len(segment_a) + 2
        positions = self._masked_positions(len(tokens), start_of_b)
        random_number = self._rng.random
        labels = {}
        for position in positions:
            labels[position] = tokens[position]
            if random_number() < 0.8:
                tokens[position] = self._mask_id
            elif random_number() >= 0.5:
                tokens[position] = self._rng.randint(0, self._last_id)
        positions.sort()
        self._input_ids.extend(tokens)
        self._offsets.append(len(self._input_ids))
        self._positions.extend(positions)
        self._masked_ids.extend([labels[position] for position in positions])
        self._masked_offsets.append(len(self._positions))
        self._starts_of_b.append(start_of_b)
        self._next_labels.append(next_label)

    def _shortened(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        start_1, end_1, start_2, end_2 = 0, len(first), 0, len(second)
        for _ in range(len(first) + len(second) - self._room):
            from_front = self._rng.random() < 0.5
            if end_1 - start_1 > end_2 - start_2:
                if from_front:
                    start_1 += 1
                else:
                    end_1 -= 1
            elif from_front:
                start_2 += 1
            else:
                end_2 -= 1
        return first[start_1:end_1], second[start_2:end_2]

    def _masked_positions(self, num_tokens: int, start_of_b: int) -> list[int]:
        """The masked positions in the order drawn."""
        candidates = [*range(1, start_of_b - 1), *range(start_of_b, num_tokens - 1)]
        shuffle_in_place(candidates, self._rng)
        # round() is half to even, as in the reference.
        return candidates[: min(self._max_predictions, max(1, round(num_tokens * 0.15)))]


def shuffle_in_place(items: list[int], rng: random.Random) -> None:
    """`rng.shuffle(items)` with the same draws and result, written out to save its inner calls.

    CPython draws an index below n from the top bits of one 32-bit output, as many as n has, until
    it is below n. Here n runs down to 2, and the number of bits is kept per power of two.
    """
    getrandbits = rng.getrandbits
    last = len(items) - 1
    while last > 0:
        bits = (last + 1).bit_length()
        for i in range(last, max(1, (1 << (bits - 1)) - 1) - 1, -1):
            j = getrandbits(bits)
            while j > i:
                j = getrandbits(bits)
            items[i], items[j] = items[j], items[i]
        last = max(1, (1 << (bits - 1)) - 1) - 1


def take_examples(examples: ExampleArrays, order: Sequence[int]) -> ExampleArrays:
    """The examples numbered in `order`, in that order."""
    rows = np.asarray(order, dtype=np.int64)
    tokens, offsets = _gather(examples.input_ids, examples.offsets, rows)
    positions, masked_offsets = _gather(
        examples.masked_lm_positions, examples.masked_lm_offsets, rows
    )
    masked_ids, _ = _gather(examples.masked_lm_ids, examples.masked_lm_offsets, rows)
    return ExampleArrays(
        input_ids=tokens,
        offsets=offsets,
        segment_b_start=examples.segment_b_start[rows],
        masked_lm_positions=positions,
        masked_lm_ids=masked_ids,
        masked_lm_offsets=masked_offsets,
        next_sentence_label=examples.next_sentence_label[rows],
    )


def pick_evenly(examples: ExampleArrays, count: int) -> ExampleArrays:
    """Numbers int(i * n / count), i = 0 .. count - 1, of the n examples; needs n >= count."""
    total = len(examples)
    return take_examples(examples, [int(i * total / count) for i in range(count)])


def _gather(
    flat: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(offsets[rows + 1] - offsets[rows], out=new_offsets[1:])
    gathered = np.empty(new_offsets[-1], dtype=flat.dtype)
    starts, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
    for start, end, at in zip(starts, ends, new_offsets.tolist(), strict=False):
        gathered[at : at + end - start] = flat[start:end]
    return gathered, new_offsets


def _joined(sentences: Sequence[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]

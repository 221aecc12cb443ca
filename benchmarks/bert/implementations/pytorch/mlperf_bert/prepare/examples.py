"""Documents of token ids to masked examples, identical to the MLPerf reference's token by token."""

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled, usable_cache
from mlperf_bert.prepare.compiled_examples import (
    WORDS,
    Collected,
    Stream,
    Work,
    add_pass,
    nothing_collected,
    shuffle,
)
from mlperf_bert.prepare.documents import Documents
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.wordpiece import token_dtype


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
    """The reference procedure over the documents of one text file."""

    def __init__(
        self, vocabulary: AnyVocabulary, *, max_seq_length: int, max_predictions: int, seed: int
    ) -> None:
        self._vocabulary = vocabulary
        self._max_seq_length = max_seq_length
        self._max_predictions = max_predictions
        self._seed = seed

    def make(self, documents: Documents, dupe_factor: int) -> ExampleArrays:
        """All examples of `dupe_factor` passes, shuffled; needs two documents at least.

        The same arguments give the same examples. At its peak this holds the examples about
        twice: as they were made, and in their shuffled order. Ctrl-C waits for the end of a pass.
        """
        vocabulary = self._vocabulary
        work = Work(
            stream=new_stream(self._seed),
            tokens=documents.tokens,
            sentence_offsets=documents.sentence_offsets,
            document_offsets=documents.document_offsets,
            order=np.arange(len(documents)),
            candidates=np.empty(self._max_seq_length, dtype=np.int64),
            originals=np.full(self._max_seq_length, -1, dtype=np.int64),
            room=self._max_seq_length - 3,
            max_predictions=self._max_predictions,
            vocab_size=len(vocabulary),
            cls_id=vocabulary.cls_id,
            sep_id=vocabulary.sep_id,
            mask_id=vocabulary.mask_id,
        )
        found, count = nothing_collected(documents.tokens.dtype), 0
        shuffle(work.stream, work.order)
        for _ in range(dupe_factor):
            with interrupt_deferred():
                found, count = add_pass(work, found, count)
        order = np.arange(count)
        shuffle(work.stream, order)
        return take_examples(_used_part(found, count), order)


def compile_examples(vocabulary: AnyVocabulary) -> None:
    """Compile what `ExampleMaker.make` runs for this vocabulary, or load it from the cache.

    The first use after an installation takes about 5 s, later ones a fraction of a second.
    Raises ConfigError when the cache is damaged or cannot be written.
    """
    documents = Documents(
        tokens=np.zeros(2, dtype=token_dtype(len(vocabulary))),
        sentence_offsets=np.arange(3),
        document_offsets=np.arange(3),
    )
    maker = ExampleMaker(vocabulary, max_seq_length=8, max_predictions=1, seed=0)
    with usable_cache(add_pass):
        maker.make(documents, dupe_factor=1)


def new_stream(seed: int) -> Stream:
    """The state of `random.Random(seed)` as the compiled code carries it on, int64 [1249]."""
    *state, used = random.Random(seed).getstate()[1]
    assert used == WORDS  # a new generator has given nothing yet: its first output is made on use
    return np.array([*state, *[0] * WORDS, WORDS], dtype=np.int64)


def take_examples(examples: ExampleArrays, order: NDArray[np.int64]) -> ExampleArrays:
    """The examples numbered in `order`, in that order."""
    masked_offsets = examples.masked_lm_offsets
    with interrupt_deferred():
        tokens, offsets = _gather(examples.input_ids, examples.offsets, order)
        positions, new_masked_offsets = _gather(examples.masked_lm_positions, masked_offsets, order)
        masked_ids, _ = _gather(examples.masked_lm_ids, masked_offsets, order)
    return ExampleArrays(
        input_ids=tokens,
        offsets=offsets,
        segment_b_start=examples.segment_b_start[order],
        masked_lm_positions=positions,
        masked_lm_ids=masked_ids,
        masked_lm_offsets=new_masked_offsets,
        next_sentence_label=examples.next_sentence_label[order],
    )


def pick_evenly(examples: ExampleArrays, count: int) -> ExampleArrays:
    """Numbers int(i * n / count), i = 0 .. count - 1, of the n examples; needs n >= count."""
    total = len(examples)
    return take_examples(examples, np.array([int(i * total / count) for i in range(count)]))


def _used_part(found: Collected, count: int) -> ExampleArrays:
    num_tokens, num_masked = found.offsets[count], found.masked_offsets[count]
    return ExampleArrays(
        input_ids=found.tokens[:num_tokens],
        offsets=found.offsets[: count + 1],
        segment_b_start=found.starts_of_b[:count],
        masked_lm_positions=found.positions[:num_masked],
        masked_lm_ids=found.labels[:num_masked],
        masked_lm_offsets=found.masked_offsets[: count + 1],
        next_sentence_label=found.next_labels[:count],
    )


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Hold a Ctrl-C back: raised while numba boxes a result, it ends the process by a crash."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers run in the main thread only
        return
    arrived: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        signal.raise_signal(signal.SIGINT)  # now whatever was to happen


@compiled
def _gather(
    values: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The spans numbered in `rows`, laid end to end, and their offsets."""
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    for i in range(len(rows)):
        new_offsets[i + 1] = new_offsets[i] + offsets[rows[i] + 1] - offsets[rows[i]]
    gathered = np.empty(new_offsets[-1], values.dtype)
    for i in range(len(rows)):
        start = offsets[rows[i]]
        for at in range(new_offsets[i], new_offsets[i + 1]):
            gathered[at] = values[start + at - new_offsets[i]]
    return gathered, new_offsets

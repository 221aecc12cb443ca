"""Generate masked examples from documents of token ids, equal to those of MLPerf's reference.

The compiled functions come first: CPython's random number generator, a pass over the documents, the
examples of a document, one example, and growing arrays. The functions that call them follow. All
random numbers are drawn in the order of the reference. The compiled functions are all in one file
because of numba's cache (see compiled.py). Tests compare the results with tests/plain_examples.py,
which generates the same examples in plain Python.

The sentences of a document are stored end to end. A segment is therefore a span of the text's
tokens, and nothing is copied until an example is written.
"""

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from mlperf_bert.compiled import compiled
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare.documents import Documents
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

IntArray = NDArray[np.int64]
Span = tuple[int, int]  # start, end
# CPython's generator: 624 words of state, 624 words of output, and the number of used output words.
# The words have 32 bits, but the array is int64 [1249], because mixing shifts bits past the 32nd.
Stream = NDArray[Any]

WORDS = 624
USED = 2 * WORDS
_FIRST = (4096, 4096, 4096)  # examples, tokens, masked positions


class Work(NamedTuple):
    """Inputs and temporary arrays for D documents with N sentences and T tokens."""

    stream: Stream  # [1249], advanced by every draw
    tokens: NDArray[Any]  # [T]
    sentence_offsets: IntArray  # [N + 1] into tokens
    document_offsets: IntArray  # [D + 1] into sentences
    order: IntArray  # [D]: 0 .. D - 1, shuffled in place
    candidates: IntArray  # [max_seq_length], scratch: positions that may be masked
    originals: IntArray  # [max_seq_length], scratch: original token if masked, otherwise -1
    max_tokens: int  # of both segments together
    max_predictions: int
    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int


class Collected(NamedTuple):
    """Examples stored end to end, like `ShardArrays`, in arrays with unused space at the end."""

    input_ids: NDArray[Any]
    offsets: IntArray
    segment_b_start: NDArray[np.uint16]
    masked_lm_positions: NDArray[np.uint16]
    masked_lm_ids: NDArray[Any]
    masked_lm_offsets: IntArray
    next_sentence_label: NDArray[np.uint8]


def empty_examples(examples: int, tokens: int, masked: int, dtype: npt.DTypeLike) -> Collected:
    """Allocate arrays for the given numbers of examples, tokens and masked positions."""
    return Collected(
        np.empty(tokens, dtype),
        np.zeros(examples + 1, np.int64),
        np.empty(examples, np.uint16),
        np.empty(masked, np.uint16),
        np.empty(masked, dtype),
        np.zeros(examples + 1, np.int64),
        np.empty(examples, np.uint8),
    )


@compiled
def refill(stream: Stream) -> None:
    """Generate the next 624 words of the random number generator MT19937.

    The function updates the state and then computes the output words from it. Source: Matsumoto and
    Nishimura, 1998.
    """
    for i in range(WORDS):
        following = i + 1 if i + 1 < WORDS else 0
        distant = i + 397 if i + 397 < WORDS else i + 397 - WORDS
        mixed = (stream[i] & 0x80000000) | (stream[following] & 0x7FFFFFFF)
        stream[i] = stream[distant] ^ (mixed >> 1) ^ ((mixed & 1) * 0x9908B0DF)
    for i in range(WORDS):
        word = stream[i] ^ (stream[i] >> 11)
        word ^= (word << 7) & 0x9D2C5680
        word ^= (word << 15) & 0xEFC60000
        stream[WORDS + i] = word ^ (word >> 18)
    stream[USED] = 0


@compiled
def next_word(stream: Stream) -> int:
    """Return the next 32 random bits."""
    if stream[USED] == WORDS:
        refill(stream)
    stream[USED] += 1
    return int(stream[WORDS + stream[USED] - 1])


@compiled
def uniform(stream: Stream) -> float:
    """Return a random number in [0, 1) like Python's `random()`, from 53 random bits.

    The high bits are from the first random word.
    """
    high = next_word(stream) >> 5
    low = next_word(stream) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


@compiled
def between(stream: Stream, low: int, high: int) -> int:
    """Return a random integer like Python's `randint(low, high)`, which includes both ends.

    The range must have fewer than 2**32 integers. The function takes as many top bits of a random
    word as the size of the range has. This is repeated until the result is smaller than the size.
    """
    size = high - low + 1
    shift = 32
    while size >> (32 - shift):
        shift -= 1
    drawn = next_word(stream) >> shift
    while drawn >= size:
        drawn = next_word(stream) >> shift
    return low + drawn


@compiled
def shuffle(stream: Stream, items: IntArray) -> None:
    """Shuffle `items` in place like Python's `shuffle(items)`.

    From the last position down, each item is swapped with the item at position `between(0, last)`.
    Preparing data spends most of its time here, so the loop avoids an unpredictable branch. If a
    random number is too large, the item is swapped with itself, and the loop draws another number
    for the same position.
    """
    used = stream[USED]
    shift = 0
    last = len(items) - 1
    while last > 0:
        while not (last + 1) >> (31 - shift):
            shift += 1
        if used == WORDS:
            refill(stream)
            used = 0
        drawn = stream[WORDS + used] >> shift
        used += 1
        other = min(drawn, last)
        items[last], items[other] = items[other], items[last]
        last -= drawn <= last
    stream[USED] = used


@compiled
def add_pass(work: Work, found: Collected, count: int) -> tuple[Collected, int]:
    """Append the examples of one pass over all documents to the `count` existing examples.

    Returns the arrays, which may have been replaced by longer ones, and the new number of examples.
    """
    for number in range(len(work.order)):
        found, count = _add_document(work, number, found, count)
    return found, count


@compiled
def _add_document(work: Work, number: int, found: Collected, count: int) -> tuple[Collected, int]:
    """Append the examples of document `number` of the shuffled order to `count` existing ones.

    Returns the same as `add_pass`.
    """
    document = work.order[number]
    end = work.document_offsets[document + 1]
    offsets = work.sentence_offsets
    target = work.max_tokens
    if uniform(work.stream) < 0.1:
        target = between(work.stream, 2, work.max_tokens)
    first = work.document_offsets[document]  # of the sentences collected so far
    after = first
    while after < end:
        after += 1
        if after < end and offsets[after] - offsets[first] < target:
            continue
        start_of_rest = first + 1
        if after - first > 1:
            start_of_rest = first + between(work.stream, 1, after - first - 1)
        segment_a = (offsets[first], offsets[start_of_rest])
        is_random = after - first == 1 or uniform(work.stream) < 0.5
        if is_random:
            segment_b = _random_segment(work, number, target - (segment_a[1] - segment_a[0]))
            after = start_of_rest  # The unused sentences are visited again.
        else:
            segment_b = (offsets[start_of_rest], offsets[after])
        found = _with_space(found, count, work)
        _add_example(work, segment_a, segment_b, is_random, found, count)
        count += 1
        first = after
    return found, count


@compiled
def _random_segment(work: Work, number: int, wanted: int) -> Span:
    """Return sentences of another, random document, with at least `wanted` tokens if possible.

    `number` is the position of the current document in the shuffled order. The result is a span of
    the text's tokens.
    """
    other = number
    for _ in range(10):  # With few documents, all ten draws may be the document itself.
        other = between(work.stream, 0, len(work.order) - 1)
        if other != number:
            break
    document = work.order[other]
    first, end = work.document_offsets[document], work.document_offsets[document + 1]
    offsets = work.sentence_offsets
    start = first + between(work.stream, 0, end - first - 1)
    after = start + 1
    while after < end and offsets[after] - offsets[start] < wanted:
        after += 1
    return offsets[start], offsets[after]


@compiled
def _add_example(
    work: Work, segment_a: Span, segment_b: Span, is_random: bool, found: Collected, count: int
) -> None:
    """Build and mask one example, and store it after the `count` existing examples."""
    segment_a, segment_b = _shortened(work, segment_a, segment_b)
    start_of_b = segment_a[1] - segment_a[0] + 2
    num_tokens = start_of_b + segment_b[1] - segment_b[0] + 1
    at = found.offsets[count]
    tokens = found.input_ids[at : at + num_tokens]
    tokens[0] = work.cls_id
    copy_into(tokens, 1, work.tokens, segment_a[0], segment_a[1])
    tokens[start_of_b - 1] = work.sep_id
    copy_into(tokens, start_of_b, work.tokens, segment_b[0], segment_b[1])
    tokens[num_tokens - 1] = work.sep_id
    found.offsets[count + 1] = at + num_tokens
    found.segment_b_start[count] = start_of_b
    found.next_sentence_label[count] = is_random
    _mask(work, tokens, start_of_b)
    # Visiting all positions sorts the masked ones; values of other positions are overwritten.
    masked = found.masked_lm_offsets[count]
    for position in range(num_tokens):
        found.masked_lm_positions[masked] = position
        found.masked_lm_ids[masked] = work.originals[position]
        masked += work.originals[position] >= 0
        work.originals[position] = -1
    found.masked_lm_offsets[count + 1] = masked


@compiled
def _shortened(work: Work, segment_a: Span, segment_b: Span) -> tuple[Span, Span]:
    """Shorten segments A and B until their sum is at most `work.max_tokens` tokens.

    Each step removes the first or last token of the longer segment, or of B if both are equally
    long.
    """
    start_a, end_a = segment_a
    start_b, end_b = segment_b
    for _ in range(end_a - start_a + end_b - start_b - work.max_tokens):
        from_front = uniform(work.stream) < 0.5
        if end_a - start_a > end_b - start_b:
            if from_front:
                start_a += 1
            else:
                end_a -= 1
        elif from_front:
            start_b += 1
        else:
            end_b -= 1
    return (start_a, end_a), (start_b, end_b)


@compiled
def _mask(work: Work, tokens: NDArray[Any], start_of_b: int) -> None:
    """Mask `tokens` in place, and store the original tokens in `work.originals`."""
    num_tokens = len(tokens)
    candidates = work.candidates[: num_tokens - 3]
    for i in range(len(candidates)):
        candidates[i] = i + 1 if i + 1 < start_of_b - 1 else i + 2
    # All candidates must be shuffled although few are masked, because the first ones come last.
    shuffle(work.stream, candidates)
    # round() rounds half to even, as in the reference.
    num_masked = min(work.max_predictions, max(1, round(num_tokens * 0.15)))
    for position in candidates[:num_masked]:
        work.originals[position] = tokens[position]
        if uniform(work.stream) < 0.8:
            tokens[position] = work.mask_id
        elif uniform(work.stream) >= 0.5:
            tokens[position] = between(work.stream, 0, work.vocab_size - 1)


@compiled
def _with_space(found: Collected, count: int, work: Work) -> Collected:
    """Return `found`, or longer copies of its arrays, with space for one more example."""
    masked = found.masked_lm_offsets[count] + work.max_predictions + 1
    return Collected(
        _grown(found.input_ids, found.offsets[count] + work.max_tokens + 3),
        _grown(found.offsets, count + 2),
        _grown(found.segment_b_start, count + 1),
        _grown(found.masked_lm_positions, masked),
        _grown(found.masked_lm_ids, masked),
        _grown(found.masked_lm_offsets, count + 2),
        _grown(found.next_sentence_label, count + 1),
    )


@compiled
def _grown(values: NDArray[Any], needed: int) -> NDArray[Any]:
    """Return `values` if it has `needed` elements, or a copy that is at least twice as long.

    Doubling the length makes the total copying time linear.
    """
    if needed <= len(values):
        return values
    larger = np.empty(max(needed, 2 * len(values)), values.dtype)
    copy_into(larger, 0, values, 0, len(values))
    return larger


@compiled
def copy_into(target: NDArray[Any], at: int, source: NDArray[Any], start: int, end: int) -> None:
    """Copy `source[start:end]` into `target`, starting at index `at`.

    A loop is used because numba takes long to compile the assignment of slices.
    """
    for i in range(end - start):
        target[at + i] = source[start + i]


def make_examples(
    documents: Documents, vocabulary: AnyVocabulary, settings: ShardSettings
) -> ShardArrays:
    """Return the examples of all passes over the documents, in random order.

    There must be at least two documents. The peak memory is about twice the size of the examples,
    because the function copies them to shuffle them. Ctrl-C takes effect at the end of a pass.
    """
    longest = settings.max_seq_length
    work = Work(
        stream=new_stream(settings.seed),
        tokens=documents.tokens,
        sentence_offsets=documents.sentence_offsets,
        document_offsets=documents.document_offsets,
        order=np.arange(len(documents)),
        candidates=np.empty(longest, dtype=np.int64),
        originals=np.full(longest, -1, dtype=np.int64),
        max_tokens=longest - 3,
        max_predictions=settings.max_predictions,
        vocab_size=len(vocabulary),
        cls_id=vocabulary.cls_id,
        sep_id=vocabulary.sep_id,
        mask_id=vocabulary.mask_id,
    )
    found, count = empty_examples(*_FIRST, documents.tokens.dtype), 0
    shuffle(work.stream, work.order)
    for _ in range(settings.dupe_factor):
        with interrupt_deferred():
            found, count = add_pass(work, found, count)
    order = np.arange(count)
    shuffle(work.stream, order)
    return take_examples(used_part(found, count), order)


def new_stream(seed: int) -> Stream:
    """Return the state of `random.Random(seed)` for the compiled code, int64 [1249]."""
    *state, used = random.Random(seed).getstate()[1]
    assert used == WORDS  # A new generator generates its output at first use.
    return np.array([*state, *[0] * WORDS, WORDS], dtype=np.int64)


def take_examples(examples: ShardArrays, order: NDArray[np.int64]) -> ShardArrays:
    """Return the examples whose numbers are in `order`, in that order."""
    masked_offsets = examples.masked_lm_offsets
    with interrupt_deferred():
        tokens, offsets = _gather(examples.input_ids, examples.offsets, order)
        positions, new_masked_offsets = _gather(examples.masked_lm_positions, masked_offsets, order)
        masked_ids, _ = _gather(examples.masked_lm_ids, masked_offsets, order)
    return ShardArrays(
        input_ids=tokens,
        offsets=offsets,
        segment_b_start=examples.segment_b_start[order],
        masked_lm_positions=positions,
        masked_lm_ids=masked_ids,
        masked_lm_offsets=new_masked_offsets,
        next_sentence_label=examples.next_sentence_label[order],
    )


def pick_evenly(examples: ShardArrays, count: int) -> ShardArrays:
    """Return `count` of the n examples, evenly spaced.

    Their numbers are int(i * n / count) for i = 0 .. count - 1. There must be at least `count`
    examples.
    """
    total = len(examples.segment_b_start)
    return take_examples(examples, np.array([int(i * total / count) for i in range(count)]))


def used_part(found: Collected, count: int) -> ShardArrays:
    """Return the first `count` examples as views of the arrays."""
    num_tokens, num_masked = found.offsets[count], found.masked_lm_offsets[count]
    ends = (num_tokens, count + 1, count, num_masked, num_masked, count + 1, count)
    arrays = zip(found._asdict().items(), ends, strict=True)
    return ShardArrays(**{name: values[:end] for (name, values), end in arrays})


def joined(parts: Sequence[ShardArrays]) -> ShardArrays:
    """Concatenate the examples of all parts in order. There must be at least one part."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in ShardArrays.__slots__:
        values = [getattr(part, name) for part in parts]
        if name.endswith("offsets"):
            lengths = np.concatenate([np.diff(offsets) for offsets in values])
            arrays[name] = np.concatenate(([0], np.cumsum(lengths)))
        else:
            arrays[name] = np.concatenate(values)
    return ShardArrays(**arrays)


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the with block ends, because it would crash numba's compiled code."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers only run in the main thread.
        return
    arrived: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        signal.raise_signal(signal.SIGINT)  # delivers the deferred Ctrl-C


@compiled
def _gather(
    values: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenate the spans of `values` whose numbers are in `rows`.

    `offsets` are the bounds of all spans. Returns the result and the bounds of its spans.
    """
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    for i in range(len(rows)):
        new_offsets[i + 1] = new_offsets[i] + offsets[rows[i] + 1] - offsets[rows[i]]
    gathered = np.empty(new_offsets[-1], values.dtype)
    for i in range(len(rows)):
        start = offsets[rows[i]]
        for at in range(new_offsets[i], new_offsets[i + 1]):
            gathered[at] = values[start + at - new_offsets[i]]
    return gathered, new_offsets

"""Choose the masked tokens of each sequence and their replacements at random, in compiled code.

The random-number generator Philox 4x32 computes each random number from (seed, round, sample id,
number of the draw). The masks therefore do not depend on ranks, workers or earlier draws.
model/dropout_keys.py contains a readable implementation of Philox, and tests/plain_masking.py
contains one of the masking rule. numba's cache requires that all this code is in one file (see
compiled.py).

Shape letters: B sequences, T tokens, P masked positions.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.compiled import compiled

# These are unsigned 64-bit integers, because numba converts mixed signed and unsigned operands to
# floats.
WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
MULTIPLIER_A, MULTIPLIER_C = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEP_0, KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 7
# A 32-bit word below the first limit selects [MASK]. Below the second it selects the token itself,
# and otherwise a random token.
BELOW_IS_MASK = np.uint64(8 * 2**32 // 10)
BELOW_IS_KEPT = np.uint64(9 * 2**32 // 10)

ALL_DRAWN = -1


@compiled
def draw_masks(
    tokens: NDArray[Any],
    offsets: NDArray[Any],
    sample_ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    special: NDArray[np.int64],
    mask_id: int,
    vocab_size: int,
    number: int,
    seed: int,
    positions: NDArray[Any],
    labels: NDArray[Any],
) -> int:
    """Mask sequences in place, and write the original tokens to `labels`.

    All sets of maskable positions of the given size are equally likely. Independently of each
    other, the chosen tokens become [MASK] with probability 80%, become a random non-special token
    with probability 10%, and otherwise stay the same.

    Args:
        tokens: token ids, integers [T], overwritten.
        offsets: integers [B + 1]. Sequence i is tokens offsets[i] .. offsets[i + 1].
        sample_ids: [B].
        counts: [B], number of tokens to mask in each sequence. The sum is P.
        special: distinct ids of special tokens, ascending. Special tokens are never masked or
            inserted.
        mask_id: id of [MASK].
        vocab_size: size of the vocabulary.
        number: number of the round. The same seed, sample id and round give the same masks.
        seed: seed of the run, 64 bits.
        positions: [P], output: masked positions within their sequence, ascending.
        labels: [P], output: original tokens at the masked positions.

    Returns:
        ALL_DRAWN if all sequences were masked, or otherwise the index of the first sequence with
        fewer maskable tokens than its count.
    """
    candidates, originals = _buffers(offsets)
    masked = 0
    for i in range(len(sample_ids)):
        sequence = tokens[offsets[i] : offsets[i + 1]]
        available = _find_candidates(sequence, special, candidates)
        if available < counts[i]:
            return i
        for draw in range(counts[i]):
            where, how, what = _words(draw, sample_ids[i], number, seed)
            # This is a Fisher-Yates shuffle that stops after the first `counts[i]` elements.
            chosen = draw + np.int64((where * np.uint64(available - draw)) >> WORD_BITS)
            position = candidates[chosen]
            candidates[chosen] = candidates[draw]
            originals[position] = sequence[position]
            if how < BELOW_IS_MASK:
                sequence[position] = mask_id
            elif how >= BELOW_IS_KEPT:
                sequence[position] = _token(what, special, vocab_size)
        _collect(originals[: len(sequence)], positions[masked:], labels[masked:])
        masked += counts[i]
    return ALL_DRAWN


@compiled
def _buffers(offsets: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return space for the longest sequence's candidates, and for its originals, which are -1.

    Loops are used because numba takes seconds to compile `np.diff` and `np.full`.
    """
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    originals = np.empty(longest, np.int64)
    for position in range(longest):
        originals[position] = -1
    return np.empty(longest, np.int64), originals


@compiled
def _find_candidates(
    sequence: NDArray[Any], special: NDArray[np.int64], candidates: NDArray[np.int64]
) -> int:
    """Write the maskable positions of a sequence to `candidates`, and return their number."""
    available = 0
    for position in range(len(sequence)):
        candidates[available] = position
        available += not _is_special(int(sequence[position]), special)
    return available


@compiled
def _collect(originals: NDArray[np.int64], positions: NDArray[Any], labels: NDArray[Any]) -> None:
    """Write the masked positions and their labels in ascending order, and reset `originals`."""
    masked = 0
    for position in range(len(originals)):
        if originals[position] >= 0:
            positions[masked] = position
            labels[masked] = originals[position]
            originals[position] = -1
            masked += 1


@compiled
def _is_special(token: int, special: NDArray[np.int64]) -> bool:
    found = False
    for i in range(len(special)):
        found |= token == special[i]
    return found


@compiled
def _token(word: np.uint64, special: NDArray[np.int64], vocab_size: int) -> int:
    """Map a random 32-bit word to one of the non-special tokens, all of them equally likely."""
    token = np.int64((word * np.uint64(vocab_size - len(special))) >> WORD_BITS)
    for i in range(len(special)):
        token += token >= special[i]
    return int(token)


@compiled
def _words(
    draw: int, sample: int, number: int, seed: int
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Return the three random 32-bit words of one draw for a sample in a round."""
    a, b = np.uint64(draw), np.uint64(sample) & WORD
    c, d = np.uint64(number) & WORD, np.uint64(sample) >> WORD_BITS
    key_0, key_1 = np.uint64(seed) & WORD, np.uint64(seed) >> WORD_BITS
    for _ in range(ROUNDS):
        product_a, product_c = a * MULTIPLIER_A, c * MULTIPLIER_C
        a, b = (product_c >> WORD_BITS) ^ b ^ key_0, product_c & WORD
        c, d = (product_a >> WORD_BITS) ^ d ^ key_1, product_a & WORD
        key_0, key_1 = (key_0 + KEY_STEP_0) & WORD, (key_1 + KEY_STEP_1) & WORD
    return a, b, c

"""Dropout keys, and the random bits that are a function of them.

The bits are computed here by torch operators, in readable form. All words are int64 tensors or ints
that hold 32 unsigned bits. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011: Philox 4x32.

Shape letters: R tokens (rows).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

NUM_VALUES = 2**16  # bits of the random number that decides about one element
ROUNDS = 7  # the fewest rounds that passed all tests of the paper's authors
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class DropoutKeys:
    """Keys of R tokens; with a stream's and a channel's number they decide what is dropped.

    `step` int64 [1] is the number of the update, on the device; a captured step overwrites it.
    """

    seed: int
    step: Tensor
    sample_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]: within their samples, in 0 .. 65,535

    def rows(self, index: Tensor) -> Self:
        """The keys of some tokens, `index` int64 [r]."""
        return replace(
            self,
            sample_ids=self.sample_ids.index_select(0, index),
            positions=self.positions.index_select(0, index),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DropoutSite:
    """One dropout of the model, told from the others by `stream` in 0 .. 65,535."""

    probability: float
    stream: int
    keys: DropoutKeys


def make_site(probability: float, stream: int, keys: DropoutKeys | None) -> DropoutSite | None:
    """A site; None (no dropout) without keys, as in evaluation, or if the probability is 0."""
    return None if keys is None or probability == 0 else DropoutSite(probability, stream, keys)


def threshold_of(probability: float) -> int:
    """The number of values of an element's 16 bits, out of 65,536, that drop it."""
    return min(round(probability * NUM_VALUES), NUM_VALUES - 1)


def scale_of(probability: float) -> float:
    """The factor of kept elements that preserves the mean, for the rounded rate."""
    return NUM_VALUES / (NUM_VALUES - threshold_of(probability))


def philox(counter: Words, seed: int, rounds: int = ROUNDS) -> Words:
    """Four random words for each counter.

    Args:
        counter: int64, of shapes that broadcast together.
        seed: the low and high 32 bits are the key.
        rounds: 7 or more.
    """
    a, b, c, d = counter
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(rounds):
        # A product of two words has 64 bits. The mask removes the sign bit.
        product_a, product_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (product_c >> 32 & MASK) ^ b ^ key[0],
            product_c & MASK,
            (product_a >> 32 & MASK) ^ d ^ key[1],
            product_a & MASK,
        )
        key = [(word + step) & MASK for word, step in zip(key, KEY_STEPS, strict=True)]
    return a, b, c, d


def kept_bytes(counter: Words, seed: int, threshold: int) -> Tensor:
    """Keep bits of eight elements for each counter: bit e is set if element e is kept.

    Element e reads half e % 2 (low first) of word e // 2 and is kept if that is not below the
    threshold.

    Args:
        counter: int64, of shapes that broadcast together.
        seed: see `philox`.
        threshold: number of the 65,536 values of 16 bits that drop an element.

    Returns:
        uint8 of the broadcast shape.
    """
    words = philox(counter, seed)
    total = torch.zeros_like(words[0])
    for element in range(8):
        bits = words[element // 2] >> 16 * (element % 2) & 0xFFFF
        total |= (bits >= threshold).long() << element
    return total.to(torch.uint8)

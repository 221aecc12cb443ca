"""Dropout keys, and the random bits that they determine.

This file computes the bits with torch operators, in readable form. All words are int64 tensors or
ints that contain 32 unsigned bits. Source: Philox 4x32 from Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011.

Shape letters: R tokens (rows).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

NUM_VALUES = 2**16  # values of the 16-bit random number that decides whether to drop an element
ROUNDS = 7  # the smallest number of rounds that passed all tests of the paper's authors
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class DropoutKeys:
    """Keys of R tokens, which determine what is dropped for a given stream and channel number.

    `step`, int64 [1] on the device, is the number of the update. A captured step overwrites it.
    """

    seed: int
    step: Tensor
    sample_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]: positions within the samples, in 0 .. 65,535

    def rows(self, index: Tensor) -> Self:
        """Select the keys of some tokens by `index`, int64 [r]."""
        return replace(
            self,
            sample_ids=self.sample_ids.index_select(0, index),
            positions=self.positions.index_select(0, index),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DropoutSite:
    """One dropout operation of the model, identified by its `stream` in 0 .. 65,535."""

    probability: float
    stream: int
    keys: DropoutKeys


def make_site(probability: float, stream: int, keys: DropoutKeys | None) -> DropoutSite | None:
    """Create a site, or return None (no dropout) if the probability is 0 or there are no keys.

    In evaluation there are no keys.
    """
    return None if keys is None or probability == 0 else DropoutSite(probability, stream, keys)


def threshold_of(probability: float) -> int:
    """Return how many of the 65,536 values of an element's 16 bits drop it."""
    return min(round(probability * NUM_VALUES), NUM_VALUES - 1)


def scale_of(probability: float) -> float:
    """Return the factor of kept elements that preserves the mean, given the rounded rate."""
    return NUM_VALUES / (NUM_VALUES - threshold_of(probability))


def philox(counter: Words, seed: int, rounds: int = ROUNDS) -> Words:
    """Compute four random words for each counter.

    Args:
        counter: int64 tensors whose shapes broadcast together.
        seed: its low and high 32 bits are the two words of the key.
        rounds: 7 or more.
    """
    a, b, c, d = counter
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(rounds):
        # A product of two words has 64 bits, so its sign bit can be set. The mask removes it.
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
    """Compute the keep bits of eight elements per counter.

    Bit e is set if element e is kept. Element e uses half e % 2 (low half first) of word e // 2,
    and is kept if that value is at least the threshold.

    Args:
        counter: int64 tensors whose shapes broadcast together.
        seed: see `philox`.
        threshold: how many of the 65,536 values of 16 bits drop an element.

    Returns:
        uint8 of the broadcast shape.
    """
    words = philox(counter, seed)
    total = torch.zeros_like(words[0])
    for element in range(8):
        bits = words[element // 2] >> 16 * (element % 2) & 0xFFFF
        total |= (bits >= threshold).long() << element
    return total.to(torch.uint8)

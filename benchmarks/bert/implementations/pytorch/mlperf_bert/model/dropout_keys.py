"""Dropout keys, and the random bits that they determine.

This file computes the bits with torch operators, in readable form. Each word is an int64 tensor or
an int that contains 32 unsigned bits. Source: Philox 4x32 from Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011.

Shapes use the letter R for the number of tokens (rows).
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
    """The keys of R tokens, which determine the elements that a dropout with a given stream drops.

    `step`, int64 [1] on the device, is the number of the update. A captured step overwrites it.
    """

    seed: int
    step: Tensor
    sample_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]: positions within the samples, in 0 .. 65,535

    def rows(self, index: Tensor) -> Self:
        """Return the keys of some of the tokens. `index`, int64 [r], contains their numbers."""
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
    """Create a dropout site, or return None, which means no dropout.

    The result is None if the probability is 0, or if there are no keys, as in evaluation.
    """
    return None if keys is None or probability == 0 else DropoutSite(probability, stream, keys)


def threshold_of(probability: float) -> int:
    """Return how many of the 65,536 values of a 16-bit random number cause a drop."""
    return min(round(probability * NUM_VALUES), NUM_VALUES - 1)


def scale_of(probability: float) -> float:
    """Return the factor for kept elements, which preserves the mean.

    The factor takes into account that the probability is rounded to a multiple of 1 / 65,536.
    """
    return NUM_VALUES / (NUM_VALUES - threshold_of(probability))


def philox(counter: Words, seed: int, rounds: int = ROUNDS) -> Words:
    """Compute four random words for each counter with Philox 4x32.

    Args:
        counter: four int64 tensors whose shapes broadcast together.
        seed: its low and high 32 bits are the two words of the key.
        rounds: the number of rounds, at least 7.
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
    """Compute for each counter which of eight elements a dropout keeps, as the bits of a byte.

    Bit e is set if element e is kept. Element e has a 16-bit random number, which is half e % 2
    (low half first) of word e // 2. The element is kept if its number is at least the threshold.

    Args:
        counter: four int64 tensors whose shapes broadcast together.
        seed: see `philox`.
        threshold: how many of the 65,536 values of the random number drop an element.

    Returns:
        uint8 of the broadcast shape.
    """
    words = philox(counter, seed)
    total = torch.zeros_like(words[0])
    for element in range(8):
        bits = words[element // 2] >> 16 * (element % 2) & 0xFFFF
        total |= (bits >= threshold).long() << element
    return total.to(torch.uint8)

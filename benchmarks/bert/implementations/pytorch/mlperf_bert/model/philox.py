"""Random bits that are a function of a key and a counter, in torch operators: the readable one.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: Philox 4x32. All
words are int64 tensors or ints that hold 32 bits without a sign.
"""

import torch
from torch import Tensor

ROUNDS = 7  # the fewest that passed all tests of the paper's authors
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, seed: int, rounds: int = ROUNDS) -> Words:
    """Four random words for each counter.

    Args:
        counter: int64, of shapes that broadcast together.
        seed: its low and its high 32 bits are the key.
        rounds: 7 or more.
    """
    a, b, c, d = counter
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(rounds):
        # A product of two words has 64 bits. What reads as a sign goes with the mask.
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
    """Of eight elements for each counter: bit e is set where element e is kept.

    Element e has the half e % 2, the low one first, of word e // 2, and is kept if that is not
    below the threshold.

    Args:
        counter: int64, of shapes that broadcast together.
        seed: as of `philox`.
        threshold: of the 65,536 values of 16 bits, how many drop an element.

    Returns:
        uint8 of the broadcast shape.
    """
    words = philox(counter, seed)
    total = torch.zeros_like(words[0])
    for element in range(8):
        bits = words[element // 2] >> 16 * (element % 2) & 0xFFFF
        total |= (bits >= threshold).long() << element
    return total.to(torch.uint8)

"""Derive the seeds of a run's random-number generators from the seed of the run."""

import hashlib

SEED_BITS = 31  # published logs use such seeds, and every compliance checker accepts them


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Derive a 63-bit seed for one purpose, such as `weights` or `sampler`, and one index.

    `index` is usually a rank. Generators with different purposes or indices are independent. Adding
    one of them does not change the others.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

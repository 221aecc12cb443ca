"""Derive the seeds of all random streams of a run from the run's seed."""

import hashlib

SEED_BITS = 31  # published logs use such seeds, and every compliance checker accepts them


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Derive a 63-bit seed for one purpose (such as `weights` or `sampler`) and one index (a rank).

    Streams of different purposes or ranks are independent. Adding one does not change the others.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

"""Every random stream of a run, derived from its one seed."""

import hashlib

SEED_BITS = 31  # what the published logs and every checker take as a seed


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit seed for one purpose (`weights`, `sampler`, `dropout`) and one index (a rank).

    Streams of different purposes or ranks are independent, and do not move when one is added.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

"""Seeds of all random streams of a run, derived from its one seed."""

import hashlib

SEED_BITS = 31  # the seeds that published logs use and every checker accepts


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit seed for one purpose (`weights`, `sampler`, `dropout`) and one index (a rank).

    Streams of different purposes or ranks are independent and do not change when one is added.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

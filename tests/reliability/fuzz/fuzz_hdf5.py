"""A shard as `verify` looks at it: libhdf5 in the sandbox's child, whose death is an error too."""

import atexit
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random

from fuzz_mutations import mutate_bytes

from mlperf_bert.data.index import read_sidecar
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.prepare.verify.full import LAYOUT_READER, check_structure

SHARD = "shards/part-0.hdf5"
_METADATA_BYTES = 4096  # where most of what describes the arrays lies


def mutate_hdf5(rng: Random, contents: bytes) -> bytes:
    """Change bytes, mostly of the metadata."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, contents)
    head, rest = contents[:_METADATA_BYTES], contents[_METADATA_BYTES:]
    return mutate_bytes(rng, head) + rest


def parse_hdf5(directory: Path) -> object:
    """Problems are returned, not raised: the first one is."""
    path = directory / SHARD
    for problem in check_structure(path, read_sidecar(path), _sandbox()):
        raise problem
    return None


@cache
def _sandbox() -> Sandbox:
    """One server for all inputs, until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(sandbox(LAYOUT_READER))

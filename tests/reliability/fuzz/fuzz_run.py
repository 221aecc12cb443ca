"""Fuzzes one parser in a process of its own, whose memory is limited: `fuzz_run.py NAME INPUTS`.

Prints one JSON object. Hypothesis draws in batches of 1,000, each with its number as the seed, so
that a run can be repeated. The limit holds for what is allocated after the start.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz_parsers import PARSERS
from fuzz_world import World
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from mlperf_bert.common.untrusted import MAX_JSON_BYTES

BATCH = 1000
MOST_GROWTH_MIB = 512
RUNS_OF_ONE = settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
SEEDS = st.integers(min_value=0, max_value=2**63 - 1)
INPUTS = st.one_of(SEEDS, SEEDS, SEEDS, st.binary(max_size=200))  # three of four by structure


def bombs() -> Iterator[bytes]:
    """Files of the largest size that is read, made to need much memory."""
    size = MAX_JSON_BYTES
    yield b"[" * size
    yield b'{"a":' * (size // 5)
    yield b'{"a": [' + b"[]," * (size // 3 - 8) + b"[]]}"
    yield b'{"a": [' + b"{}," * (size // 3 - 8) + b"{}]}"
    yield b'{"a": [' + b"1e9," * (size // 4 - 8) + b"1]}"
    members = bytearray(b"{")
    for number in range(size // 12 - 8):
        members += b'"%07x":1,' % number
    yield bytes(members + b'"a": 1}')
    yield b'{"a": "' + b"\\u0007" * (size // 6 - 8) + b'"}'
    yield b"\n" * size
    yield b'":::MLLOG {"key": [' * (size // 20)
    yield b"a" * (size + 1)


def try_batch(world: World, number: int, inputs: int) -> int:
    """Try a batch of inputs; how many were accepted. Raises what the parser may not raise."""
    accepted = 0

    @seed(number)
    @settings(RUNS_OF_ONE, max_examples=inputs)
    @given(INPUTS)
    def one(drawn: int | bytes) -> None:
        nonlocal accepted
        accepted += world.try_input(number, drawn)

    one()
    return accepted


def memory_mib(field: str) -> float:
    """A field of this process's status, such as VmRSS or VmHWM (the peak since its reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (text,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(text.split()[1]) / 1024


@contextmanager
def limited_memory() -> Iterator[None]:
    """Have MemoryError raised where more than MOST_GROWTH_MIB is allocated over what there is."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int((memory_mib("VmData") + MOST_GROWTH_MIB) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def fuzz(name: str, world: World, inputs: int) -> dict[str, object]:
    """Try the largest files, then so many inputs; what that took."""
    Path("/proc/self/clear_refs").write_text("5")  # peaks count from here
    before_mib = memory_mib("VmRSS")
    start, processor_start = time.monotonic(), time.process_time()
    for target in world.parser.targets:
        for bomb in bombs():
            world.accepts(target, bomb)
    bombs_mib = memory_mib("VmHWM") - before_mib
    counts = [min(BATCH, inputs - done) for done in range(0, inputs, BATCH)]
    accepted = sum(try_batch(world, number, count) for number, count in enumerate(counts))
    return {
        "parser": name,
        "inputs": inputs,
        "accepted": accepted,
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(time.process_time() - processor_start, 1),
        "growth_mib": round(memory_mib("VmHWM") - before_mib, 1),
        "growth_of_largest_files_mib": round(bombs_mib, 1),
        "limit_mib": MOST_GROWTH_MIB,
    }


def main(name: str, inputs: int) -> None:
    """Fuzz the parser of that name and print what it took."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(PARSERS[name], Path(directory) / "world")
        with limited_memory():
            result = fuzz(name, world, inputs)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Ranks of one machine: while a command runs, nobody outside the machine can speak to it.

Left out by ./run_tests.sh; `make test-real` runs it. In a network namespace, so that the machine
has another address, and a neighbour.
"""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from listening import is_loopback, listeners, tree
from support import REPOSITORY, make_tiny_inputs, run_cli

sys.path.insert(0, str(REPOSITORY / "logs" / "2026-11-21-overlap"))
from overlap_link import ADDRESSES, linked_namespaces

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
ENDLESS = ("run.max_steps=1000000", "eval.interval_samples=100000000")
TWO_RANKS = ("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
ANSWER = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
REFUSED = f"{errno.ECONNREFUSED}\n"


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    with linked_namespaces() as names:
        yield names


def commands(directory: Path) -> dict[str, Sequence[object]]:
    """Those that start ranks by themselves; `bench` starts none."""
    data, config = make_tiny_inputs(directory)
    two, endless = (
        [word for setting in settings for word in ("--set", setting)]
        for settings in (TWO_RANKS, ENDLESS)
    )
    given = ["--config", config, "--data", data]
    trained = directory / "trained"
    run_cli("train", *given, "--run-dir", trained, "--set", "run.max_steps=1")
    weights = trained / "run_0/checkpoints"
    squad = ["--layers", 2, "--hidden", 16, "--updates", 10000, "--device", "cpu"]
    return {
        "train": ["train", *given, "--run-dir", directory / "run", *two, *endless],
        "evaluate": ["evaluate", "--checkpoint", weights, "--data", data, "--ranks", 2],
        "doctor": ["doctor", "--only", "network", "--device", "cpu"],
        "squad": ["squad", "train", "--engine", "pipeline:2", "--run-dir", directory / "s", *squad],
        "tune": ["tune", *given, "--space", "around", "--study", directory / "study", *two],
    }


def test_nobody_outside_can_connect(hosts: tuple[str, ...], tmp_path: Path) -> None:
    """All commands at once: most of their time is the start of their ranks."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(started(hosts[0], words, tmp_path / f"{name}.output"))
            for name, words in commands(tmp_path).items()
        }
        stack.callback(lambda: [process.terminate() for process in running.values()])
        found: dict[str, set[str]] = {name: set() for name in running}
        deadline = time.monotonic() + 120
        while not all(map(have_met, found.values())):
            assert time.monotonic() < deadline, found
            for name, process in running.items():
                has_ended = process.poll() is not None
                found[name] |= set(listeners(tree(process.pid)))
                output = tmp_path / f"{name}.output"
                assert have_met(found[name]) or not has_ended, output.read_text()
        assert all(is_loopback(place) for places in found.values() for place in places), found
        for place in found["train"] - {"unix"}:  # which is still there
            for host in hosts:  # from the machine's own other address, and a neighbour's
                assert answer(host, place) == REFUSED, place
    print(*(f"{name}: {' '.join(sorted(places))}" for name, places in found.items()), sep="\n")


def have_met(places: set[str]) -> bool:
    """Whether both ranks of a command listened, for gloo's connections."""
    return len(places - {"unix"}) >= 2


def started(host: str, words: Sequence[object], output: Path) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "mlperf_bert", *map(str, words)]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def answer(host: str, place: str) -> str:
    """What a connection gets that comes from `host` to the port, at the first one's address."""
    command = ["ip", "netns", "exec", host, sys.executable, "-SEc", ANSWER, ADDRESSES[0]]
    return subprocess.run(
        [*command, place.rpartition(":")[2]], capture_output=True, text=True, check=True
    ).stdout

"""Two network namespaces of this machine, joined by a link whose rate can be limited.

Part of measure_overlap.py. What is made here is gone when the `with` block is left, and
nothing appears in the machine's own network: the link's two ends are born inside the namespaces.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from mlperf_bert.common.errors import ConfigError

INTERFACE = "veth0"  # the same name in both namespaces
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# What may leave at once after a pause. Well below a bucket; above the 64 KiB that the kernel
# hands down as one packet, which `tc` would otherwise cut up with processor time of the ranks.
BURST_BYTES = 128 * 1024
# Bytes that do not fit into the queue are lost: it must be longer than what TCP has under way.
QUEUE_MS = 400


def check_possible() -> None:
    """Raise ConfigError unless this process may make namespaces and has the commands to."""
    if os.geteuid() != 0:
        raise ConfigError("network namespaces", "need root", "run this as root")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise ConfigError(command, "is not installed", "install iproute2")


@contextmanager
def linked_namespaces() -> Iterator[tuple[str, ...]]:
    """Yield the names of two namespaces; each sees itself and the other's address, unthrottled.

    Raises ConfigError where the kernel or a container's limits refuse.
    """
    names = tuple(f"overlap-{os.getpid()}-{rank}" for rank in range(2))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [("name", INTERFACE, "netns", name) for name in names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:  # also one that was not made: then this fails, and that is fine
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def throttle(bits_per_s: float) -> None:
    """Limit what this process's namespace sends: a token bucket. Raises ConfigError."""
    _run(
        *("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf"),
        *("rate", f"{bits_per_s:.0f}bit", "burst", f"{BURST_BYTES}b", "latency", f"{QUEUE_MS}ms"),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"failed with status {done.returncode}"
        raise ConfigError(
            " ".join(command), said, "run where network namespaces, veth and tbf are allowed"
        )

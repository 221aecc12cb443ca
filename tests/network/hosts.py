"""Network namespaces of this machine as hosts on one switch.

What is made here is gone when the `with` block is left, and nothing appears in the machine's own
network: the switch has a namespace of its own.
"""

import os
import subprocess
from contextlib import contextmanager

from mlperf_bert.errors import ConfigError

INTERFACE = "veth0"  # the same name in every namespace
ADDRESSES = tuple(f"10.0.0.{number}" for number in range(1, 9))


@contextmanager
def linked_hosts(count):
    """Yield the names of `count` namespaces; each reaches the others' ADDRESSES.

    Raises ConfigError where the kernel or a container's limits refuse.
    """
    switch = f"switch-{os.getpid()}"
    names = tuple(f"host-{os.getpid()}-{number}" for number in range(count))
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            _connect(name, ADDRESSES[number], switch, f"port{number}")
        yield names
    finally:
        for name in (switch, *names):  # also one that was not made: then this fails, which is fine
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(name, address, switch, port):
    ends = ("name", INTERFACE, "netns", name), ("name", port, "netns", switch)
    _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
    for space, device in ((name, "lo"), (name, INTERFACE), (switch, port)):
        _run("ip", "-n", space, "link", "set", device, "up")


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"failed with status {done.returncode}"
        raise ConfigError(
            " ".join(command), said, "run where network namespaces and veth are allowed"
        )

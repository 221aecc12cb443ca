"""Messages between a trainer and its reader over MPI, waited for by sleeping polls.

The tags are the whole protocol: docs/decisions/0007-reader-processes.md. MPI's own blocking calls
spin, and would take a core from the trainer.
"""

import json
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from mlperf_bert.data.token_packets import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_S = 1e-3


class Tag(IntEnum):
    """What a message is; its contents are bytes of JSON but for those of a packet."""

    # From the trainer.
    SETUP = 1  # the run's seed; no sample may be read yet
    START = 2  # the first step: its first batch is asked for
    CREDIT = 3  # a window has been taken
    STOP = 4  # the last message
    # From the reader.
    READY = 11
    PACKET = 12  # of one forward
    LAST_PACKET = 13  # of a window
    FAILED = 14  # where, problem and remedy of its error; nothing follows
    END = 15  # nothing follows


def wait_until(is_done: Callable[[], bool]) -> None:
    """Return when `is_done` says so, asking again and again with sleeps between."""
    while not is_done():
        time.sleep(POLL_S)


class Pair:
    """One end of the connection; used by one thread at a time."""

    def __init__(self, world: "MPI.Comm", partner: int) -> None:
        """Talk to rank `partner` of all processes."""
        self._world = world
        self._partner = partner
        self._sending: list[tuple[MPI.Request, Any]] = []  # with what must not be freed yet

    def send(self, tag: Tag, contents: Bytes | None = None) -> None:
        """Send without waiting; the array must not change any more."""
        array = np.empty(0, dtype=np.uint8) if contents is None else contents
        self._sending.append((self._world.Isend(array, self._partner, tag), array))
        self.progress()

    def send_json(self, tag: Tag, value: Any) -> None:
        """Send a value that JSON can hold."""
        self.send(tag, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        self.progress()
        return bool(self._world.Iprobe(self._partner))

    def receive(self) -> tuple[Tag, Bytes]:
        """The next message, in the order sent, waited for."""
        from mpi4py import MPI

        wait_until(self.has_message)
        status = MPI.Status()
        self._world.Probe(self._partner, status=status)  # returns at once
        contents = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        request = self._world.Irecv(contents, self._partner, status.Get_tag())
        wait_until(request.Test)
        return Tag(status.Get_tag()), contents

    def progress(self) -> None:
        """Let MPI move what is being sent, and free what has arrived."""
        self._sending = [sending for sending in self._sending if not sending[0].Test()]

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sending:
            self.progress()
            time.sleep(POLL_S)


def from_json(contents: Bytes) -> Any:
    """What `send_json` sent."""
    return json.loads(contents.tobytes())

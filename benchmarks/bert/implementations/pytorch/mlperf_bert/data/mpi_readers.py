"""Reader processes: read, exchange and send the batches of one trainer, windows of steps ahead.

CPU-assisted padding exchange (arXiv 2208.08124), with tokens instead of padded rows. Protocol,
memory and threads: docs/decisions/0007-reader-processes.md.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mlperf_bert.common.errors import UserError
from mlperf_bert.data.exchange_routes import wanted_places
from mlperf_bert.data.mpi_pair import Pair, Tag, from_json, wait_until
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.data.step_plan import StepPlanner
from mlperf_bert.data.token_packets import Bytes, Packet, join, to_packet, unpack

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOWS_IN_FLIGHT = 2


class PeersEndedError(Exception):
    """Another reader of the group has left: its trainer has stopped, or failed."""


class PeerExchange:
    """Messages among the readers of a group; all of them must call the same methods in turn."""

    def __init__(self, readers: "MPI.Comm", first_rank: int) -> None:
        """Exchange among `readers`, who serve the ranks from `first_rank` on."""
        self._readers = readers
        self.ranks = range(first_rank, first_rank + readers.size)
        self.number = readers.rank

    def all_to_all(self, messages: list[Bytes]) -> list[Bytes]:
        """Send a message to each reader; return what each has sent to this one.

        Raises PeersEndedError instead where one of them has called `leave`.
        """
        sizes = np.array([len(message) for message in messages], dtype=np.int64)
        their_sizes = np.empty_like(sizes)
        wait_until(self._readers.Ialltoall(sizes, their_sizes).Test)
        if their_sizes.min() < 0:
            raise PeersEndedError
        received = np.empty(their_sizes.sum(), dtype=np.uint8)
        sending = (np.concatenate(messages), sizes.tolist())
        wait_until(self._readers.Ialltoallv(sending, (received, their_sizes.tolist())).Test)
        return np.split(received, np.cumsum(their_sizes)[:-1])

    def leave(self) -> None:
        """Take the others out of an exchange that they may have begun."""
        sizes = np.full(len(self.ranks), -1, dtype=np.int64)
        wait_until(self._readers.Ialltoall(sizes, np.empty_like(sizes)).Test)


class WindowReader:
    """What one trainer needs for some steps, read, and exchanged where the policy does."""

    def __init__(
        self,
        planner: StepPlanner,
        reader: SampleReader,
        rank: int,
        peers: PeerExchange | None,
        *,
        window_steps: int,
        token: str,
    ) -> None:
        """Read for `rank`; without `peers` what the plan gives to it, else what was drawn for it.

        `token` is `token_packets.token_dtype`'s.
        """
        self._planner = planner
        self._reader = reader
        self._rank = rank
        self._peers = peers
        self._window_steps = window_steps
        self._token = token

    def windows(self, first_step: int, between: Callable[[], None]) -> Iterator[Iterator[Packet]]:
        """Windows without end, each the packets of its forwards; `between` is called often.

        The first one is a single step, and the next are as long as all before them together, up
        to the window: so the trainer waits for one step's reading only, where reading is fast
        enough at all.
        """
        start, size = first_step, 1
        while True:
            yield self._packets(range(start, start + size), between)
            start += size
            size = min(start - first_step, self._window_steps)

    def leave(self) -> None:
        """Say to the other readers that this one takes part no longer."""
        if self._peers is not None:
            self._peers.leave()

    def _packets(self, steps: range, between: Callable[[], None]) -> Iterator[Packet]:
        if self._peers is not None:
            yield from self._exchanged(steps, self._peers, between)
            return
        for step in steps:
            plan = self._planner.plan(step)
            for forward in range(plan.counts.shape[1]):
                between()
                yield to_packet(self._reader.read(plan.ids_of(self._rank, forward)), self._token)

    def _exchanged(
        self, steps: range, peers: PeerExchange, between: Callable[[], None]
    ) -> Iterator[Packet]:
        plans, parts = [], []
        for step in steps:
            between()
            plans.append(self._planner.plan(step))
            ids = plans[-1].drawn_ids[self._rank].ravel()
            parts.append(to_packet(self._reader.read(ids), self._token))
        drawn = join(parts)
        drawn_by_each = len(drawn.lengths)
        wanted = [np.divmod(places, drawn_by_each) for places in wanted_places(plans, peers.ranks)]
        messages = [drawn.take(row[drawer == peers.number]).to_bytes() for drawer, row in wanted]
        received = join([unpack(message)[0] for message in peers.all_to_all(messages)])
        # Received by drawer, and from each in the order wanted: undo the sorting by drawer.
        by_drawer = np.argsort(wanted[peers.number][0], kind="stable")
        counts = np.concatenate([plan.counts[self._rank] for plan in plans])
        yield from received.take(np.argsort(by_drawer)).split(counts)


def serve_trainer(pair: Pair, open_reader: Callable[[int], WindowReader]) -> None:
    """Serve one trainer from its first message to its last; `open_reader` gets the run's seed.

    A UserError becomes a message to the trainer, which ends the run.
    """
    is_stopped = False
    try:
        tag, seed = pair.receive()
        if tag is Tag.STOP:  # there was nothing to train
            return
        reader = open_reader(from_json(seed))
        pair.send(Tag.READY)
        _send_windows(pair, reader)
        is_stopped = True
        pair.send(Tag.END)
    except PeersEndedError:
        pair.send(Tag.END)
    except UserError as error:
        pair.send_json(Tag.FAILED, error.args)
    while not is_stopped:
        is_stopped = pair.receive()[0] is Tag.STOP
    pair.flush()


def _send_windows(pair: Pair, reader: WindowReader) -> None:
    """Send windows until the trainer stops, never more than two that it has not yet taken."""
    windows: Iterator[Iterator[Packet]] = iter(())
    credit = 0
    while True:
        while credit == 0 or pair.has_message():
            tag, contents = pair.receive()
            if tag is Tag.STOP:
                reader.leave()
                return
            if tag is Tag.START:
                windows = reader.windows(from_json(contents), pair.progress)
                credit = WINDOWS_IN_FLIGHT
            else:
                credit += 1
        _send(pair, next(windows))
        credit -= 1


def _send(pair: Pair, packets: Iterator[Packet]) -> None:
    """Send packets as they come, one late, because the last one is marked."""
    late = next(packets)
    try:
        for packet in packets:
            pair.send(Tag.PACKET, late.to_bytes())
            late = packet
    except UserError:
        pair.send(Tag.PACKET, late.to_bytes())  # the trainer may use what was read before
        raise
    pair.send(Tag.LAST_PACKET, late.to_bytes())

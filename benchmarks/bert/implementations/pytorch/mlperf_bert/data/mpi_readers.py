"""Reader processes: read, exchange and send the batches of one trainer, some steps ahead.

CPU-assisted padding exchange (arXiv 2208.08124), with tokens instead of padded rows. Protocol (the
tags are all of it) and threads: docs/decisions/0007-reader-processes.md. Waits for messages
poll and sleep, because MPI's own blocking calls spin and would take a core from the trainer.

Shapes: G ranks of a group, A micro-batches, b sequences drawn for each.
"""

import json
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.loader import BatchSource
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.token_packets import Bytes, join, narrowed, pack, split, take, unpack
from mlperf_bert.errors import DataError, UserError

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_S = 1e-3
CLOSE_TIMEOUT_S = 10
STEPS_AHEAD = 8  # that a reader sends before its trainer has taken the first of them


class Tag(IntEnum):
    """Kinds of message; contents are bytes of JSON, except those of a packet."""

    # From the trainer.
    SETUP = 1  # the run's seed; no sample may be read yet
    START = 2  # the first step: its first batch is requested
    CREDIT = 3  # a step's packets have been taken
    STOP = 4  # the last message
    # From the reader.
    READY = 11
    PACKET = 12  # samples of one micro-batch
    FAILED = 13  # where, problem and remedy of its error; the last message
    END = 14  # nothing follows


def wait_until(is_done: Callable[[], bool]) -> None:
    """Return when `is_done()` is true, polling with sleeps between."""
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
        """Send without waiting; the array must not change afterwards."""
        array = np.empty(0, dtype=np.uint8) if contents is None else contents
        self._sending.append((self._world.Isend(array, self._partner, tag), array))
        self.progress()

    def send_json(self, tag: Tag, value: Any) -> None:
        """Send a value that JSON can hold."""
        self.send(tag, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))

    def has_message(self) -> bool:
        """True if `receive` would return at once."""
        self.progress()
        return bool(self._world.Iprobe(self._partner))

    def receive(self) -> tuple[Tag, Bytes]:
        """Wait for the next message, in the order sent."""
        from mpi4py import MPI

        wait_until(self.has_message)
        status = MPI.Status()
        self._world.Probe(self._partner, status=status)  # returns at once
        contents = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        request = self._world.Irecv(contents, self._partner, status.Get_tag())
        wait_until(request.Test)
        return Tag(status.Get_tag()), contents

    def progress(self) -> None:
        """Let MPI make progress with messages, and free those that have arrived."""
        self._sending = [sending for sending in self._sending if not sending[0].Test()]

    def flush(self) -> None:
        """Wait until all messages have left."""
        while self._sending:
            self.progress()
            time.sleep(POLL_S)


def from_json(contents: Bytes) -> Any:
    """The value that `send_json` sent."""
    return json.loads(contents.tobytes())


class MpiSource(BatchSource):
    """A source of batches that a reader process has read, and exchanged, ahead of time.

    `set_up` and `close` run in the main thread before and after the loader's thread, so that one
    thread at a time calls MPI.
    """

    def __init__(
        self, pair: Pair, rank: int, set_dir: Path, masks: DynamicMasks | None = None
    ) -> None:
        super().__init__(rank, set_dir, masks)
        self._pair = pair
        self._has_started = False
        self._is_over = False

    def set_up(self, seed: int) -> None:
        """Make the reader open index and sidecars. Raises DataError if it cannot."""
        self._pair.send_json(Tag.SETUP, seed)
        self._receive()

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        """The batches of consecutive steps; the first call starts the reader."""
        if not self._has_started:
            self._pair.send_json(Tag.START, plan.step)
            self._has_started = True
        for ids, denominators in plan.micro_batches_of(self._rank):
            _, contents = self._receive()
            self.received_bytes += len(contents)
            yield make_batch(unpack(contents)[0], ids, **denominators)
        self._pair.send(Tag.CREDIT)

    def close(self) -> None:
        """Tell the reader to end, and drop what it sent ahead.

        It waits some seconds at most, since other readers may block its own. After an error of this
        rank nobody calls it: the launcher ends the readers.
        """
        self._pair.send(Tag.STOP)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._is_over and time.monotonic() < deadline:
            if self._pair.has_message():
                tag, _ = self._pair.receive()
                self._is_over = tag in (Tag.END, Tag.FAILED)
            else:
                time.sleep(POLL_S)

    def _receive(self) -> tuple[Tag, Bytes]:
        tag, contents = self._pair.receive()
        self._is_over = tag in (Tag.END, Tag.FAILED)
        if tag is Tag.FAILED:
            where, problem, remedy = from_json(contents)
            raise DataError(f"reader of rank {self._rank}: {where}", problem, remedy)
        if tag is Tag.END:
            problem = "ended because another rank's did"
            raise DataError(f"reader of rank {self._rank}", problem, "see that rank's message")
        return tag, contents


class PeersEndedError(Exception):
    """Raised when another reader of the group has left: its trainer has stopped, or failed."""


class PeerExchange:
    """Messages among the readers of a group; all must call the same methods in the same order."""

    def __init__(self, readers: "MPI.Comm", first_rank: int) -> None:
        """Exchange among `readers`, which serve the ranks from `first_rank` on."""
        self._readers = readers
        self.ranks = range(first_rank, first_rank + readers.size)
        self.number = readers.rank

    def all_to_all(self, messages: list[Bytes]) -> list[Bytes]:
        """Send a message to each reader; return what each has sent to this one.

        Raises PeersEndedError if one of them has called `leave`.
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
        """Release the others from an exchange that they may have begun."""
        sizes = np.full(len(self.ranks), -1, dtype=np.int64)
        wait_until(self._readers.Ialltoall(sizes, np.empty_like(sizes)).Test)


class StepReader:
    """A reader of one trainer's samples, step by step, exchanged if the policy says so."""

    def __init__(
        self,
        planner: StepPlanner,
        reader: SampleReader,
        rank: int,
        peers: PeerExchange | None,
        token: np.dtype[Any],
    ) -> None:
        """Read for `rank`: without `peers` its samples in the plan, else those drawn for it.

        `token` is the type of a token id on the wire.
        """
        self._planner = planner
        self._reader = reader
        self._rank = rank
        self._peers = peers
        self._token = token

    def packets(self, step: int) -> list[Samples]:
        """The samples of each micro-batch of a step, in the types of the wire.

        Raises DataError if they cannot be read, PeersEndedError if another reader has left.
        """
        plan = self._planner.plan(step)
        if self._peers is None:
            micro_batches = plan.micro_batches_of(self._rank)
            return [narrowed(self._reader.read(ids), self._token) for ids, _ in micro_batches]
        drawn = narrowed(self._reader.read(plan.drawn_ids[self._rank].ravel()), self._token)
        number, drawn_by_each = self._peers.number, len(drawn.lengths)
        wanted = [
            np.divmod(places, drawn_by_each) for places in wanted_places(plan, self._peers.ranks)
        ]
        messages = [pack(take(drawn, row[drawer == number])) for drawer, row in wanted]
        received = join([unpack(message)[0] for message in self._peers.all_to_all(messages)])
        # Packets arrive by drawer, each in the wanted order: undo the sorting by drawer.
        by_drawer = np.argsort(wanted[number][0], kind="stable")
        return split(take(received, np.argsort(by_drawer)), plan.counts[self._rank])

    def leave(self) -> None:
        """Tell the other readers that this one takes part no longer."""
        if self._peers is not None:
            self._peers.leave()


def serve_trainer(pair: Pair, open_reader: Callable[[int], StepReader]) -> None:
    """Serve one trainer from its first message to its last; `open_reader` gets the run's seed.

    A UserError becomes a message to the trainer, which ends the run.
    """
    is_stopped = False
    try:
        tag, seed = pair.receive()
        if tag is Tag.STOP:  # nothing to train
            return
        reader = open_reader(from_json(seed))
        pair.send(Tag.READY)
        _send_steps(pair, reader)
        is_stopped = True
        pair.send(Tag.END)
    except PeersEndedError:
        pair.send(Tag.END)
    except UserError as error:
        pair.send_json(Tag.FAILED, error.args)
    while not is_stopped:
        is_stopped = pair.receive()[0] is Tag.STOP
    pair.flush()


def _send_steps(pair: Pair, reader: StepReader) -> None:
    """Send steps until the trainer stops, at most STEPS_AHEAD that it has not yet taken."""
    step = credit = 0
    while True:
        while credit == 0 or pair.has_message():
            tag, contents = pair.receive()
            if tag is Tag.STOP:
                reader.leave()
                return
            if tag is Tag.START:
                step, credit = from_json(contents), STEPS_AHEAD
            else:
                credit += 1
        for packet in reader.packets(step):
            pair.send(Tag.PACKET, pack(packet))
        step += 1
        credit -= 1


def wanted_places(plan: StepPlan, ranks: range) -> list[Int64Array]:
    """Each rank's samples of a step, as flat places in the group's draws [G, A, b].

    They are in the order of the plan: by forward, and within it as in `ids_of`. Rank number g of
    the group drew the places from g * A * b on. A sample drawn twice, in a step where an epoch
    ends, is matched twice.
    """
    drawn = plan.drawn_ids[ranks.start : ranks.stop]
    places = np.arange(drawn.size).reshape(drawn.shape)
    wanted: list[list[Int64Array]] = [[] for _ in ranks]
    for forward in range(drawn.shape[1]):
        given = [plan.ids_of(rank, forward) for rank in ranks]
        matched = _matched(drawn[:, forward].ravel(), np.concatenate(given))
        found = places[:, forward].ravel()[matched]
        stops = np.cumsum([len(ids) for ids in given])
        for parts, part in zip(wanted, np.split(found, stops[:-1]), strict=True):
            parts.append(part)
    return [np.concatenate(parts) for parts in wanted]


def _matched(drawn: Int64Array, given: Int64Array) -> Int64Array:
    """The index in `drawn` of each of `given`, int64 [n]; both hold the same ids."""
    by_drawn, by_given = np.argsort(drawn, kind="stable"), np.argsort(given, kind="stable")
    assert np.array_equal(drawn[by_drawn], given[by_given]), "the plan deals beyond this group"
    matched = np.empty_like(given)
    matched[by_given] = by_drawn
    return matched

"""Run reader processes, which read, exchange and send a trainer's batches some steps ahead.

Each trainer has one reader process. This is the CPU-assisted padding exchange of arXiv 2208.08124,
but the messages contain only real tokens instead of padded sequences. `Tag` lists all kinds of
message. docs/decisions/0007-reader-processes.md explains the protocol and the threads. Code that
waits for messages polls and sleeps. MPI's own blocking calls are busy loops, which would take a
core away from the trainer.

Shape letters: G ranks of a group, A micro-batches, b sequences drawn per micro-batch.
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
STEPS_AHEAD = 8  # how many steps a reader sends before its trainer has received the first of them


class Tag(IntEnum):
    """Kinds of message between a trainer and its reader process.

    The contents of all messages except packets are JSON.
    """

    # From the trainer.
    SETUP = 1  # sends the run's seed, before samples may be read
    START = 2  # requests batches, starting with the step that it contains
    CREDIT = 3  # confirms that all packets of a step have been received
    STOP = 4  # the last message
    # From the reader.
    READY = 11
    PACKET = 12  # samples of one micro-batch
    FAILED = 13  # the last message, with the three parts of the reader's error
    END = 14  # the last message


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait until `is_done()` returns true, and sleep between the calls."""
    while not is_done():
        time.sleep(POLL_S)


class Pair:
    """One end of the connection between a trainer and its reader process.

    Only one thread at a time may use this object.
    """

    def __init__(self, world: "MPI.Comm", partner: int) -> None:
        """Connect to the process with rank `partner` in `world`."""
        self._world = world
        self._partner = partner
        self._sending: list[tuple[MPI.Request, Any]] = []  # arrays stay alive until they are sent

    def send(self, tag: Tag, contents: Bytes | None = None) -> None:
        """Send a message without waiting. The caller must not change the array afterwards."""
        array = np.empty(0, dtype=np.uint8) if contents is None else contents
        self._sending.append((self._world.Isend(array, self._partner, tag), array))
        self.progress()

    def send_json(self, tag: Tag, value: Any) -> None:
        """Send a value that can be encoded as JSON, without waiting."""
        self.send(tag, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))

    def has_message(self) -> bool:
        """Return True if a message has arrived, so that `receive` would not wait."""
        self.progress()
        return bool(self._world.Iprobe(self._partner))

    def receive(self) -> tuple[Tag, Bytes]:
        """Wait for the next message and return it. Messages arrive in the order of sending."""
        from mpi4py import MPI

        wait_until(self.has_message)
        status = MPI.Status()
        self._world.Probe(self._partner, status=status)  # returns at once
        contents = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        request = self._world.Irecv(contents, self._partner, status.Get_tag())
        wait_until(request.Test)
        return Tag(status.Get_tag()), contents

    def progress(self) -> None:
        """Let MPI advance its transfers, and release the memory of messages that have been sent."""
        self._sending = [sending for sending in self._sending if not sending[0].Test()]

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        while self._sending:
            self.progress()
            time.sleep(POLL_S)


def from_json(contents: Bytes) -> Any:
    """Decode a value that the partner sent with `send_json`."""
    return json.loads(contents.tobytes())


class MpiSource(BatchSource):
    """A source of batches from a reader process, which reads and exchanges them ahead of time.

    The main thread calls `set_up` before the loader's thread starts, and `close` after that thread
    has ended, so that only one thread at a time calls MPI.
    """

    def __init__(
        self, pair: Pair, rank: int, set_dir: Path, masks: DynamicMasks | None = None
    ) -> None:
        super().__init__(rank, set_dir, masks)
        self._pair = pair
        self._has_started = False
        self._is_over = False

    def set_up(self, seed: int) -> None:
        """Tell the reader process to open the index and the sidecars, and wait until they are open.

        Raises DataError if the reader process fails to open them.
        """
        self._pair.send_json(Tag.SETUP, seed)
        self._receive()

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        """Yield the batches of a step. Steps must be consecutive.

        The first call starts the reader process.
        """
        if not self._has_started:
            self._pair.send_json(Tag.START, plan.step)
            self._has_started = True
        for ids, denominators in plan.micro_batches_of(self._rank):
            _, contents = self._receive()
            yield make_batch(unpack(contents)[0], ids, **denominators)
        self._pair.send(Tag.CREDIT)

    def close(self) -> None:
        """Tell the reader process to stop, and discard batches that it sent ahead.

        This method waits at most CLOSE_TIMEOUT_S seconds, because this rank's reader may be waiting
        for other readers. After an error of this rank the method is not called, and the launcher
        stops the readers.
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
            problem = "stopped because another rank's reader stopped"
            remedy = "see the error message of the other rank"
            raise DataError(f"reader of rank {self._rank}", problem, remedy)
        return tag, contents


class PeersEndedError(Exception):
    """Another reader of the group has failed, or has left because its trainer stopped."""


class PeerExchange:
    """The exchange of messages between the readers of a group.

    All readers of the group must call the same methods in the same order.
    """

    def __init__(self, readers: "MPI.Comm", first_rank: int) -> None:
        """Connect to the other readers of the group.

        The processes of `readers` serve consecutive ranks, starting with `first_rank`.
        """
        self._readers = readers
        self.ranks = range(first_rank, first_rank + readers.size)
        self.number = readers.rank

    def all_to_all(self, messages: list[Bytes]) -> list[Bytes]:
        """Send one message to each reader of the group, and return one message from each.

        Raises PeersEndedError if another reader has called `leave`.
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
        """Tell the other readers that this reader takes part in no further exchange.

        They may already have started an exchange and be waiting for this reader.
        """
        sizes = np.full(len(self.ranks), -1, dtype=np.int64)
        wait_until(self._readers.Ialltoall(sizes, np.empty_like(sizes)).Test)


class StepReader:
    """A reader of one trainer's samples, step by step.

    If the balance policy exchanges samples, the reader also exchanges them with the other readers.
    """

    def __init__(
        self,
        planner: StepPlanner,
        reader: SampleReader,
        rank: int,
        peers: PeerExchange | None,
        token: np.dtype[Any],
    ) -> None:
        """Prepare to read for the trainer with rank `rank`.

        Without `peers`, this object reads the samples that the plan assigns to the rank. With
        `peers`, it reads the samples drawn for the rank and exchanges them with the other readers.
        `token` is the dtype of a token id in messages.
        """
        self._planner = planner
        self._reader = reader
        self._rank = rank
        self._peers = peers
        self._token = token

    def packets(self, step: int) -> list[Samples]:
        """Return the samples of each micro-batch of a step, with the dtypes used in messages.

        Raises DataError if the samples cannot be read, and PeersEndedError if another reader has
        left.
        """
        plan = self._planner.plan(step)
        if self._peers is None:
            micro_batches = plan.micro_batches_of(self._rank)
            return [narrowed(self._reader.read(ids), self._token) for ids, _ in micro_batches]
        drawn = narrowed(self._reader.read(plan.drawn_ids[self._rank].ravel()), self._token)
        number, drawn_by_each = self._peers.number, len(drawn.lengths)
        wanted = [
            np.divmod(index, drawn_by_each) for index in wanted_indices(plan, self._peers.ranks)
        ]
        messages = [pack(take(drawn, row[drawer == number])) for drawer, row in wanted]
        received = join([unpack(message)[0] for message in self._peers.all_to_all(messages)])
        # Packets are sorted by the rank that drew them. Restore the wanted order.
        by_drawer = np.argsort(wanted[number][0], kind="stable")
        return split(take(received, np.argsort(by_drawer)), plan.counts[self._rank])

    def leave(self) -> None:
        """Tell the other readers that this reader has stopped."""
        if self._peers is not None:
            self._peers.leave()


def serve_trainer(pair: Pair, open_reader: Callable[[int], StepReader]) -> None:
    """Serve one trainer from its first message to its last.

    `open_reader` is called with the run's seed. If a UserError occurs, it is sent to the trainer,
    which raises it.
    """
    is_stopped = False
    try:
        tag, seed = pair.receive()
        if tag is Tag.STOP:  # the trainer has nothing to train
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
    """Send the batches of consecutive steps until the trainer stops.

    At most STEPS_AHEAD steps are sent ahead of those that the trainer has received.
    """
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


def wanted_indices(plan: StepPlan, ranks: range) -> list[Int64Array]:
    """Return which samples of a step each rank needs, as flat indices into its group's draws.

    The draws are [G, A, b], so the draws of the group's rank number g start at index g * A * b. The
    indices have the order of the plan: they are sorted by micro-batch, and within a micro-batch
    they have the order of `ids_of`. If a sample was drawn twice, which can happen at the end of an
    epoch, each of its draws is used once.
    """
    drawn = plan.drawn_ids[ranks.start : ranks.stop]
    indices = np.arange(drawn.size).reshape(drawn.shape)
    wanted: list[list[Int64Array]] = [[] for _ in ranks]
    for micro_batch in range(drawn.shape[1]):
        assigned = [plan.ids_of(rank, micro_batch) for rank in ranks]
        matched = _match(drawn[:, micro_batch].ravel(), np.concatenate(assigned))
        found = indices[:, micro_batch].ravel()[matched]
        stops = np.cumsum([len(ids) for ids in assigned])
        for parts, part in zip(wanted, np.split(found, stops[:-1]), strict=True):
            parts.append(part)
    return [np.concatenate(parts) for parts in wanted]


def _match(drawn: Int64Array, assigned: Int64Array) -> Int64Array:
    """Return the index in `drawn` of each element of `assigned`, int64 [n].

    Both arrays contain the same sample ids in different orders.
    """
    by_drawn, by_assigned = np.argsort(drawn, kind="stable"), np.argsort(assigned, kind="stable")
    same_ids = np.array_equal(drawn[by_drawn], assigned[by_assigned])
    assert same_ids, "the plan assigns samples to this group that others drew"
    matched = np.empty_like(assigned)
    matched[by_assigned] = by_drawn
    return matched

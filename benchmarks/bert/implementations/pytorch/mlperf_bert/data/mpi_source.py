"""The trainer's end of a reader process: asks for windows of steps, lays out what arrives."""

import time

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.masking import STATIC, Masks
from mlperf_bert.data.mpi_pair import POLL_S, Pair, Tag, from_json
from mlperf_bert.data.step_plan import StepPlan
from mlperf_bert.data.token_packets import Bytes, Packet, unpack

CLOSE_TIMEOUT_S = 10


class MpiSource:
    """Batches that a reader process has read, and exchanged with other readers, ahead of time.

    `set_up` and `close` run in the main thread before and after the loader's thread lives, so
    that one thread at a time calls MPI.
    """

    def __init__(self, pair: Pair, rank: int, masks: Masks = STATIC) -> None:
        self._pair = pair
        self._rank = rank
        self._masks = masks
        self._has_started = False
        self._is_over = False
        self._received_bytes = 0

    @property
    def received_bytes(self) -> int:
        """What the reader has sent so far."""
        return self._received_bytes

    def set_up(self, seed: int) -> None:
        """Have the reader open index and sidecars. Raises DataError where it cannot."""
        self._pair.send_json(Tag.SETUP, seed)
        self._receive()

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """This rank's batches of a step on the host, one per forward; steps follow each other.

        The first call lets the reader begin. Raises DataError where the reader failed.
        """
        if not self._has_started:
            self._pair.send_json(Tag.START, plan.step)
            self._has_started = True
        return tuple(
            self._masks.of(
                make_batch(
                    self._packet().samples(),
                    plan.ids_of(self._rank, forward),
                    mlm_denominator=float(plan.mlm_denominators[self._rank, forward]),
                    nsp_denominator=float(plan.nsp_denominators[self._rank, forward]),
                ),
                plan.step,
            )
            for forward in range(plan.counts.shape[1])
        )

    def close(self) -> None:
        """Tell the reader to end, and drop what it sent ahead.

        Waits some seconds at most: after an error of this rank other readers may hold up its own.
        """
        self._pair.send(Tag.STOP)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._is_over and time.monotonic() < deadline:
            if self._pair.has_message():
                tag, _ = self._pair.receive()
                self._is_over = tag in (Tag.END, Tag.FAILED)
            else:
                time.sleep(POLL_S)

    def _packet(self) -> Packet:
        tag, contents = self._receive()
        self._received_bytes += len(contents)
        if tag is Tag.LAST_PACKET:
            self._pair.send(Tag.CREDIT)
        return unpack(contents)[0]

    def _receive(self) -> tuple[Tag, Bytes]:
        tag, contents = self._pair.receive()
        self._is_over = tag in (Tag.END, Tag.FAILED)
        if tag is Tag.FAILED:
            where, problem, remedy = from_json(contents)
            raise DataError(f"reader of rank {self._rank}: {where}", problem, remedy)
        if tag is Tag.END:
            problem = "ended because another rank's did"
            raise DataError(f"reader of rank {self._rank}", problem, "see what that rank says")
        return tag, contents

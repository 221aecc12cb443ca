"""Balance batches by exchanging samples between ranks, and assign the samples by length.

Each rank reads the samples that were drawn for it. In the published runs, the GPUs exchange samples
before every step (arXiv 2402.02447). In this module, the loader's thread exchanges them some steps
ahead, over its own process group (distributed/session.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlperf_bert.data.balance import StepPlan, assign_serpentine
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.loader import BatchSource
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.token_packets import Bytes, join, narrowed, pack, take, unpack
from mlperf_bert.errors import DataError, UserError

_LEAVING = -1  # a rank that stops sends this instead of a message's size
_LEAVE_TIMEOUT = timedelta(seconds=10)


class ExchangeSource(BatchSource):
    """A source of batches that exchanges samples with the other ranks of its group.

    Each rank reads the samples drawn for it. Every exchange starts by gathering the sizes of the
    messages. The index determines these sizes, too, but if a rank stops or cannot read its samples,
    gathering the sizes tells the other ranks before they wait for its tokens. Gathering takes 8
    bytes per rank. Training does not wait for an exchange, because the loader's thread runs ahead.
    The loss denominators come from the step plan.
    """

    def __init__(
        self,
        reader: SampleReader,
        rank: int,
        group: dist.ProcessGroup,
        token: np.dtype[Any],
        masks: DynamicMasks | None = None,
    ) -> None:
        """Prepare to exchange CPU tensors over `group`, with token ids of dtype `token`.

        If `masks` is None, batches keep their stored masks.
        """
        super().__init__(rank, reader.set_dir, masks)
        self._reader = reader
        self._group = group
        self._token = token
        self._is_over = False

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """Return this rank's batches of a step. All ranks of the group must call this.

        Raises DataError if samples cannot be read or their sizes differ from the plan, or if
        another rank has stopped.
        """
        try:
            return super().micro_batches(plan)
        except UserError:
            self.close()
            raise

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        messages = self._all_gather(self._read(plan))
        drawn_by_micro_batch = zip(*map(unpack, messages), strict=True)
        for drawn, (ids, denominators) in zip(
            drawn_by_micro_batch, plan.micro_batches_of(self._rank), strict=True
        ):
            samples = samples_of_rank(drawn, self._group.rank())
            yield make_batch(samples, ids, **denominators)

    def close(self) -> None:
        """Tell the other ranks that this rank takes part in no further exchange.

        The other ranks may already have started an exchange. They answer at once if they stop as
        well. After an error of this rank they may not answer, so the wait for them is limited.
        """
        if self._is_over:
            return
        self._is_over = True
        _, work = self._gather_sizes(_LEAVING)
        with suppress(RuntimeError):  # raised after a timeout, or if other ranks have stopped
            work.wait(_LEAVE_TIMEOUT)

    def _read(self, plan: StepPlan) -> Bytes:
        """Read the samples drawn for this rank, and encode them as one message.

        The message contains one packet per micro-batch.
        """
        drawn = [self._reader.read(ids) for ids in plan.drawn_ids[self._rank]]
        return np.concatenate([pack(narrowed(samples, self._token)) for samples in drawn])

    def _all_gather(self, message: Bytes) -> list[Bytes]:
        """Gather the messages of all ranks of the group. Returns one message per rank.

        In transit, each message is padded to the size of the largest one.
        """
        sizes_tensor, work = self._gather_sizes(len(message))
        work.wait()
        sizes = sizes_tensor.tolist()
        if _LEAVING in sizes:
            self._is_over = True
            which = dist.get_process_group_ranks(self._group)[sizes.index(_LEAVING)]
            problem = f"rank {which} could not read its samples or has stopped"
            raise DataError("exchange of samples", problem, f"read the error of rank {which}")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(message)] = torch.from_numpy(message)
        together = torch.empty((len(sizes), max(sizes)), dtype=torch.uint8)
        dist.all_gather(list(together.unbind()), padded, group=self._group)
        return [row[:size].numpy() for row, size in zip(together, sizes, strict=True)]

    def _gather_sizes(self, size: int) -> tuple[torch.Tensor, dist.Work]:
        sizes = torch.empty((self._group.size(), 1), dtype=torch.int64)
        own = torch.tensor([size])
        work = dist.all_gather(list(sizes.unbind()), own, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        return sizes.squeeze(1), work


def samples_of_rank(drawn: Sequence[Samples], rank: int) -> Samples:
    """Select the samples of one micro-batch that `rank` gets in its group's exchange.

    `drawn` contains the samples drawn for each rank of the group, the same number for each. The
    samples of all ranks are sorted by descending length and assigned in serpentine order. As in
    `data/balance.py`, samples of equal length keep the order of their ranks and, within a rank, the
    order in which they were drawn.
    """
    together = join(drawn)
    (indices,) = assign_serpentine(together.lengths.astype(np.float64)[np.newaxis], len(drawn))
    return take(together, indices[rank])

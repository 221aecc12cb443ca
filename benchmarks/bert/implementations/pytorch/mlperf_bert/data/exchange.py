"""Batches by a real exchange: ranks read their drawn samples, swap tokens, sort and deal.

The published runs do this on the GPU, on the way to every step (arXiv 2402.02447). Here the
loader's thread does it steps ahead, over a process group of its own (distributed/session.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlperf_bert.data.balance import StepPlan, deal
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.loader import BatchSource
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.token_packets import SIZE_BYTES, Bytes, join, narrowed, pack, take, unpack
from mlperf_bert.errors import DataError, UserError

_LEAVING = -1  # sent in place of a message's size
_LEAVE_TIMEOUT = timedelta(seconds=10)


class ExchangeSource(BatchSource):
    """A source that reads this rank's draws and gets its share of the group's by exchange.

    Every exchange begins with the sizes of the messages. They could be computed from the index, but
    gathering them (8 bytes a rank, off the critical path) also tells the others that a rank could
    not read, or leaves, before they wait for its tokens. Denominators are the plan's.
    """

    def __init__(
        self,
        reader: SampleReader,
        rank: int,
        group: dist.ProcessGroup,
        token: np.dtype[Any],
        masks: DynamicMasks | None = None,
    ) -> None:
        """Exchange over `group`, of CPU tensors; `token` is the type of a token id on the wire."""
        super().__init__(rank, reader.set_dir, masks)
        self._reader = reader
        self._group = group
        self._token = token
        self._is_over = False

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """See `BatchSource`. All ranks must call it; DataError too if another rank cannot go on."""
        try:
            return super().micro_batches(plan)
        except UserError:
            self.close()
            raise

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        messages = self._all_gather(self._read(plan))
        drawn_by_forward = zip(*map(unpack, messages), strict=True)
        for drawn, (ids, denominators) in zip(
            drawn_by_forward, plan.micro_batches_of(self._rank), strict=True
        ):
            samples = dealt(drawn, self._group.rank())
            yield make_batch(samples, ids, **denominators)

    def close(self) -> None:
        """Release the others from an exchange that they may have begun, which would never end.

        They answer at once if they stop as well; after an error of this rank they may not.
        """
        if self._is_over:
            return
        self._is_over = True
        _, work = self._gather_sizes(_LEAVING)
        with suppress(RuntimeError):  # a time-out, or the others have left
            work.wait(_LEAVE_TIMEOUT)

    def _read(self, plan: StepPlan) -> Bytes:
        """One message: a packet for every micro-batch of what the sampler drew for this rank."""
        drawn = [self._reader.read(ids) for ids in plan.drawn_ids[self._rank]]
        return np.concatenate([pack(narrowed(samples, self._token)) for samples in drawn])

    def _all_gather(self, message: Bytes) -> list[Bytes]:
        """The messages of all ranks of the group, padded to the largest on the way."""
        sizes_tensor, work = self._gather_sizes(len(message))
        work.wait()
        sizes = sizes_tensor.tolist()
        if _LEAVING in sizes:
            self._is_over = True
            which = dist.get_process_group_ranks(self._group)[sizes.index(_LEAVING)]
            problem = f"rank {which} could not read its samples or has ended"
            raise DataError("exchange of samples", problem, "see that rank's message")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(message)] = torch.from_numpy(message)
        together = torch.empty((len(sizes), max(sizes)), dtype=torch.uint8)
        dist.all_gather(list(together.unbind()), padded, group=self._group)
        self.received_bytes += (len(sizes) - 1) * (max(sizes) + SIZE_BYTES)
        return [row[:size].numpy() for row, size in zip(together, sizes, strict=True)]

    def _gather_sizes(self, size: int) -> tuple[torch.Tensor, dist.Work]:
        sizes = torch.empty((self._group.size(), 1), dtype=torch.int64)
        own = torch.tensor([size])
        work = dist.all_gather(list(sizes.unbind()), own, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        return sizes.squeeze(1), work


def dealt(drawn: Sequence[Samples], rank: int) -> Samples:
    """The samples that `rank` gets of those its group drew for one micro-batch, longest first.

    All ranks have drawn equally many. They are sorted by the received lengths; ties keep the order
    of the ranks, then that of their draws, as in `data/balance.py`.
    """
    together = join(drawn)
    (places,) = deal(together.lengths.astype(np.float64)[np.newaxis], len(drawn))
    return take(together, places[rank])

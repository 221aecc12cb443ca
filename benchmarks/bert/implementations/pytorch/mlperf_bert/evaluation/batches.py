"""The held-out set as batches, cut by tokens; shapes come from the index, samples later.

A batch depends only on the set and on the tokens of a forward, so that every masked token is
predicted from the same numbers on any number of ranks.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch, empty_batch, make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import IntArray, SampleReader, size_error

# On a GPU BERT-large's products then fill about four waves of tiles or more, a forward takes less
# than 1 GB, and a [T, D] tensor of 16 bits fits an H200's cache: chosen by count, not measured.
# On a CPU 2,048 to 8,192 are equally fast, 16,384 takes 1.1 to 1.2 times as long (one core, fp32,
# 2 layers of hidden 128 and 4 of 256).
TOKENS_CUDA = 16_384
TOKENS_CPU = 4_096


def tokens_per_forward(index: LengthIndex, world_size: int, device: torch.device) -> int:
    """Tokens of a forward: the device's default, or a rank's share of the set if that is less.

    Args:
        index: index of the held-out set.
        world_size: ranks that the config asks for, however many evaluate.
        device: the device that evaluates.
    """
    share = -(-int(index.lengths.sum(dtype=np.int64)) // world_size)
    return min(TOKENS_CUDA if device.type == "cuda" else TOKENS_CPU, share)


def cut_by_tokens(index: LengthIndex, num_tokens: int) -> list[IntArray]:
    """Sample ids of each batch, int64, in the order of length.

    Batches have equally many tokens, up to part of a sequence, and about `num_tokens` at most.
    """
    order = index.order_by_length.astype(np.int64)
    ends = np.cumsum(index.lengths[order], dtype=np.int64)
    num_batches = -(-ends[-1] // num_tokens)
    bounds = np.arange(1, num_batches) * (ends[-1] / num_batches)
    cut = np.split(order, np.searchsorted(ends, bounds, side="right"))
    return [ids for ids in cut if len(ids)]  # none if a sequence is longer than a batch


class HeldOutBatches:
    """One rank's batches, in static tensors that a captured evaluation reads."""

    def __init__(
        self,
        index: LengthIndex,
        reader: SampleReader,
        *,
        num_tokens: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        """Take every `world_size`-th batch of `cut_by_tokens`, short and long ones alike."""
        mine = cut_by_tokens(index, num_tokens)[rank::world_size]
        # The largest first: the memory it leaves in the allocator then fits every other.
        self._ids = sorted(mine, key=lambda ids: -int(index.lengths[ids].sum(dtype=np.int64)))
        self._index = index
        self._reader = reader
        self._device = device
        self._reading: Future[list[UnpaddedBatch]] | None = None
        self._is_filled = False

    @cached_property
    def static(self) -> list[UnpaddedBatch]:
        """The batches on the device, of final shape and address, all zeros until filled."""
        return [self._blank(ids).to(self._device) for ids in self._ids]

    def read_ahead(self) -> None:
        """Start reading the samples in a thread, so that `fill` need not wait for the disk."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="held-out")
        self._reading = thread.submit(self._read)
        thread.shutdown(wait=False)

    def fill(self) -> None:
        """Copy the samples into `static`, once. Raises DataError like `SampleReader.read`."""
        if self._is_filled:
            return
        read = self._read() if self._reading is None else self._reading.result()
        for static, batch in zip(self.static, read, strict=True):
            self._overwrite(static, batch)
        self._reading = None
        self._is_filled = True

    def _blank(self, ids: IntArray) -> UnpaddedBatch:
        """A host batch of the samples' sizes: word 0 throughout, first tokens of each masked."""
        lengths = self._index.lengths[ids].astype(np.int64)
        counts = self._index.masked_counts[ids].astype(np.int64)
        batch = empty_batch(tuple(lengths.tolist()), tuple(counts.tolist()))
        for tensor in _tensors(batch).values():
            tensor.zero_()
        ends, masked_ends = np.cumsum(lengths), np.cumsum(counts)
        batch.cu_seqlens.numpy()[1:] = ends
        first = np.repeat((ends - lengths) - (masked_ends - counts), counts)
        batch.masked_token_index.numpy()[:] = first + np.arange(len(first))
        return batch

    def _read(self) -> list[UnpaddedBatch]:
        denominators = {"mlm_denominator": 1.0, "nsp_denominator": 1.0}
        batches = [make_batch(self._reader.read(ids), ids, **denominators) for ids in self._ids]
        if self._device.type == "cpu":
            return batches
        torch.cuda.set_device(self._device)  # a new thread starts on GPU 0
        return [batch.pin_memory() for batch in batches]

    def _overwrite(self, static: UnpaddedBatch, batch: UnpaddedBatch) -> None:
        if (static.lengths, static.masked_counts) != (batch.lengths, batch.masked_counts):
            raise size_error(self._reader.set_dir)
        new = _tensors(batch)
        for name, tensor in _tensors(static).items():
            tensor.copy_(new[name], non_blocking=True)  # page-locked, so the host does not wait


def _tensors(batch: UnpaddedBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}

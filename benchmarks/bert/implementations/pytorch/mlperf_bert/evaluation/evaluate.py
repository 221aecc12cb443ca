"""Compute the masked-LM accuracy over the whole held-out set, sharded over the ranks.

The set is divided into batches with similar numbers of tokens. The index determines the shapes of
these batches, so no sample is read to compute them. A batch depends only on the set, the device and
the number of ranks in the config. The result for each masked token is therefore the same on any
number of ranks that evaluate with this config.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import Precision, StepMode
from mlperf_bert.data.batch import UnpaddedBatch, empty_batch, make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import IntArray, SampleReader, size_error
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.layers import correct_predictions
from mlperf_bert.step.eager import forward
from mlperf_bert.step.replay import Replay

# The GPU value was calculated, not measured. With it, BERT-large's matrix products fill about four
# waves of tiles or more, a pass needs less than 1 GB, and a 16-bit [T, D] tensor fits into the
# cache of an H200. On a CPU, 2,048 to 8,192 are equally fast, and 16,384 takes 1.1 to 1.2 times as
# long (measured on one core in fp32, with 2 layers of hidden size 128 and 4 layers of 256).
TOKENS_CUDA = 16_384
TOKENS_CPU = 4_096


def tokens_per_micro_batch(index: LengthIndex, world_size: int, device: torch.device) -> int:
    """Return the number of tokens per micro-batch of the evaluation.

    The result is the default number for the device, or a rank's share of the held-out set if that
    is smaller.

    Args:
        index: index of the held-out set.
        world_size: number of ranks in the config, even if another number of ranks evaluates.
        device: the device that evaluates.
    """
    share = -(-int(index.lengths.sum(dtype=np.int64)) // world_size)
    return min(TOKENS_CUDA if device.type == "cuda" else TOKENS_CPU, share)


def cut_by_tokens(index: LengthIndex, num_tokens: int) -> list[IntArray]:
    """Divide the set into batches of about `num_tokens` tokens or fewer.

    Samples are sorted by length, and all batches have about the same number of tokens. Returns the
    sample ids of each batch, int64.
    """
    order = index.order_by_length.astype(np.int64)
    ends = np.cumsum(index.lengths[order], dtype=np.int64)
    num_batches = -(-ends[-1] // num_tokens)
    bounds = np.arange(1, num_batches) * (ends[-1] / num_batches)
    cut = np.split(order, np.searchsorted(ends, bounds, side="right"))
    return [ids for ids in cut if len(ids)]  # a sequence longer than a batch can leave one empty


class HeldOutBatches:
    """The held-out batches of one rank, in tensors whose addresses never change.

    A captured evaluation reads these tensors.
    """

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
        """Allocate every `world_size`-th batch of `cut_by_tokens` for this rank.

        All ranks therefore get batches with similar lengths.
        """
        mine = cut_by_tokens(index, num_tokens)[rank::world_size]
        # The largest batch comes first, so that the memory it returns to the allocator is large
        # enough for all others.
        self._ids = sorted(mine, key=lambda ids: -int(index.lengths[ids].sum(dtype=np.int64)))
        self._index = index
        self._reader = reader
        self._device = device
        self._reading: Future[list[UnpaddedBatch]] | None = None
        self._is_filled = False

    @cached_property
    def static(self) -> list[UnpaddedBatch]:
        """The batches on the device, in their final shapes and at their final addresses.

        The batches contain no samples until `fill` is called.
        """
        return [self._blank(ids).to(self._device) for ids in self._ids]

    def read_ahead(self) -> None:
        """Start to read the samples in a thread, so that `fill` does not wait for the disk."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="held-out")
        self._reading = thread.submit(self._read)
        thread.shutdown(wait=False)

    def fill(self) -> None:
        """Copy the samples into `static`, on the first call only.

        Raises DataError if the samples cannot be read.
        """
        if self._is_filled:
            return
        read = self._read() if self._reading is None else self._reading.result()
        for static, batch in zip(self.static, read, strict=True):
            self._overwrite(static, batch)
        self._reading = None
        self._is_filled = True

    def _blank(self, ids: IntArray) -> UnpaddedBatch:
        """Create a batch in host memory with the sizes of the samples `ids`, without reading them.

        Each input token has id 0, and the masked positions are the first ones of each sequence.
        """
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
            # The host does not wait for copies from page-locked memory.
            tensor.copy_(new[name], non_blocking=True)


def _tensors(batch: UnpaddedBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Numbers of masked tokens and correct predictions over the whole held-out set."""

    correct: int
    masked_tokens: int
    correct_at_mask: int
    mask_inputs: int

    @property
    def mlm_accuracy(self) -> float:
        """Fraction of masked tokens that the model predicts correctly, which is MLPerf's metric."""
        return self.correct / self.masked_tokens

    @property
    def mask_only_accuracy(self) -> float:
        """Accuracy on masked tokens whose input is [MASK].

        On these tokens, the model cannot get a correct prediction by copying its input.
        """
        return self.correct_at_mask / max(1, self.mask_inputs)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of one evaluation and its duration."""

    samples: int
    accuracy: Accuracy
    seconds: float


class Evaluator:
    """An evaluator of a model, in which each rank processes its share of the held-out set.

    The index determines all shapes, so that the evaluation can be captured before any sample is
    read.
    """

    def __init__(
        self,
        index: LengthIndex,
        reader: SampleReader,
        *,
        tokens_per_micro_batch: int,
        rank: int,
        world_size: int,
        device: torch.device,
        precision: Precision,
        step_mode: StepMode = "eager",
    ) -> None:
        self._manifest = index.manifest
        self._batches = HeldOutBatches(
            index,
            reader,
            num_tokens=tokens_per_micro_batch,
            rank=rank,
            world_size=world_size,
            device=device,
        )
        self._world_size = world_size
        self._device = device
        self._precision: Precision = precision
        self._step_mode: StepMode = step_mode
        self._prepared: nn.Module | None = None
        self._replay: Replay[Tensor] | None = None
        # Called at the start and after each batch with the number of finished batches and of all
        # batches of this rank, unless a graph is replayed.
        self.on_batch: Callable[[int, int], None] = lambda done, total: None

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        index: LengthIndex,
        reader: SampleReader,
        info: RankInfo,
        device: torch.device,
    ) -> Self:
        """Create the evaluator of a rank from the config of its run."""
        return cls(
            index,
            reader,
            tokens_per_micro_batch=tokens_per_micro_batch(
                index, config.parallel.world_size, device
            ),
            rank=info.rank,
            world_size=info.world_size,
            device=device,
            precision=config.model.precision,
            step_mode=config.run.step_mode,
        )

    @property
    def num_samples(self) -> int:
        """Number of sequences in the whole held-out set."""
        return self._manifest.num_samples

    @property
    def context_free_accuracy(self) -> float | None:
        """Accuracy of the context-free baseline, 0 .. 1, or None if it is not in the manifest."""
        baseline = self._manifest.baseline
        return None if baseline is None else baseline.context_free_accuracy

    def in_words(self, accuracy: Accuracy) -> str:
        """Describe both accuracies for the console.

        If the accuracies of the context-free baseline are known, the text also states the ratios to
        them.
        """
        baseline = self._manifest.baseline
        words = []
        for name, reached, floor in (
            ("accuracy", accuracy.mlm_accuracy, self.context_free_accuracy),
            (
                "on [MASK] inputs",
                accuracy.mask_only_accuracy,
                baseline and baseline.mask_only_accuracy,
            ),
        ):
            multiple = f" ({reached / floor:.2f} x baseline)" if floor else ""
            words.append(f"{name} {reached:.4f}{multiple}")
        return ", ".join(words)

    def prepare(self, model: nn.Module) -> None:
        """Capture the evaluation of `model` in a CUDA graph if the config captures steps.

        The capture reads no samples. Call this method in the untimed init phase. Afterwards, the
        weights must keep their addresses.
        """
        if self._step_mode == "captured":
            with _evaluation_of(model):
                batches = self._batches.static
                self._replay = Replay(lambda: self._count_batches(model, batches), self._device)
            self._prepared = model

    def __enter__(self) -> Self:
        """Start a thread that reads the samples while training starts."""
        self._batches.read_ahead()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free the captured graph.

        After an error, keep the graph, because the device may never finish its work.
        """
        if kind is None and self._replay is not None:
            self._replay.close()

    def __call__(self, model: nn.Module) -> Accuracy:
        """Evaluate a model that is not wrapped for data parallelism.

        Returns the accuracy over all ranks, which is the same on each rank. The first call reads
        the samples and keeps them on the device.
        """
        assert self._prepared in (None, model)
        with _evaluation_of(model):
            self._batches.fill()
            batches = self._batches.static
            counts = self._replay() if self._replay else self._count_batches(model, batches)
        if self._world_size > 1:
            dist.all_reduce(counts)
        return Accuracy(*counts.tolist())  # host sync, because the host decides when to stop

    def _count_batches(self, model: nn.Module, batches: list[UnpaddedBatch]) -> Tensor:
        """Count masked tokens and correct predictions in some batches.

        Returns int64 [4], in the order of the fields of `Accuracy`.
        """
        counts = torch.zeros(4, dtype=torch.int64, device=self._device)
        self.on_batch(0, len(batches))
        for done, batch in enumerate(batches, start=1):
            counts += self._count_one(model, batch)
            self.on_batch(done, len(batches))
        return counts

    def _count_one(self, model: nn.Module, batch: UnpaddedBatch) -> Tensor:
        correct = correct_predictions(forward(model, batch, self._precision), batch)
        at_mask = batch.input_ids[batch.masked_token_index] == self._manifest.mask_id
        is_used = batch.labels >= 0
        return torch.stack([correct, is_used, correct & at_mask, is_used & at_mask]).sum(dim=1)


@contextmanager
def _evaluation_of(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients inside the with block."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)

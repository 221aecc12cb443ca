"""Masked-LM accuracy over the whole held-out set, sharded over the ranks.

Micro-batches are cut from the length-sorted set and depend on `eval.batch_size` alone, so every
masked token is predicted from the same numbers on any number of ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlperf_bert.config import Precision
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.model.heads import correct_predictions
from mlperf_bert.step import forward


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Counts over the whole held-out set."""

    correct: int
    masked_tokens: int
    correct_at_mask: int
    mask_inputs: int

    @property
    def mlm_accuracy(self) -> float:
        """Correct masked tokens over masked tokens: MLPerf's measure."""
        return self.correct / self.masked_tokens

    @property
    def mask_only_accuracy(self) -> float:
        """The same over those positions whose input is [MASK], so that copying earns nothing."""
        return self.correct_at_mask / max(1, self.mask_inputs)


class Evaluator:
    """Evaluates this rank's share; samples are read at the first call and kept on the device."""

    def __init__(
        self,
        index: LengthIndex,
        reader: SampleReader,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._index = index
        self._gatherer = Gatherer(reader, pin_memory=device.type == "cuda")
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._precision: Precision = precision
        self._batches: list[UnpaddedBatch] = []

    @property
    def num_samples(self) -> int:
        """Sequences of the whole held-out set."""
        return self._index.manifest.num_samples

    def in_words(self, accuracy: Accuracy) -> str:
        """Both accuracies, as multiples of what needs no context where the set states that."""
        baseline = self._index.manifest.baseline
        words = []
        for name, reached, guess in (
            ("accuracy", accuracy.mlm_accuracy, baseline and baseline.context_free_accuracy),
            (
                "on [MASK] inputs",
                accuracy.mask_only_accuracy,
                baseline and baseline.mask_only_accuracy,
            ),
        ):
            multiple = f" ({reached / guess:.2f} x guess)" if guess else ""
            words.append(f"{name} {reached:.4f}{multiple}")
        return ", ".join(words)

    @torch.inference_mode()
    def __call__(self, model: nn.Module) -> Accuracy:
        """Accuracy of a bare model (not wrapped for data parallelism), equal on every rank."""
        if not self._batches:
            self._batches = self._load()
        was_training = model.training
        model.eval()
        counts = torch.zeros(4, dtype=torch.int64, device=self._device)
        for batch in self._batches:
            counts += self._count(model, batch)
        model.train(was_training)
        if self._world_size > 1:
            dist.all_reduce(counts)
        return Accuracy(*counts.tolist())  # host sync: the stop decision is the host's

    def _load(self) -> list[UnpaddedBatch]:
        order = self._index.order_by_length.astype(np.int64)
        starts = range(0, len(order), self._batch_size)[self._rank :: self._world_size]
        return [
            self._gatherer.batch(
                order[start : start + self._batch_size], mlm_denominator=1.0, nsp_denominator=1.0
            ).to(self._device)
            for start in starts
        ]

    def _count(self, model: nn.Module, batch: UnpaddedBatch) -> Tensor:
        correct = correct_predictions(forward(model, batch, self._precision), batch)
        inputs = batch.input_ids[batch.masked_token_index]
        at_mask = inputs == self._index.manifest.mask_id
        return torch.stack(
            [
                correct.sum(),
                torch.tensor(correct.numel(), device=self._device),
                (correct & at_mask).sum(),
                at_mask.sum(),
            ]
        )

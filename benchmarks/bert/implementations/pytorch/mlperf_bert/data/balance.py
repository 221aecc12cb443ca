"""Who gets which samples of a step, and what that means for loss and load: no communication.

Every rank computes the whole plan from the length index, so denominators and imbalance are known
everywhere without a collective (docs/glossary.md: balance policy, imbalance).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array, Sampler

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step of the whole job. R ranks, A accumulation steps, b sequences per forward."""

    step: int
    sample_ids: Int64Array  # [R, A, b]
    mlm_denominators: Float64Array  # [R, A]
    nsp_denominators: Float64Array  # [R, A]
    num_tokens: int
    imbalance_tokens: float  # largest over mean of the ranks' tokens
    imbalance_cost: float  # the same of length + length**2 / attention_length


class StepPlanner:
    """Turns a sampler's global batches into step plans.

    A rank's loss is its summed cross-entropy over a denominator, and DDP averages over ranks. With
    `global` normalisation the denominator is the whole update's count divided by the world size,
    so that average is the exact mean over the update, whoever computed what; with `per_rank` it is
    the forward's own count times the accumulation steps, as the published runs do.
    """

    def __init__(
        self,
        sampler: Sampler,
        lengths: NDArray[np.uint16],
        masked_counts: NDArray[np.uint8],
        *,
        world_size: int,
        grad_accum_steps: int,
        loss_normalization: Literal["global", "per_rank"],
        attention_length: float,
    ) -> None:
        """Plan over the length index; both arrays are [N] and may be memory maps.

        `attention_length` is the length at which attention costs as much as all the rest of the
        encoder.
        """
        self._sampler = sampler
        self._lengths = lengths
        self._masked_counts = masked_counts
        self._shape = (world_size, grad_accum_steps, -1)
        self._loss_normalization = loss_normalization
        self._attention_length = attention_length

    def plan(self, step: int) -> StepPlan:
        """The plan of a step counted from 1."""
        sample_ids = self._sampler.global_batch(step).reshape(self._shape)
        lengths = self._lengths[sample_ids].astype(np.float64)
        masked = self._masked_counts[sample_ids].sum(axis=2, dtype=np.float64)
        sequences = np.full(masked.shape, float(sample_ids.shape[2]))
        cost = lengths + lengths**2 / self._attention_length
        return StepPlan(
            step=step,
            sample_ids=sample_ids,
            mlm_denominators=self._denominators(masked),
            nsp_denominators=self._denominators(sequences),
            num_tokens=int(lengths.sum()),
            imbalance_tokens=_imbalance(lengths),
            imbalance_cost=_imbalance(cost),
        )

    def _denominators(self, counts: Float64Array) -> Float64Array:
        world_size, grad_accum_steps = counts.shape
        denominators: Float64Array = np.full(counts.shape, counts.sum() / world_size)
        if self._loss_normalization == "per_rank":
            denominators = counts * grad_accum_steps
        return denominators


def _imbalance(cost: Float64Array) -> float:
    per_rank = cost.sum(axis=(1, 2))
    return float(per_rank.max() / per_rank.mean())

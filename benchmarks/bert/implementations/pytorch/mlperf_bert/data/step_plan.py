"""The plan of a step: which samples each forward of each rank gets, and the loss's denominators.

Every rank computes the whole plan from the length index, so denominators and imbalance are known
everywhere without a collective. Shapes: R ranks, A accumulation steps, b sequences a forward.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import BalanceModel, LossNormalization
from mlperf_bert.data.balance import AS_DRAWN, TOKENS, Balance, CostModel, Float64Array
from mlperf_bert.data.mask_counts import CountsByLength
from mlperf_bert.data.permutation import Int64Array
from mlperf_bert.data.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step of the whole job."""

    step: int
    sample_ids: Int64Array  # [n]: those of rank 0's first forward, of its second, and so on
    counts: Int64Array  # [R, A]: how many each forward gets
    drawn_ids: Int64Array  # [R, A, b]: as the sampler drew them, before balancing
    mlm_denominators: Float64Array  # [R, A]
    nsp_denominators: Float64Array  # [R, A]
    num_tokens: Int64Array  # [R, A]
    num_masked: Int64Array  # [R, A]
    imbalance_tokens: float  # largest over mean of the ranks' tokens
    imbalance_cost: float  # the same of the cost model

    def ids_of(self, rank: int, forward: int) -> Int64Array:
        """Sample ids, int64 [counts[rank, forward]], of one forward."""
        number = rank * self.counts.shape[1] + forward
        stop = int(self.counts.ravel()[: number + 1].sum())
        return self.sample_ids[stop - int(self.counts[rank, forward]) : stop]


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
        masked_counts: NDArray[np.uint8] | CountsByLength,
        *,
        world_size: int,
        grad_accum_steps: int = 1,
        loss_normalization: LossNormalization = "global",
        balance: Balance = AS_DRAWN,
        balance_model: BalanceModel = "tokens",
        cost: CostModel = TOKENS,
    ) -> None:
        """Plan over the length index; both arrays are [N] and may be memory maps.

        `balance_model` says what the balance policy makes even: tokens, or `cost`.
        """
        self.sampler = sampler
        self._lengths = lengths
        self._masked_counts = masked_counts
        self._shape = (world_size, grad_accum_steps, -1)
        self._loss_normalization = loss_normalization
        self._balance = balance
        self._balanced = cost if balance_model == "cost" else TOKENS
        self._cost = cost

    def plan(self, step: int) -> StepPlan:
        """The plan of a step counted from 1."""
        drawn = self.sampler.global_batch(step)
        drawn_lengths = self._lengths[drawn]
        assignment = self._balance(self._balanced(drawn_lengths).reshape(self._shape))
        lengths = drawn_lengths[assignment.places]
        sample_ids = drawn[assignment.places]
        counts = assignment.counts
        num_tokens = _sums(lengths, counts).astype(np.int64)
        num_masked = _sums(self._masked_counts[sample_ids], counts).astype(np.int64)
        return StepPlan(
            step=step,
            sample_ids=sample_ids,
            counts=counts,
            drawn_ids=drawn.reshape(self._shape),
            mlm_denominators=self._denominators(num_masked),
            nsp_denominators=self._denominators(counts),
            num_tokens=num_tokens,
            num_masked=num_masked,
            imbalance_tokens=_imbalance(num_tokens),
            imbalance_cost=_imbalance(_sums(self._cost(lengths), counts)),
        )

    def _denominators(self, counts: Int64Array) -> Float64Array:
        world_size, grad_accum_steps = counts.shape
        denominators = np.full(counts.shape, counts.sum() / world_size, dtype=np.float64)
        if self._loss_normalization == "per_rank":
            denominators = (counts * grad_accum_steps).astype(np.float64)
        return denominators


def _sums(values: NDArray[Any], counts: Int64Array) -> Float64Array:
    """Sums over the samples of each forward, float64 [R, A]; every forward has at least one."""
    flat = counts.ravel()
    starts = np.cumsum(flat) - flat
    sums: Float64Array = np.add.reduceat(values.astype(np.float64), starts).reshape(counts.shape)
    return sums


def _imbalance(cost: NDArray[Any]) -> float:
    per_rank = cost.sum(axis=1)
    return float(per_rank.max() / per_rank.mean())

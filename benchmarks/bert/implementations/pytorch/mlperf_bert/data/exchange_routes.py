"""Who sends which samples to whom, where all know the plan: for the exchange among readers.

Shapes: G ranks of a group, K steps of a window, A forwards, b sequences drawn for each.
"""

from collections.abc import Sequence

import numpy as np

from mlperf_bert.data.permutation import Int64Array
from mlperf_bert.data.step_plan import StepPlan


def wanted_places(plans: Sequence[StepPlan], ranks: range) -> list[Int64Array]:
    """What each rank of a group gets, as places in the group's draws [G, K, A, b], flattened.

    In the order of the plan: by step, by forward, and within it as `ids_of`. Rank number g of the
    group drew the places g * K * A * b and following. A sample drawn twice, where an epoch ends
    within a step, is matched twice.
    """
    drawn = np.stack([plan.drawn_ids[ranks.start : ranks.stop] for plan in plans], axis=1)
    places = np.arange(drawn.size).reshape(drawn.shape)
    wanted: list[list[Int64Array]] = [[] for _ in ranks]
    for step, plan in enumerate(plans):
        for forward in range(drawn.shape[2]):
            given = [plan.ids_of(rank, forward) for rank in ranks]
            matched = _matched(drawn[:, step, forward].ravel(), np.concatenate(given))
            found = places[:, step, forward].ravel()[matched]
            stops = np.cumsum([len(ids) for ids in given])
            for parts, part in zip(wanted, np.split(found, stops[:-1]), strict=True):
                parts.append(part)
    return [np.concatenate(parts) for parts in wanted]


def _matched(drawn: Int64Array, given: Int64Array) -> Int64Array:
    """Where each of `given` is in `drawn`, int64 [n]; both hold the same ids."""
    by_drawn, by_given = np.argsort(drawn, kind="stable"), np.argsort(given, kind="stable")
    assert np.array_equal(drawn[by_drawn], given[by_given]), "the plan deals beyond this group"
    matched = np.empty_like(given)
    matched[by_given] = by_drawn
    return matched

"""Step planners over made-up lengths."""

import numpy as np

from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.index import masked_count_table
from mlperf_bert.data.sampler import make_sampler


def planner_of(
    lengths,
    global_batch_size,
    sampler="uniform",
    *,
    seed=3,
    masked_counts=None,
    world_size=1,
    **options,
):
    """A planner over these lengths; without `masked_counts` 15 % of them, 76 at most."""
    if masked_counts is None:
        masked_counts = masked_count_table(int(lengths.max()), 76, 0.15)[lengths]
    return StepPlanner(
        make_sampler(
            sampler,
            order_by_length=np.argsort(lengths, kind="stable"),
            length_histogram=np.bincount(lengths, minlength=int(lengths.max()) + 1).tolist(),
            global_batch_size=global_batch_size,
            seed=seed,
        ),
        lengths.astype(np.uint16),
        masked_counts.astype(np.uint8),
        world_size=world_size,
        **options,
    )

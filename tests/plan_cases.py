"""Step planners over made-up lengths, and what fixtures of `plan` are."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.length_histogram import masked_counts_of
from mlperf_bert.data.sampler import make_sampler

Asked = Callable[..., Any]  # facts, or with `told` lines, by the words of a question


def planner_of(
    lengths: NDArray[Any],
    global_batch_size: int,
    sampler: SamplerName = "uniform",
    *,
    seed: int = 3,
    masked_counts: NDArray[Any] | None = None,
    world_size: int = 1,
    **options: Any,
) -> StepPlanner:
    """A planner over these lengths; without `masked_counts` 15 % of them, 76 at most."""
    if masked_counts is None:
        masked_counts = masked_counts_of(lengths, 76)
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

"""A sampler by its name in the config."""

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.sampler import (
    QuantileSampler,
    Sampler,
    UniformSampler,
    default_quantiles,
)
from mlperf_bert.data.strata import (
    PUBLISHED_COUNTS,
    PublishedStrataSampler,
    Strata,
    StrataSampler,
)


def make_sampler(
    name: SamplerName,
    *,
    order_by_length: NDArray[Any],
    length_histogram: Sequence[int],
    global_batch_size: int,
    seed: int,
    quantiles: int | Literal["auto"] = "auto",
) -> Sampler:
    """The sampler of a set, given its ids by length [N] and how many have k tokens, k = 0 ...

    Raises ConfigError where the sampler cannot serve the batch or the set.
    """
    if name == "uniform":
        return UniformSampler(len(order_by_length), global_batch_size, seed)
    if name == "quantile":
        if quantiles == "auto":
            quantiles = default_quantiles(global_batch_size)
        return QuantileSampler(order_by_length, global_batch_size, quantiles, seed)
    strata = Strata.of(order_by_length, length_histogram)
    if name == "strata":
        return StrataSampler(strata, global_batch_size, seed)
    return PublishedStrataSampler(strata, PUBLISHED_COUNTS[name], global_batch_size, seed)

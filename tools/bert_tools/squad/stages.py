"""Cuts a model's layers into pipeline stages so that the slowest has as little to do as can be."""

from collections.abc import Sequence
from functools import cache

from bert_tools.bench.flops import model_flops
from bert_tools.squad.measures import squad_flops
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection


def layer_costs(model: ModelSection, length: float) -> list[float]:
    """Operations of each layer for a window of so many tokens, with the scores in the last.

    The embeddings are looked up: no products.
    """
    flops = model_flops(model, [length], [0])
    layers = flops.encoder + flops.attention
    costs = [layers / model.num_layers] * model.num_layers
    costs[-1] += squad_flops(model, [length]) - layers
    return costs


def balanced_split(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part begins, and at the end how many costs there are; no part is empty.

    The largest sum of a part is the least that neighbours allow: exact, by dynamic programming. Of
    equal splits the one with more in the later parts is taken, as the first has the embeddings.

    Raises:
        ConfigError: more parts than costs.
    """
    count = len(costs)
    if parts > count:
        problem = f"has {parts} stages, the model {count} layers"
        raise ConfigError("--engine", problem, "use fewer stages, or a deeper model")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def best(end: int, number: int) -> tuple[float, int]:
        """Largest part of the first `end` costs in `number` parts, and where the last begins."""
        if number == 1:
            return before[end], 0
        tries = (
            (max(best(begin, number - 1)[0], before[end] - before[begin]), begin)
            for begin in range(number - 1, end)
        )
        return min(tries)

    bounds = [count]
    for number in range(parts, 0, -1):
        bounds.append(best(bounds[-1], number)[1])
    return bounds[::-1]

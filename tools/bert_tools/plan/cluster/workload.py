"""Computes every rank's work in a step from the lengths of its samples, for R ranks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_tools.plan.cluster.machine import Scope
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import BalancePolicy

Float64Array = NDArray[np.float64]

_SPREAD_STEPS = 1000  # the drawn steps are spread over the first thousand
_INPUT_SCOPES: dict[BalancePolicy, Scope] = {
    "exchange_global": "world",
    "exchange_local": "node",
}
_QUERY_TILE, _KEY_TILE = 16, 64  # tiles of an attention kernel that skips padding


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of R ranks in one micro-batch.

    The counts are float64 [R]. All of them except `real_tokens` include padding. Before the forward
    pass, the ranks of `input_scope` (those of a node, or all ranks) gather `input_bytes`.
    """

    tokens: Float64Array
    real_tokens: Float64Array
    attended: Float64Array  # pairs of a query and a key
    masked: Float64Array  # rows of the masked-LM head
    sequences: Float64Array
    input_bytes: float = 0.0
    input_scope: Scope = "none"

    @property
    def world_size(self) -> int:
        """Return the number of ranks, R."""
        return len(self.tokens)


def draw_steps(config: RunConfig, index: SampleIndex, draws: int) -> list[Workload]:
    """Plan `draws` steps, spread over the first thousand, and return the work of each one.

    A rank's work is the mean of its micro-batches. In a captured step, all micro-batches are as
    large as the largest one. The program pads them to a capacity, which is up to 1.3% larger. This
    makes steps up to 0.4% longer. Raises ConfigError, as `SampleIndex.planner` does.
    """
    planner = index.planner(config)
    is_captured = config.run.step_mode == "captured"
    works = []
    for step in np.unique(np.linspace(1, _SPREAD_STEPS, draws).astype(int)).tolist():
        plan = planner.plan(step)
        every = plan.counts.ravel()
        attended = _attended(index.lengths[plan.sample_ids])
        attended = np.add.reduceat(attended, np.cumsum(every) - every)
        real, masked = plan.num_tokens.mean(axis=1), plan.num_masked.mean(axis=1)
        works.append(
            Workload(
                tokens=np.full_like(real, plan.num_tokens.max()) if is_captured else real,
                real_tokens=real,
                attended=attended.reshape(plan.counts.shape).mean(axis=1),
                masked=np.full_like(masked, plan.num_masked.max()) if is_captured else masked,
                sequences=plan.counts.mean(axis=1),
                input_bytes=float(index.exchanged_bytes(config, plan)),
                input_scope=_INPUT_SCOPES.get(config.data.balance, "none"),
            )
        )
    return works


def even_workload(world_size: int, sequences: int, length: int, masked: int) -> Workload:
    """Return a workload in which `world_size` ranks have the same work.

    Each rank has `sequences` sequences of `length` tokens, of which `masked` are masked.
    """
    lengths = np.full((world_size, sequences), length)
    tokens = lengths.sum(axis=1).astype(np.float64)
    return Workload(
        tokens=tokens,
        real_tokens=tokens,
        attended=_attended(lengths).sum(axis=1),
        masked=np.full(world_size, float(masked * sequences)),
        sequences=np.full(world_size, float(sequences)),
    )


def _attended(lengths: NDArray[np.integer]) -> Float64Array:
    """Return the number of query-key pairs that the kernel computes per sequence, float64 [n].

    `lengths`, [n], has the number of tokens of each sequence.
    """
    real = lengths.astype(np.float64)
    queries = np.ceil(real / _QUERY_TILE) * _QUERY_TILE
    pairs: Float64Array = queries * np.ceil(real / _KEY_TILE) * _KEY_TILE
    return pairs

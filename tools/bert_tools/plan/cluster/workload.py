"""Work of every rank in a step, from the lengths that the samplers and balance policies deal.

Shape letters: R ranks, b sequences per rank and step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_tools.plan.cluster.machine import Scope
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, SamplerName
from mlperf_bert.data.balance import Balance, StepPlan, StepPlanner
from mlperf_bert.data.sampler import make_sampler
from mlperf_bert.data.token_packets import gathered_bytes
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import token_dtype

Float64Array = NDArray[np.float64]

_SPREAD_STEPS = 1000  # that the drawn ones are taken from
_INPUT_SCOPES: dict[BalancePolicy, Scope] = {
    "exchange_global": "world",
    "exchange_local": "node",
}
_QUERY_TILE, _KEY_TILE = 16, 64  # of attention that knows each sequence's length


@dataclass(frozen=True, slots=True)
class Workload:
    """One forward of R ranks. Counts are those of the device, with padding; float64 [R].

    `real_tokens` leaves padding out. `input_bytes` are gathered by the ranks of a node, or by all
    ranks, before the forward.
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
        """Number of ranks, R."""
        return len(self.tokens)


def draw_steps(
    index: SampleIndex,
    *,
    nodes: int,
    gpus_per_node: int,
    draws: int,
    local_batch_size: int,
    grad_accum_steps: int = 1,
    sampler: SamplerName = "uniform",
    balance: BalancePolicy = "none",
    counts: CountsPerRank = "equal",
    is_captured: bool = False,
) -> list[Workload]:
    """Draw several steps, evenly spread over the first thousand, settings as in a config.

    A captured step pads its forwards to what the step's largest one has. Raises ConfigError.
    """
    ranks = nodes * gpus_per_node
    batch = ranks * local_batch_size * grad_accum_steps
    if batch > len(index.lengths):
        problem = f"makes a global batch of {batch:,} sequences"
        remedy = f"lower it or the ranks: {index.source} has {len(index.lengths):,} samples"
        raise ConfigError("parallel.local_batch_size", problem, remedy)
    planner = StepPlanner(
        make_sampler(
            sampler,
            order_by_length=index.order_by_length,
            length_histogram=index.length_histogram,
            global_batch_size=batch,
            seed=0,
        ),
        index.lengths,
        index.masked_counts,
        world_size=ranks,
        grad_accum_steps=grad_accum_steps,
        balance=Balance(policy=balance, ranks_per_node=gpus_per_node, counts=counts),
    )
    scope = _INPUT_SCOPES.get(balance, "none")
    steps = np.unique(np.linspace(1, _SPREAD_STEPS, draws).astype(int)).tolist()
    gatherers = {"world": ranks, "node": gpus_per_node}.get(scope, 0)
    return [
        _forward_of(planner.plan(step), index, scope, gatherers, is_captured=is_captured)
        for step in steps
    ]


def _forward_of(
    plan: StepPlan, index: SampleIndex, scope: Scope, gatherers: int, *, is_captured: bool
) -> Workload:
    """The first forward of a step, whose samples `gatherers` ranks gather from each other."""
    every = plan.counts.ravel()
    attended = _attended(index.lengths[plan.sample_ids])
    attended = np.add.reduceat(attended, np.cumsum(every) - every)
    real = plan.num_tokens[:, 0].astype(np.float64)
    masked = plan.num_masked[:, 0].astype(np.float64)
    received = 0
    if gatherers:
        drawn = plan.drawn_ids[:gatherers]
        token = token_dtype(index.vocab_size)
        received = gathered_bytes(index.lengths[drawn], index.masked_counts[drawn], token)
    return Workload(
        tokens=np.full_like(real, real.max()) if is_captured else real,
        real_tokens=real,
        attended=attended.reshape(plan.counts.shape)[:, 0],
        masked=np.full_like(masked, masked.max()) if is_captured else masked,
        sequences=plan.counts[:, 0].astype(np.float64),
        input_bytes=float(received),
        input_scope=scope,
    )


def even_workload(world_size: int, sequences: int, length: int, masked: int) -> Workload:
    """Work of equal ranks: `sequences` of `length` tokens with `masked` positions each."""
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
    """Pairs of query and key that the kernel computes for each sequence, float64 [n]."""
    real = lengths.astype(np.float64)
    queries = np.ceil(real / _QUERY_TILE) * _QUERY_TILE
    pairs: Float64Array = queries * np.ceil(real / _KEY_TILE) * _KEY_TILE
    return pairs

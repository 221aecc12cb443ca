"""Work of every rank in a step, from the lengths that the samplers and balance policies deal.

Shape letters: R ranks, b sequences (or packed rows) per rank and step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bert_tools.plan.cluster.machine import AttentionLayout, Layout, Scope, Software
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, SamplerName
from mlperf_bert.data.balance import Assignment, Balance, StepPlanner
from mlperf_bert.data.sampler import make_sampler
from mlperf_bert.data.shards import IntArray
from mlperf_bert.data.token_packets import gathered_bytes
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import token_dtype

Float64Array = NDArray[np.float64]

_SPREAD_STEPS = 1000  # that the drawn ones are taken from
_ROW = 512  # positions of a padded or packed row
SEQUENCES_PER_PACK = 2  # of rows of 512 with at most three sequences: 1.999 (arXiv 2107.02027)
_INPUT_SCOPES: dict[BalancePolicy, Scope] = {
    "exchange_global": "world",
    "exchange_local": "node",
}
_TILE = 128  # rows of a tile of a product, and the classes of the published attention kernels
_QUERY_TILE, _KEY_TILE = 16, 64  # of attention that knows each sequence's length


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealing:
    """Settings that draw and deal the batches, named as in the config's section `data`.

    Ours deals samples sorted by length in a snake, most published programs in one direction.
    """

    local_batch_size: int  # sequences of a rank and forward, or packed rows
    grad_accum_steps: int = 1
    sampler: SamplerName = "uniform"
    balance: BalancePolicy = "none"
    deal: Literal["snake", "one_direction"] = "snake"
    counts: CountsPerRank = "equal"
    seed: int = 0

    def sequences(self, layout: Layout) -> int:
        """Sequences per rank and forward."""
        return self.local_batch_size * (SEQUENCES_PER_PACK if layout == "packed_rows" else 1)


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
    dealing: Dealing,
    program: Software,
    nodes: int,
    gpus_per_node: int,
    draws: int,
) -> list[Workload]:
    """Draw several steps, evenly spread over the first thousand. Raises ConfigError."""
    forwards = dealing.grad_accum_steps
    batch = nodes * gpus_per_node * dealing.sequences(program.layout) * forwards
    if batch > len(index.lengths):
        problem = f"makes a global batch of {batch:,} sequences"
        remedy = f"lower it or the ranks: {index.source} has {len(index.lengths):,} samples"
        raise ConfigError("--local-batch-size", problem, remedy)
    sampler = make_sampler(
        dealing.sampler,
        order_by_length=index.order_by_length,
        length_histogram=index.length_histogram,
        global_batch_size=batch,
        seed=dealing.seed,
    )
    balance: Callable[[Float64Array], Assignment] = Balance(
        policy=dealing.balance, ranks_per_node=gpus_per_node, counts=dealing.counts
    )
    if dealing.deal == "one_direction" and dealing.balance not in ("none", "presort_global"):
        group = nodes * gpus_per_node if dealing.balance == "exchange_global" else gpus_per_node
        balance = partial(in_one_direction, group_size=group)
    planner = StepPlanner(
        sampler,
        index.lengths,
        index.masked_counts,
        world_size=nodes * gpus_per_node,
        grad_accum_steps=forwards,
        balance=balance,
    )
    scope = _INPUT_SCOPES.get(dealing.balance, "none")
    steps = np.unique(np.linspace(1, _SPREAD_STEPS, draws).astype(int)).tolist()
    works = []
    for plan in map(planner.plan, steps):
        every, counts = plan.counts.ravel(), plan.counts[:, 0]
        attended = _attended(index.lengths[plan.sample_ids], program.attention)
        attended = np.add.reduceat(attended, np.cumsum(every) - every)
        work = Workload(
            tokens=plan.num_tokens[:, 0].astype(np.float64),
            real_tokens=plan.num_tokens[:, 0].astype(np.float64),
            attended=attended.reshape(plan.counts.shape)[:, 0],
            masked=plan.num_masked[:, 0].astype(np.float64),
            sequences=counts.astype(np.float64),
        )
        if scope != "none":
            drawn = plan.drawn_ids[: len(counts) if scope == "world" else gpus_per_node]
            received = _received_bytes(index, drawn, program)
            work = replace(work, input_bytes=received, input_scope=scope)
        works.append(_padded(work, program, index.max_length))
    return works


def in_one_direction(cost: Float64Array, group_size: int) -> Assignment:
    """Deal each forward's samples, the largest first, to neighbouring ranks, every row from rank 0.

    `cost` is [R, A, b]; `group_size` ranks share what they have drawn, as published programs do.
    """
    ranks, forwards, size = cost.shape
    places = np.arange(cost.size).reshape(-1, group_size, forwards, size).transpose(0, 2, 1, 3)
    drawn = places.reshape(-1, forwards, group_size * size)
    order = np.argsort(-cost.ravel()[drawn], axis=2, kind="stable")
    rows = np.take_along_axis(drawn, order, axis=2).reshape(-1, forwards, size, group_size)
    return Assignment(rows.transpose(0, 3, 1, 2).ravel(), np.full((ranks, forwards), size))


def even_workload(
    world_size: int, sequences: int, length: int, masked: int, program: Software
) -> Workload:
    """Work of equal ranks: `sequences` of `length` tokens with `masked` positions each.

    Programs with padded or packed rows compute rows of 512 tokens for them.
    """
    lengths = np.full((world_size, sequences), length)
    real = lengths.sum(axis=1).astype(np.float64)
    work = Workload(
        tokens=real,
        real_tokens=real,
        attended=_attended(lengths, program.attention).sum(axis=1),
        masked=np.full(world_size, float(masked * sequences)),
        sequences=np.full(world_size, float(sequences)),
    )
    return _padded(work, program, _ROW)


def _received_bytes(index: SampleIndex, drawn: IntArray, program: Software) -> float:
    if program.layout == "capacity":
        token = token_dtype(index.vocab_size)
        return gathered_bytes(index.lengths[drawn], index.masked_counts[drawn], token)
    # The published packets are padded rows: four of 16 bits a position, and a label.
    return float(2 * (4 * index.max_length + 1) * drawn.size)


def _padded(work: Workload, program: Software, max_length: int) -> Workload:
    """The work on the device for the program's layout, in place of the real tokens."""
    tokens, masked = work.real_tokens, work.masked
    if program.layout == "capacity":
        tokens, masked = np.full_like(tokens, tokens.max()), np.full_like(masked, masked.max())
    elif program.layout == "padded_rows":
        tokens = work.sequences * max_length
    elif program.layout == "packed_rows":
        tokens = work.sequences / SEQUENCES_PER_PACK * max_length
    return replace(work, tokens=tokens, masked=tokens if program.head_rows == "all" else masked)


def _attended(lengths: NDArray[np.integer], layout: AttentionLayout) -> Float64Array:
    """Pairs of query and key that a kernel computes for each sequence, float64 [n]."""
    real = lengths.astype(np.float64)
    tile = _KEY_TILE if layout == "tile" else _TILE
    attended_to = np.full_like(real, real.max()) if layout == "longest" else real
    queries = np.ceil(real / _QUERY_TILE) * _QUERY_TILE
    pairs: Float64Array = queries * np.ceil(attended_to / tile) * tile
    return pairs

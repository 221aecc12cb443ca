"""What every rank has to compute in a step: lengths as the project's samplers and policies deal.

Shape letters: R ranks, b sequences (or packed rows) of a rank and step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bert_tools.plan.cluster.software import AttentionLayout, Layout, Software
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import BalancePolicy, Deal, SamplerName
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.sampler import make_sampler
from mlperf_bert.data.token_packets import gathered_bytes, token_dtype

Float64Array = NDArray[np.float64]

InputScope = Literal["none", "node", "world"]

_SPREAD_STEPS = 1000  # that the drawn ones are taken from
_ROW = 512  # positions of a padded or packed row
SEQUENCES_PER_PACK = 2  # of rows of 512 with at most three sequences: 1.999 (arXiv 2107.02027)
_INPUT_SCOPES: dict[BalancePolicy, InputScope] = {
    "exchange_global": "world",
    "exchange_local": "node",
}
_TILE = 128  # rows of a tile of a product, and the classes of the published attention kernels
_QUERY_TILE, _KEY_TILE = 16, 64  # of attention that knows each sequence's length


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealing:
    """Which batches are drawn, and who gets what of them: names of the config's section `data`."""

    local_batch_size: int  # sequences of a rank and step, or packed rows
    sampler: SamplerName = "uniform"
    balance: BalancePolicy = "none"
    deal: Deal = "snake"
    seed: int = 0

    def sequences(self, layout: Layout) -> int:
        """Sequences of a rank and step."""
        return self.local_batch_size * (SEQUENCES_PER_PACK if layout == "packed_rows" else 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of R ranks. Counts as the device computes them, padding included; float64 [R].

    `real_tokens` leaves padding out. `input_bytes` is what the ranks of a node, or all, gather
    before the forward.
    """

    tokens: Float64Array
    real_tokens: Float64Array
    attended: Float64Array  # pairs of a query and a key
    masked: Float64Array  # rows of the masked-LM head
    sequences: Float64Array
    input_bytes: float
    input_scope: InputScope = "none"

    @property
    def world_size(self) -> int:
        """R."""
        return len(self.tokens)


def draw_steps(
    index: SampleIndex,
    dealing: Dealing,
    program: Software,
    nodes: int,
    gpus_per_node: int,
    draws: int,
) -> list[Workload]:
    """Several steps of the run, evenly spread over its first thousand. Raises ConfigError."""
    world_size = nodes * gpus_per_node
    batch = world_size * dealing.sequences(program.layout)
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
    balance = Balance(policy=dealing.balance, ranks_per_node=gpus_per_node, deal=dealing.deal)
    planner = StepPlanner(
        sampler, index.lengths, index.masked_counts, world_size=world_size, balance=balance
    )
    steps = np.unique(np.linspace(1, _SPREAD_STEPS, draws).astype(int)).tolist()
    return [_workload(index, dealing, program, planner, step, gpus_per_node) for step in steps]


def even_workload(
    world_size: int, sequences: int, length: int, masked: int, program: Software
) -> Workload:
    """All ranks have the same: `sequences` of `length` tokens, `masked` positions each.

    Programs with padded or packed rows compute rows of 512 for them.
    """
    lengths = np.full((world_size, sequences), length, dtype=np.int64)
    real = lengths.sum(axis=1).astype(np.float64)
    return _padded(
        real,
        _attended(lengths.ravel(), program.attention).reshape(lengths.shape).sum(axis=1),
        np.full(world_size, float(masked * sequences)),
        np.full(world_size, float(sequences)),
        program,
        _ROW,
        (0.0, "none"),
    )


def _workload(
    index: SampleIndex,
    dealing: Dealing,
    program: Software,
    planner: StepPlanner,
    step: int,
    gpus_per_node: int,
) -> Workload:
    plan = planner.plan(step)
    lengths = index.lengths[plan.sample_ids]
    counts = plan.counts[:, 0]
    starts = np.cumsum(counts) - counts
    attended = np.add.reduceat(_attended(lengths, program.attention), starts)
    received, scope = 0.0, _INPUT_SCOPES.get(dealing.balance, "none")
    if scope != "none":
        group = len(counts) if scope == "world" else gpus_per_node
        drawn = plan.drawn_ids[:group]
        token = token_dtype(index.vocab_size)
        # The published packets are padded rows: four of 16 bits a position, and a label.
        padded = 2 * (4 * index.max_length + 1) * drawn.size
        real = gathered_bytes(index.lengths[drawn], index.masked_counts[drawn], token)
        received = float(padded if program.layout != "capacity" else real)
    return _padded(
        plan.num_tokens[:, 0].astype(np.float64),
        attended,
        plan.num_masked[:, 0].astype(np.float64),
        counts.astype(np.float64),
        program,
        index.max_length,
        (received, scope),
    )


def _padded(
    real: Float64Array,
    attended: Float64Array,
    masked: Float64Array,
    sequences: Float64Array,
    program: Software,
    max_length: int,
    received: tuple[float, InputScope],
) -> Workload:
    """As the layout has it: what the device computes in place of the real tokens."""
    tokens = real
    if program.layout == "capacity":
        tokens = np.full_like(real, real.max())
        masked = np.full_like(masked, masked.max())
    elif program.layout == "padded_rows":
        tokens = sequences * max_length
    elif program.layout == "packed_rows":
        tokens = sequences / SEQUENCES_PER_PACK * max_length
    if program.head_rows == "all":
        masked = tokens
    return Workload(tokens, real, attended, masked, sequences, *received)


def _attended(lengths: NDArray[np.integer], layout: AttentionLayout) -> Float64Array:
    """Pairs of query and key that a kernel computes for each sequence, float64 [n]."""
    real = lengths.astype(np.float64)
    tile = _KEY_TILE if layout == "tile" else _TILE
    attended_to = np.full_like(real, real.max()) if layout == "longest" else real
    queries = np.ceil(real / _QUERY_TILE) * _QUERY_TILE
    pairs: Float64Array = queries * np.ceil(attended_to / tile) * tile
    return pairs

"""Measures every sampler with every balance policy by planning steps; no sample is read.

Shape letters: R ranks, b sequences of a rank and step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import MOST_OF_UNEQUAL_COUNTS
from mlperf_bert.config.sections import (
    BalanceModel,
    BalancePolicy,
    CountsPerRank,
    Deal,
    SamplerName,
)
from mlperf_bert.data.balance import Balance, CostModel, StepPlan, StepPlanner
from mlperf_bert.data.capacity import (
    CapacityBasis,
    CapacityPlan,
    forward_sizes,
    ladder_waste,
    waste,
)
from mlperf_bert.data.sampler import Sampler, default_quantiles, make_sampler
from mlperf_bert.data.token_packets import gathered_bytes, token_dtype

EXCHANGE = ("exchange_global", "exchange_local")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be measured: the ranks, their batches, the draws, and what a sequence costs.

    Of a run of `steps`, as many as `draws` are planned, evenly spread.
    """

    nodes: int
    gpus_per_node: int
    local_batch_size: int
    draws: int
    steps: int
    seed: int
    balance_model: BalanceModel
    cost: CostModel
    quantiles: int | Literal["auto"]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences a step."""
        return self.world_size * self.local_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRow:
    """One sampler with one policy, measured over the draws (docs/glossary.md has the words).

    Imbalances are means over the draws. `idle_fraction` is that of the balance model. Capacities
    are for a forward of the run: "exact" where the draws are all of its steps, else a "bound" from
    them. Wastes are of these; `capacity_waste_ladder` of the smallest of twelve capacities that
    holds the forward. Bytes are what a rank of the first group gets from
    others in a step, mean over draws, as `exchange_*` sends packets of real tokens;
    `padded_bytes_per_rank` is what the published packets of padded rows would take. `planning_ms`
    is the median on one core. Keys without a meaning for the row are None.
    """

    sampler: SamplerName
    policy: BalancePolicy
    deal: Deal | None
    counts_per_rank: CountsPerRank
    balance_model: BalanceModel
    world_size: int
    local_batch_size: int
    quantiles: int | None
    imbalance_tokens: float
    imbalance_tokens_error: float
    imbalance_cost: float
    idle_fraction: float
    capacity_tokens: int
    capacity_sequences: int
    capacity_masked: int
    capacity_basis: CapacityBasis
    capacity_waste: float
    capacity_waste_masked: float
    capacity_waste_ladder: float
    exchanged_bytes_per_rank: int
    padded_bytes_per_rank: int
    planning_ms: float

    @property
    def policy_in_words(self) -> str:
        """The policy with its options."""
        words: list[str] = [self.policy]
        if self.deal is not None:
            words.append(self.deal)
        if self.counts_per_rank == "unequal":
            words.append("unequal")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sampler that cannot serve this batch or these lengths, and why."""

    sampler: SamplerName
    reason: str


def make_samplers(
    index: SampleIndex, question: Question
) -> tuple[dict[SamplerName, Sampler], list[LeftOut]]:
    """Every sampler that can serve, and those that cannot."""
    samplers: dict[SamplerName, Sampler] = {}
    left_out = []
    names: tuple[SamplerName, ...] = get_args(SamplerName)
    for name in names:
        try:
            samplers[name] = make_sampler(
                name,
                order_by_length=index.order_by_length,
                length_histogram=index.length_histogram,
                global_batch_size=question.global_batch_size,
                seed=question.seed,
                quantiles=question.quantiles,
            )
        except ConfigError as error:
            left_out.append(LeftOut(name, str(error)))
    return samplers, left_out


def policies(question: Question) -> list[Balance]:
    """Every policy with every option that changes what it does for such batches."""
    deals: tuple[Deal, ...] = ("one_direction", "snake")
    group = question.gpus_per_node
    chosen = [Balance()]
    chosen += [Balance(policy="exchange_global", deal=deal) for deal in deals]
    chosen += [Balance(policy="exchange_local", ranks_per_node=group, deal=deal) for deal in deals]
    chosen += [Balance(policy="presort_local", ranks_per_node=group)]
    chosen += [Balance(policy="presort_global")]
    if 2 <= question.local_batch_size <= MOST_OF_UNEQUAL_COUNTS:
        chosen += [Balance(policy="presort_global", counts="unequal")]
    return chosen


def measure(
    index: SampleIndex,
    question: Question,
    samplers: dict[SamplerName, Sampler],
    advance: Callable[[], None],
) -> Iterator[BalanceRow]:
    """One row for every sampler and policy; `advance` is called after each planned step."""
    for name, sampler in samplers.items():
        for balance in policies(question):
            yield measure_row(index, question, name, sampler, balance, advance)


def measure_row(
    index: SampleIndex,
    question: Question,
    name: SamplerName,
    sampler: Sampler,
    balance: Balance,
    advance: Callable[[], None] = lambda: None,
) -> BalanceRow:
    """Plan every draw of one sampler, whose name is given, with one policy."""
    planner = StepPlanner(
        sampler,
        index.lengths,
        index.masked_counts,
        world_size=question.world_size,
        balance=balance,
        balance_model=question.balance_model,
        cost=question.cost,
    )
    of_forwards, of_steps = [], []
    for step in np.linspace(1, question.steps, question.draws).astype(int).tolist():
        started = time.perf_counter()
        plan = planner.plan(step)
        planning_ms = 1e3 * (time.perf_counter() - started)
        exchanged = _exchanged_bytes(index, question, balance.policy, plan)
        of_steps.append((plan.imbalance_tokens, plan.imbalance_cost, exchanged, planning_ms))
        of_forwards.append(forward_sizes(plan))
        advance()
    by_tokens, by_cost, exchanged_bytes, times_ms = np.array(of_steps).T
    sizes = np.stack(of_forwards, axis=1)
    capacity = CapacityPlan.of_sizes(sizes, question.steps).within(
        longest=index.max_length, most_masked=int(index.masked_counts.max())
    )
    balanced = by_cost if question.balance_model == "cost" else by_tokens
    quantiles = question.quantiles
    if quantiles == "auto":
        quantiles = default_quantiles(question.global_batch_size)
    return BalanceRow(
        sampler=name,
        policy=balance.policy,
        deal=None if balance.policy in ("none", "presort_global") else balance.deal,
        counts_per_rank=balance.counts,
        balance_model=question.balance_model,
        world_size=question.world_size,
        local_batch_size=question.local_batch_size,
        quantiles=quantiles if name == "quantile" else None,
        imbalance_tokens=float(by_tokens.mean()),
        imbalance_tokens_error=float(by_tokens.std(ddof=1) / question.draws**0.5),
        imbalance_cost=float(by_cost.mean()),
        idle_fraction=float(1 - (1 / balanced).mean()),
        capacity_tokens=capacity.tokens,
        capacity_sequences=capacity.sequences,
        capacity_masked=capacity.masked,
        capacity_basis=capacity.basis,
        capacity_waste=waste(capacity.tokens, sizes[0]),
        capacity_waste_masked=waste(capacity.masked, sizes[2]),
        capacity_waste_ladder=ladder_waste(capacity, sizes),
        exchanged_bytes_per_rank=round(float(exchanged_bytes.mean())),
        padded_bytes_per_rank=_padded_bytes(index, question, balance.policy),
        planning_ms=float(np.median(times_ms)),
    )


def _exchanged_bytes(
    index: SampleIndex, question: Question, policy: BalancePolicy, plan: StepPlan
) -> int:
    """What each rank of the first group gets from the others: packets of real tokens."""
    if policy not in EXCHANGE:
        return 0
    drawn = plan.drawn_ids[: _group_size(question, policy)]
    token = token_dtype(index.vocab_size)
    return gathered_bytes(index.lengths[drawn], index.masked_counts[drawn], token)


def _padded_bytes(index: SampleIndex, question: Question, policy: BalancePolicy) -> int:
    """The published packets: four padded rows and a label of 16 bits a sample, from every rank."""
    group = _group_size(question, policy)
    if policy not in EXCHANGE or group == 1:
        return 0
    sample = 2 * (4 * index.max_length + 1)
    return group * question.local_batch_size * sample


def _group_size(question: Question, policy: BalancePolicy) -> int:
    return question.world_size if policy == "exchange_global" else question.gpus_per_node

"""`plan balance`: measures every sampler with every policy by planning steps; reads no sample.

Given a config, it measures the config's own sampler with the policies that its settings allow.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from bert_tools.common.figures import new_figure
from bert_tools.common.tables import aligned
from bert_tools.plan.answer import Answer, asked_picture, check_least
from bert_tools.plan.sample_index import SampleIndex, asked_index
from mlperf_bert.common.console import Counted
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import MOST_OF_UNEQUAL_COUNTS, RunConfig
from mlperf_bert.config.sections import (
    BalanceModel,
    BalancePolicy,
    CountsPerRank,
    Deal,
    ModelSection,
    SamplerName,
    option_name,
)
from mlperf_bert.data.balance import Balance, CostModel, StepPlan, StepPlanner, cost_model
from mlperf_bert.data.capacity import (
    CapacityBasis,
    CapacityPlan,
    captured_waste,
    forward_sizes,
    shapes_of_sizes,
    waste,
)
from mlperf_bert.data.sampler import Sampler, default_quantiles, make_sampler
from mlperf_bert.data.token_packets import gathered_bytes
from mlperf_bert.vocabulary.word_pieces import token_dtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXCHANGE = ("exchange_global", "exchange_local")
_MOST_STEPS = 2**31 - 1
_LEAST_SHOWN = 1e-4  # smaller shares are drawn at this height: the scale is logarithmic
_BAR_INCHES = 0.19
_COLOURS = {
    "none": "#9a9a9a",
    "exchange_global one_direction": "#f4b183",
    "exchange_global snake": "#d9722e",
    "exchange_local one_direction": "#c9b3dd",
    "exchange_local snake": "#8a63b0",
    "presort_local snake": "#7fb3d8",
    "presort_global": "#2f7d4f",
    "presort_global unequal": "#123f26",
}
_COLUMNS = (
    *("sampler", "policy", "imbalance", "in cost", "idle", "capacity", "waste", "masked"),
    *("captured", "exchanged", "planning"),
)
_LEGEND = (
    "imbalance: tokens of the slowest rank over the ranks' mean, mean over draws +- standard error",
    "in cost: the same of cost_a * L + cost_b * L^2, for windows of what their tokens see;",
    "idle: time a rank waits for the slowest",
    "capacity: tokens/sequences/masked positions that hold a forward in a run of {run};",
    "waste: room of it beyond the mean forward, of tokens and of masked positions;",
    "captured: of tokens, where all forwards of a step take the smallest of 12 that holds them",
    "exchanged: bytes a rank gets from others in a step; planning: median of a step on one core",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The measurement asked for: ranks, their batches, the draws, and the cost of a sequence.

    `draws` steps are planned, spread evenly over a run of `steps`.
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
    grad_accum_steps: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.world_size * self.local_batch_size * self.grad_accum_steps

    @property
    def num_quantiles(self) -> int:
        """Quantiles of the sampler `quantile`."""
        auto = default_quantiles(self.global_batch_size)
        return auto if self.quantiles == "auto" else self.quantiles


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRow:
    """One sampler with one policy, measured over the draws (words: docs/reference/glossary.md).

    Imbalances are means over the draws. `idle_fraction` comes from the balance model. Capacities
    hold any forward of the run: "exact" if the draws are all of its steps, else a "bound" from the
    draws. Wastes refer to these capacities; `capacity_waste_ladder` refers to the ones a captured
    run makes, where a step takes the smallest that holds all its forwards. Bytes are those a rank
    of the first group receives from others in a step, mean over draws, when `exchange_*` sends
    packets of real tokens; `padded_bytes_per_rank` is the size of the published packets of padded
    rows. `planning_ms` is the median on one core. Keys without a meaning for the row are None.
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
        unequal = "unequal" if self.counts_per_rank == "unequal" else None
        return " ".join(filter(None, (self.policy, self.deal, unequal)))


def answer(args: argparse.Namespace) -> Answer:
    """Measure every possible combination. Raises ConfigError or DataError for a user's mistake."""
    config = None if args.config is None else load_config(args.config, args.set)
    question = asked_question(args, config)
    picture, end = _picture(args)
    index = asked_index(args)
    if question.global_batch_size > len(index.lengths):
        problem = f"makes a global batch of {question.global_batch_size:,}"
        remedy = f"lower it or the ranks: {index.source} has {len(index.lengths):,} samples"
        raise ConfigError("--local-batch-size", problem, remedy)
    samplers: dict[SamplerName, Sampler]
    if config is None:
        balances = policies(question.gpus_per_node, question.local_batch_size)
        samplers, left_out = make_samplers(index, question)
    else:
        if index.max_length != config.data.max_seq_length:
            problem = f"has sequences of {config.data.max_seq_length} tokens at most"
            remedy = f"give --data or --histogram: {index.source} goes to {index.max_length}"
            raise ConfigError("--config", problem, remedy)
        name, left_out = config.data.sampler, {}
        balances, samplers = policies_of(config), {name: sampler_of(index, question, name)}
    total = len(samplers) * len(balances) * question.draws
    with Counted("planned", "steps", total) as progress:
        rows = [
            measure_row(index, question, name, sampler, balance, progress.advance)
            for name, sampler in samplers.items()
            for balance in balances
        ]
    facts = asdict(question) | {
        "source": index.source,
        "samples": len(index.lengths),
        "mean_length": index.mean_length,
        "left_out": [{"sampler": name, "reason": reason} for name, reason in left_out.items()],
        "picture": None if picture is None else str(picture),
        "rows": [asdict(row) for row in rows],
    }
    lines = [*_in_words(index, question, rows, left_out)]
    if config is not None:
        facts["as_configured"] = as_configured(rows)
        lines.append(f"{args.config.stem}: {facts['as_configured']}")
    return Answer(
        facts=facts,
        lines=lines,
        pictures={picture: partial(_draw, question, rows)} if picture else {},
        end=end,
    )


def _settle(args: argparse.Namespace, config: RunConfig | None) -> None:
    """Fill in the defaults. Raises ConfigError for an option that is missing or given twice."""
    values: dict[str, Any] = {"balance_model": "tokens", "cost_a": 1.0, "quantiles": "auto"}
    values |= dict.fromkeys(("cost_b", "nodes", "gpus_per_node", "local_batch_size"))
    args.grad_accum_steps = 1
    if config is not None:
        parallel, data, (linear, quadratic) = config.parallel, config.data, config.cost_coefficients
        own = (data.balance_model, linear, data.quantiles, quadratic)
        sizes = (parallel.nodes, parallel.ranks_per_node, parallel.local_batch_size)
        values = dict(zip(values, own + sizes, strict=True))
        args.grad_accum_steps = parallel.grad_accum_steps
    for name, value in values.items():
        given = getattr(args, name)
        if config is not None and given is not None:
            remedy = "leave it out, or use --set"
            raise ConfigError(option_name(name), "does not go with --config", remedy)
        if given is value is None and name != "cost_b":
            raise ConfigError(option_name(name), "is missing", "give it, or --config")
        setattr(args, name, value if given is None else given)


def policies_of(config: RunConfig) -> list[Balance]:
    """A config's own policy, the one to compare it with, and all others that it allows.

    The comparison is a policy that may be better: unequal counts, else `presort_global`, else
    `none`.
    """
    data, parallel = config.data, config.parallel
    deal, group = data.deal, parallel.ranks_per_node
    own = Balance(policy=data.balance, ranks_per_node=group, deal=deal, counts=data.counts_per_rank)
    first = ["presort_global unequal", "presort_global equal", "none equal"]

    def name(each: Balance) -> str:
        return f"{each.policy} {each.counts}"

    others = [
        each
        for each in policies(group, parallel.local_batch_size)
        if _is_allowed(config, each)
        and (name(each) != name(own) or (name(own) not in first and each.deal != deal))
    ]
    others.sort(key=lambda each: first.index(name(each)) if name(each) in first else len(first))
    return [own, *others]


def _is_allowed(config: RunConfig, balance: Balance) -> bool:
    """True if the config's other settings and its division allow that policy."""
    changes: dict[str, Any] = {"balance": balance.policy, "counts_per_rank": balance.counts}
    try:
        replace(config, data=replace(config.data, **changes))
    except ConfigError:
        return False
    return True


def as_configured(rows: Sequence[BalanceRow]) -> str:
    """Balance of a config's own policy and of the one it is compared with: the first two rows."""
    return "; ".join(
        f"{row.policy_in_words}: idle {100 * row.idle_fraction:.1f} %, padding "
        f"{100 * row.capacity_waste_ladder:.1f} %"
        for row in rows[:2]
    )


def asked_question(args: argparse.Namespace, config: RunConfig | None) -> Question:
    """The question from the options or a config. Raises ConfigError for an impossible option."""
    _settle(args, config)
    for name in ("nodes", "gpus_per_node", "local_batch_size"):
        check_least("--" + name.replace("_", "-"), getattr(args, name), 1)
    check_least("--draws", args.draws, 2)
    check_least("--seed", args.seed, 0)
    steps = args.draws if args.steps is None else args.steps
    if not args.draws <= steps <= _MOST_STEPS:
        remedy = f"set it within {args.draws} (--draws) .. {_MOST_STEPS}"
        raise ConfigError("--steps", f"is {steps}", remedy)
    share = ModelSection().attention_share
    cost_b = args.cost_a * share if args.cost_b is None else args.cost_b
    if not 0 < args.cost_a < float("inf"):
        raise ConfigError("--cost-a", f"is {args.cost_a:g}", "set it to a finite number above zero")
    if not 0 <= cost_b < float("inf"):
        raise ConfigError("--cost-b", f"is {cost_b:g}", "set it to a finite number of at least 0")
    question = Question(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        local_batch_size=args.local_batch_size,
        draws=args.draws,
        steps=steps,
        seed=args.seed,
        balance_model=args.balance_model,
        cost=(
            CostModel(linear=args.cost_a, quadratic=cost_b)
            if config is None
            else cost_model(config)
        ),
        quantiles=args.quantiles,
        grad_accum_steps=args.grad_accum_steps,
    )
    number, batch = question.quantiles, question.global_batch_size
    if number != "auto" and (number < 1 or batch % number):
        problem = f"{number} does not divide the global batch of {batch:,}"
        raise ConfigError("--quantiles", problem, "give a divisor of it, or 'auto'")
    return question


def _picture(args: argparse.Namespace) -> tuple[Path | None, str]:
    path, end = asked_picture(args)
    if path and args.histogram and os.path.realpath(path) == os.path.realpath(args.histogram):
        remedy = "name a .png file in a directory that exists"
        raise ConfigError("--out", f"{path} is the file of --histogram", remedy)
    return path, end


def make_samplers(
    index: SampleIndex, question: Question
) -> tuple[dict[SamplerName, Sampler], dict[SamplerName, str]]:
    """Every sampler that can serve this batch and these lengths, and why the others cannot."""
    samplers: dict[SamplerName, Sampler] = {}
    left_out: dict[SamplerName, str] = {}
    names: tuple[SamplerName, ...] = get_args(SamplerName)
    for name in names:
        try:
            samplers[name] = sampler_of(index, question, name)
        except ConfigError as error:
            left_out[name] = str(error)
    return samplers, left_out


def sampler_of(index: SampleIndex, question: Question, name: SamplerName) -> Sampler:
    """One sampler over the index. Raises ConfigError if it cannot serve this batch."""
    return make_sampler(
        name,
        order_by_length=index.order_by_length,
        length_histogram=index.length_histogram,
        global_batch_size=question.global_batch_size,
        seed=question.seed,
        quantiles=question.quantiles,
    )


def policies(group: int, local_batch_size: int) -> list[Balance]:
    """Every policy on nodes of `group` ranks, with every option that changes its result there."""
    deals: tuple[Deal, ...] = ("one_direction", "snake")
    chosen = [Balance()]
    chosen += [Balance(policy="exchange_global", deal=deal) for deal in deals]
    chosen += [Balance(policy="exchange_local", ranks_per_node=group, deal=deal) for deal in deals]
    chosen += [Balance(policy="presort_local", ranks_per_node=group)]
    chosen += [Balance(policy="presort_global")]
    if 2 <= local_batch_size <= MOST_OF_UNEQUAL_COUNTS:
        chosen += [Balance(policy="presort_global", counts="unequal")]
    return chosen


def measure_row(
    index: SampleIndex,
    question: Question,
    name: SamplerName,
    sampler: Sampler,
    balance: Balance,
    advance: Callable[[], None] = lambda: None,
) -> BalanceRow:
    """Plan every draw of the named sampler with one policy."""
    planner = StepPlanner(
        sampler,
        index.lengths,
        index.masked_counts,
        world_size=question.world_size,
        grad_accum_steps=question.grad_accum_steps,
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
    longest, most = index.max_length, int(index.masked_counts.max())
    capacity = CapacityPlan.of_sizes(sizes, question.steps)
    capacity = capacity.within(longest=longest, most_masked=most)
    shapes = shapes_of_sizes(sizes, question.steps, max_seqlen=longest, max_masked=most)
    balanced = by_cost if question.balance_model == "cost" else by_tokens
    return BalanceRow(
        sampler=name,
        policy=balance.policy,
        deal=None if balance.policy in ("none", "presort_global") else balance.deal,
        counts_per_rank=balance.counts,
        balance_model=question.balance_model,
        world_size=question.world_size,
        local_batch_size=question.local_batch_size,
        quantiles=question.num_quantiles if name == "quantile" else None,
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
        capacity_waste_ladder=captured_waste(sizes, shapes),
        exchanged_bytes_per_rank=round(float(exchanged_bytes.mean())),
        padded_bytes_per_rank=_padded_bytes(index, question, balance.policy),
        planning_ms=float(np.median(times_ms)),
    )


def _exchanged_bytes(
    index: SampleIndex, question: Question, policy: BalancePolicy, plan: StepPlan
) -> int:
    """Bytes that each rank of the first group receives from the others: packets of real tokens."""
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


def _in_words(
    index: SampleIndex,
    question: Question,
    rows: Sequence[BalanceRow],
    left_out: Mapping[SamplerName, str],
) -> Iterator[str]:
    yield (
        f"{question.nodes} nodes of {question.gpus_per_node} GPUs, {question.local_batch_size} "
        f"sequences a rank, {question.draws} draws, balanced by {question.balance_model}"
    )
    yield (
        f"{len(index.lengths):,} samples, mean length {index.mean_length:.2f} of at most "
        f"{index.max_length}: {index.source}"
    )
    yield from sorted({f"quantile: {row.quantiles} quantiles" for row in rows if row.quantiles})
    yield from ("", *aligned(_COLUMNS, list(map(_cells, rows)), left="sampler,policy"), "")
    basis = {"exact": "all drawn", "bound": "a bound from the draws"}[rows[0].capacity_basis]
    yield from (line.format(run=f"{question.steps:,} steps ({basis})") for line in _LEGEND)
    packets = {row.policy: row.padded_bytes_per_rank for row in rows if row.padded_bytes_per_rank}
    for policy, num_bytes in packets.items():
        size = f"{num_bytes / 1e6:.3f} MB"
        yield f"published packets of padded rows would take {size} by {policy}"
    yield from (f"left out: {name} ({reason})" for name, reason in left_out.items())


def _cells(row: BalanceRow) -> list[str]:
    exchanged = row.exchanged_bytes_per_rank
    return [
        row.sampler,
        row.policy_in_words,
        f"{row.imbalance_tokens:.4f} +- {row.imbalance_tokens_error:.4f}",
        f"{row.imbalance_cost:.4f}",
        f"{row.idle_fraction:.2%}",
        f"{row.capacity_tokens}/{row.capacity_sequences}/{row.capacity_masked}",
        f"{row.capacity_waste:.2%}",
        f"{row.capacity_waste_masked:.2%}",
        f"{row.capacity_waste_ladder:.2%}",
        f"{exchanged / 1e6:.3f} MB" if exchanged else "0",
        f"{row.planning_ms:.2f} ms",
    ]


def _draw(question: Question, rows: Sequence[BalanceRow]) -> "Figure":
    """Two panels of bars: imbalance above 1, and capacity waste; both logarithmic."""
    figure = new_figure(13, 2.2 + _BAR_INCHES * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    samplers = list(dict.fromkeys(row.sampler for row in rows))
    # Rows run from the top, with a gap between samplers.
    places = [-number - 1.2 * samplers.index(row.sampler) for number, row in enumerate(rows)]
    _bars(left, places, rows, [row.imbalance_tokens - 1 for row in rows])
    left.set_xlabel("tokens of the slowest rank above the mean (lower is better)")
    _bars(right, places, rows, [row.capacity_waste for row in rows])
    right.set_xlabel("token capacity above the mean that holds every draw")
    groups = [
        [place for place, row in zip(places, rows, strict=True) if row.sampler == name]
        for name in samplers
    ]
    left.set_yticks([sum(group) / len(group) for group in groups], samplers)
    left.tick_params(axis="y", length=0)
    handles, labels = left.get_legend_handles_labels()
    first = dict(reversed(list(zip(labels, handles, strict=True))))
    figure.legend(
        list(first.values())[::-1],
        list(first)[::-1],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle(
        f"What unequal lengths cost: {question.world_size} ranks x "
        f"{question.local_batch_size} sequences ({question.gpus_per_node} ranks a node)"
    )
    return figure


def _bars(
    axes: "Axes", places: Sequence[float], rows: Sequence[BalanceRow], shares: Sequence[float]
) -> None:
    for place, row, share in zip(places, rows, shares, strict=True):
        shown = max(share, _LEAST_SHOWN)
        name = row.policy_in_words
        axes.barh(place, shown, height=0.85, color=_COLOURS[name], label=name)
        text = f" {share:.2%}" if share >= _LEAST_SHOWN else f" below {_LEAST_SHOWN:.2%}"
        axes.text(shown, place, text, va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_SHOWN / 2, 4 * max(*shares, _LEAST_SHOWN))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)

"""Computes how evenly a config distributes work over the ranks, for `plan balance`.

It compares the config's sampler and balance policy with all combinations that the config's other
settings allow. It plans steps from the lengths of the samples and never reads the samples.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np

from bert_tools.common.results import aligned
from bert_tools.plan.sample_index import SampleIndex, wikipedia_index
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, DataSection, SamplerName
from mlperf_bert.data.capacity import captured_waste, micro_batch_sizes, shapes_of_sizes
from mlperf_bert.errors import ConfigError

_COLUMNS = ("sampler", "policy", "imbalance", "idle", "padding", "exchanged")
_LEGEND = (
    "imbalance: tokens of the rank with the most, divided by the mean (mean over draws +- standard "
    "error)",
    "idle: time that the average rank waits for the slowest one, in percent of the step",
    "padding: padding tokens in percent of real tokens, if all micro-batches of a step use the "
    "smallest capacity that fits",
    "exchanged: bytes that a rank receives from others per step",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRow:
    """Measurements of one combination of sampler and balance policy over the planned steps.

    docs/reference/glossary.md defines the terms of the fields. `capacity_waste_ladder` is the
    number of padding tokens per real token if the run captures these steps (`run.step_mode`).
    `exchanged_bytes_per_rank` is the number of bytes that a rank receives from other ranks per
    step, averaged over the planned steps.
    """

    sampler: SamplerName
    policy: BalancePolicy
    counts_per_rank: CountsPerRank
    imbalance_tokens: float
    imbalance_tokens_error: float
    idle_fraction: float
    capacity_waste_ladder: float
    exchanged_bytes_per_rank: int

    @property
    def policy_in_words(self) -> str:
        """Return the policy's name, with " unequal" appended if ranks get unequal sample counts."""
        return f"{self.policy} unequal" if self.counts_per_rank == "unequal" else self.policy


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Measure all combinations of sampler and balance policy that the config allows.

    Returns the facts for `--json` and the lines for the terminal. Raises ConfigError or DataError
    for a user's mistake.
    """
    config = load_config(args.config, args.set)
    if args.draws < 2:
        raise ConfigError("--draws", f"is {args.draws}", "set --draws to at least 2")
    index = wikipedia_index() if args.data is None else SampleIndex.of_set(args.data)
    if index.max_length != config.data.max_seq_length:
        problem = f"the config's sequences have at most {config.data.max_seq_length} tokens"
        remedy = (
            f"pass a set of this length with --data, because samples of {index.source} have up to "
            f"{index.max_length} tokens"
        )
        raise ConfigError("--config", problem, remedy)
    rows: list[BalanceRow] = []
    left_out: dict[str, str] = {}
    for each in variants(config):
        try:
            rows.append(measure_row(each, index, args.draws))
        except ConfigError as error:
            if each == config:
                raise
            left_out[each.data.sampler] = str(error)
    facts = {
        "source": index.source,
        "samples": len(index.lengths),
        "mean_length": index.mean_length,
        "world_size": config.parallel.world_size,
        "global_batch_size": config.parallel.global_batch_size,
        "draws": args.draws,
        "left_out": left_out,
        "rows": [asdict(row) for row in rows],
        "as_configured": as_configured(rows),
    }
    words = f"{args.config.stem}: {facts['as_configured']}"
    return facts, [*_in_words(config, index, rows, left_out), words]


def variants(config: RunConfig) -> list[RunConfig]:
    """Return the config, followed by its valid variants with another sampler or balance policy.

    The first variant is the baseline for comparison. It has the config's sampler. Its policy is the
    first one of this list that differs from the config's policy: `presort_global` with unequal
    counts per rank, `presort_global` with equal counts, `none`.
    """
    found = [config]
    samplers: tuple[SamplerName, ...] = get_args(SamplerName)
    kinds: list[tuple[BalancePolicy, CountsPerRank]] = [
        ("presort_global", "unequal"),
        ("presort_global", "equal"),
        ("none", "equal"),
        ("presort_local", "equal"),
        ("exchange_local", "equal"),
        ("exchange_global", "equal"),
    ]
    own_first = sorted(samplers, key=lambda name: name != config.data.sampler)
    for sampler, (balance, counts) in product(own_first, kinds):
        data = replace(config.data, sampler=sampler, balance=balance, counts_per_rank=counts)
        if data != config.data and _is_allowed(config, data):
            found.append(replace(config, data=data))
    return found


def _is_allowed(config: RunConfig, data: DataSection) -> bool:
    """Return whether the config is valid after its data section is replaced by `data`."""
    try:
        replace(config, data=data)
    except ConfigError:
        return False
    return True


def as_configured(rows: Sequence[BalanceRow]) -> str:
    """Return the idle time and padding of the config (row 0) and the baseline (row 1) as text."""
    return "; ".join(
        f"{row.policy_in_words}: idle {100 * row.idle_fraction:.1f}%, padding "
        f"{100 * row.capacity_waste_ladder:.1f}%"
        for row in rows[:2]
    )


def measure_row(config: RunConfig, index: SampleIndex, draws: int) -> BalanceRow:
    """Plan the config's first `draws` steps and return measurements of their balance.

    Raises ConfigError for the same reasons as `SampleIndex.planner`.
    """
    data, planner = config.data, index.planner(config)
    plans = [planner.plan(step) for step in range(1, draws + 1)]
    imbalance = np.array([plan.imbalance_tokens for plan in plans])
    sizes = np.stack([micro_batch_sizes(plan) for plan in plans], axis=1)
    limits = {"max_seqlen": index.max_length, "max_masked": data.max_predictions}
    shapes = shapes_of_sizes(sizes, draws, **limits)
    return BalanceRow(
        sampler=data.sampler,
        policy=data.balance,
        counts_per_rank=data.counts_per_rank,
        imbalance_tokens=float(imbalance.mean()),
        imbalance_tokens_error=float(imbalance.std(ddof=1) / draws**0.5),
        idle_fraction=float(1 - (1 / imbalance).mean()),
        capacity_waste_ladder=captured_waste(sizes, shapes),
        exchanged_bytes_per_rank=round(
            float(np.mean([index.exchanged_bytes(config, plan) for plan in plans]))
        ),
    )


def _in_words(
    config: RunConfig, index: SampleIndex, rows: Sequence[BalanceRow], left_out: Mapping[str, str]
) -> Iterator[str]:
    parallel = config.parallel
    yield (
        f"{parallel.nodes} nodes of {parallel.ranks_per_node} GPUs, {parallel.local_batch_size} x "
        f"{parallel.grad_accum_steps} sequences per rank"
    )
    yield (
        f"{len(index.lengths):,} samples of {index.source}, {index.mean_length:.2f} tokens on "
        f"average and at most {index.max_length}"
    )
    yield from ("", *aligned(_COLUMNS, list(map(_cells, rows)), left="sampler,policy"), "")
    yield from _LEGEND
    yield from (f"left out: {name} ({reason})" for name, reason in left_out.items())


def _cells(row: BalanceRow) -> list[str]:
    exchanged = row.exchanged_bytes_per_rank
    return [
        row.sampler,
        row.policy_in_words,
        f"{row.imbalance_tokens:.4f} +- {row.imbalance_tokens_error:.4f}",
        f"{row.idle_fraction:.2%}",
        f"{row.capacity_waste_ladder:.2%}",
        f"{exchanged / 1e6:.3f} MB" if exchanged else "0",
    ]

"""`plan suggest`: a config for a job of any size, with the samples and the time to expect.

Hyper-parameters are those of published recipes or lie between them (`recipes`),
the batch is of `recipes`, samples are `samples_to_target`'s, and time is samples over the
throughput of the law that `plan law` fits to NVIDIA's entries on that accelerator.
"""

import argparse
import json
import math
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bert_tools.plan.answer import Answer, check_least
from bert_tools.plan.entries import Entry, chosen, published_entries
from bert_tools.plan.law import law_in_words
from bert_tools.plan.recipes import (
    Accelerator,
    BatchChoice,
    Sections,
    choose_batch,
    knots,
    lamb_recipe,
    most_sequences,
    open_sections,
    target_batch,
)
from bert_tools.plan.samples_to_target import Estimate, Recipe, samples_to_target
from bert_tools.plan.scaling_law import ScalingLaw, fit_law
from mlperf_bert.cli.config import in_words as config_in_words
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import check_file_name, config_from_tables
from mlperf_bert.config.run_config import (
    CLOSED_TARGET_ACCURACY,
    MOST_OF_UNEQUAL_COUNTS,
    RunConfig,
)

SYSTEMS = {"a100": "dgxa100", "h100": "h100", "h200": "h200"}
# Whose throughput the expected time is reckoned with: closed entries of the rounds named.
LAW_FILTERS: dict[Accelerator, tuple[str, ...]] = {
    "a100": ("round=2.1", "submitter=NVIDIA", "division=closed", "accelerator~A100"),
    "h100": ("round>=3.0", "round<=3.1", "submitter~NVIDIA", "accelerator~H100"),
    "h200": ("round>=4.0", "division=closed", "accelerator~H200"),
}
_MOST_RANKS = 2**20
_UNEQUAL = range(2, MOST_OF_UNEQUAL_COUNTS + 1)  # sequences a forward that uneven counts even out
_WIDTH = 100
_FAR_SMALLER = 2  # times, a batch than those that the law's throughput was measured at


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Samples and steps to the target and minutes for them; low and high are of both together."""

    samples: Estimate
    steps: int
    time_min: float
    time_low: float
    time_high: float
    seq_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """The sections that are set, the whole config they make, what to expect, what to doubt."""

    name: str
    recipe: Recipe
    accelerator: Accelerator
    sections: Sections
    config: RunConfig
    source: str
    expected: Expected
    published: tuple[Entry, ...]
    warnings: tuple[str, ...]


def answer(args: argparse.Namespace) -> Answer:
    """Write the config, a new file. Raises ConfigError or DataError."""
    found = suggest(
        args.nodes,
        args.gpus,
        accelerator=args.accelerator,
        recipe=args.recipe,
        local_batch_size=args.local_batch_size,
    )
    path = args.out or Path(found.name)
    if path.suffix != ".toml":
        raise ConfigError("--out", f"{path} does not end in .toml", f"name it {found.name}")
    if os.path.lexists(path):
        raise ConfigError("--out", f"{path} exists", "name a new file, or remove that one")
    check_file_name(path, found.config)
    write_file(path, to_toml(found).encode("ascii"))
    parallel = found.config.parallel
    facts = {
        "file": str(path),
        "recipe": found.recipe,
        "accelerator": found.accelerator,
        "nodes": parallel.nodes,
        "gpus_per_node": parallel.ranks_per_node,
        "local_batch_size": parallel.local_batch_size,
        "grad_accum_steps": parallel.grad_accum_steps,
        "global_batch_size": parallel.global_batch_size,
        "max_steps": found.config.max_steps,
        "eval_interval_samples": found.config.eval_interval_samples,
        "config": found.sections,
        "source": found.source,
        "expected": asdict(found.expected),
        "published": [asdict(each) for each in found.published],
        "warnings": list(found.warnings),
    }
    return Answer(facts=facts, lines=_in_words(found), end=f"config: {path}")


def suggest(
    nodes: int,
    gpus: int,
    *,
    accelerator: Accelerator = "a100",
    recipe: Recipe = "closed_lamb",
    local_batch_size: int | None = None,
) -> Suggestion:
    """The config for `nodes` of `gpus` each. Raises ConfigError for sizes that cannot be."""
    check_least("--nodes", nodes, 1)
    check_least("--gpus", gpus, 1)
    ranks = nodes * gpus
    if ranks > _MOST_RANKS:
        raise ConfigError("--nodes", f"makes {ranks:,} ranks", f"use {_MOST_RANKS:,} at most")
    if local_batch_size is None:
        batch = choose_batch(ranks, recipe, accelerator)
    else:
        check_least("--local-batch-size", local_batch_size, 1)
        batch = BatchChoice(local_batch_size, 1)
    sections, source = _sections(nodes, gpus, batch, recipe)
    config = config_from_tables(sections, "plan suggest")
    size = f"{nodes}x{gpus}x{batch.local_batch_size}x{batch.grad_accum_steps}"
    prefix = "" if recipe.startswith("closed") else f"{recipe}_"
    law, expected = law_of(accelerator), _expected(config, recipe, accelerator)
    return Suggestion(
        name=f"{prefix}{SYSTEMS[accelerator]}_{size}.toml",
        recipe=recipe,
        accelerator=accelerator,
        sections=sections,
        config=config,
        source=source,
        expected=expected,
        published=tuple(each for each in law.entries if each.accelerators == ranks),
        warnings=tuple(_warnings(config, recipe, accelerator, expected, source)),
    )


@cache
def law_of(accelerator: Accelerator) -> ScalingLaw:
    """The law of the published entries that the expected time is reckoned with."""
    entries = chosen(published_entries(), LAW_FILTERS[accelerator])
    return fit_law([each for each in entries if each.time_min and each.accelerators])


def _sections(nodes: int, gpus: int, batch: BatchChoice, recipe: Recipe) -> tuple[Sections, str]:
    """What the config sets, in the order of its sections, and where its values come from."""
    ranks = nodes * gpus
    total = ranks * batch.local_batch_size * batch.grad_accum_steps
    if recipe.startswith("closed"):
        own, source = _closed(total)
    else:
        own = open_sections(recipe, total, batch.local_batch_size)
        source = samples_to_target(total, recipe).source
    shared: Sections = {
        "run": {"device": "cuda", "step_mode": "captured"},
        "model": {"attention": "auto", "kernels": "auto", "precision": "bf16"},
        "data": {"balance": "presort_global"} if ranks * batch.grad_accum_steps > 1 else {},
        "parallel": {
            "nodes": nodes,
            "ranks_per_node": gpus,
            "local_batch_size": batch.local_batch_size,
            "grad_accum_steps": batch.grad_accum_steps,
            # No futures, which a capture would have to follow (docs/captured_step.md).
            **({"data_parallel": "flat"} if ranks > 1 else {}),
        },
        "optim": {},
        "schedule": {},
        "clip": {},
        "eval": {"target_accuracy": CLOSED_TARGET_ACCURACY},
        "mlperf": {"division": "closed" if recipe.startswith("closed") else "open"},
    }
    merged: dict[str, dict[str, Any]] = {
        name: {**section, **own.get(name, {})} for name, section in shared.items()
    }
    if merged["data"].get("balance") == "presort_global" and batch.local_batch_size in _UNEQUAL:
        merged["data"]["counts_per_rank"] = "unequal"
    return {name: section for name, section in merged.items() if section}, source


def _closed(batch: int) -> tuple[Sections, str]:
    found = lamb_recipe(batch)
    schedule: dict[str, Any] = {"decay_steps": found.decay_steps}
    if found.warmup_steps:
        schedule |= {
            key: getattr(found, key) for key in ("form", "warmup_steps", "start_warmup_step")
        }
    sections: Sections = {
        "optim": {
            "name": "lamb",
            **{key: getattr(found, key) for key in ("learning_rate", "beta_1", "beta_2")},
            "epsilon": 1e-6,
            "weight_decay": found.weight_decay,
        },
        "schedule": schedule,
        "clip": {"policy": "after_allreduce", "max_norm": 1.0},
    }
    return sections, found.source


def _expected(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> Expected:
    """Of the law and the samples; the range takes the law's largest misses of its own entries."""
    law, parallel = law_of(accelerator), config.parallel
    assert law.throughput is not None, "the shipped entries have their samples"
    samples = samples_to_target(parallel.global_batch_size, recipe)
    rate = law.throughput.at(parallel.world_size)
    misses = [
        each.seq_per_s / law.throughput.at(each.accelerators)
        for each in law.entries
        if each.seq_per_s and each.accelerators
    ]
    return Expected(
        samples=samples,
        steps=math.ceil(samples.samples / parallel.global_batch_size),
        time_min=samples.samples / rate / 60,
        time_low=samples.low / (rate * max(misses)) / 60,
        time_high=samples.high / (rate * min(misses)) / 60,
        seq_per_s=rate,
    )


def _warnings(
    config: RunConfig, recipe: Recipe, accelerator: Accelerator, expected: Expected, source: str
) -> Iterator[str]:
    parallel = config.parallel
    batch, ranks = parallel.global_batch_size, parallel.world_size
    if recipe.startswith("closed"):
        if batch not in [each.global_batch_size for each in knots()]:
            yield f"no set is published for a batch of {batch:,}: {source}, tried by nobody we know"
    elif recipe == "open_hypothesis":
        yield "the open hypothesis goes through two published points, and nobody has tried it"
    if not expected.samples.in_range:
        yield f"samples to the target at a batch of {batch:,} are {expected.samples.source}"
    most = most_sequences(accelerator, ranks)
    if parallel.local_batch_size > most:
        yield (
            f"{parallel.local_batch_size:,} sequences a forward are more than the {most} that were "
            f"run on this accelerator: they may not fit its memory"
        )
    sizes = [entry.accelerators or 0 for entry in law_of(accelerator).entries]
    if not min(sizes) <= ranks <= max(sizes):
        yield (
            f"the law was fitted to {min(sizes):,} to {max(sizes):,} accelerators: the time for "
            f"{ranks:,} is extrapolated"
        )
    usual = target_batch(ranks, "closed_lamb", accelerator)
    if batch < usual / _FAR_SMALLER:
        yield (
            f"the throughput is that of entries with some {usual:,.0f} sequences an update on as "
            f"many accelerators: with {batch:,} it is lower, and the time longer than expected here"
        )
    if not recipe.startswith("closed"):
        yield "the throughput is that of closed entries, which have dropout and clip otherwise"
    if expected.steps > config.max_steps:
        yield (
            f"the run stops after {config.max_steps:,} steps, {expected.steps:,} are expected: "
            "raise run.max_steps"
        )


def to_toml(suggestion: Suggestion) -> str:
    """A file that `mlperf_bert config` accepts: comments that say whence, then what is set."""
    lines = []
    for paragraph in _comments(suggestion):
        lines += textwrap.wrap(
            paragraph, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False
        )
    for name, section in suggestion.sections.items():
        lines += ["", f"[{name}]"]
        # JSON's strings and numbers are TOML's as well.
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def _in_words(suggestion: Suggestion) -> Iterator[str]:
    """The config in words, what to expect of it, and what to doubt."""
    expected, samples = suggestion.expected, suggestion.expected.samples
    config, law = suggestion.config, law_of(suggestion.accelerator)
    ranks = config.parallel.world_size
    yield f"recipe          {suggestion.recipe}: {suggestion.source}"
    yield config_in_words(config)
    yield (
        f"samples         {_millions(samples.samples)} expected, {_millions(samples.low)} to "
        f"{_millions(samples.high)} ({samples.source})"
    )
    yield f"                {expected.steps:,} steps"
    yield (
        f"time            {_time(expected.time_min)} expected, {_time(expected.time_low)} to "
        f"{_time(expected.time_high)}, at {expected.seq_per_s:,.0f} sequences/s"
    )
    if law.throughput:
        yield (
            f"                throughput {law_in_words(law.throughput, 'sequences/s')}: "
            f"`plan law` of {', '.join(LAW_FILTERS[suggestion.accelerator])}"
        )
    for entry in suggestion.published:
        yield (
            f"published       {entry.name}: {_time(entry.time_min or math.nan)} on {ranks:,}, "
            f"{_millions(entry.samples or math.nan)}, global batch {entry.global_batch_size or 0:,}"
        )
    yield from (f"warning         {each}" for each in suggestion.warnings)


def _comments(suggestion: Suggestion) -> Iterator[str]:
    config, expected = suggestion.config, suggestion.expected
    parallel = config.parallel
    yield (
        f"Not run. BERT-large on {parallel.world_size:,} {suggestion.accelerator.upper()} "
        f"({parallel.nodes:,} x {parallel.ranks_per_node}), {config.mlperf.division} division, a "
        f"global batch of {parallel.global_batch_size:,}. Made by `mlperf_bert plan suggest`, "
        f"recipe {suggestion.recipe}: {suggestion.source}."
    )
    yield (
        f"Expected: {_millions(expected.samples.samples)} ({expected.steps:,} steps), "
        f"{_time(expected.time_min)} by the throughput of published entries (docs/scaling.md)."
    )
    for warning in suggestion.warnings:
        yield f"Warning: {warning}."


def _millions(samples: float) -> str:
    return f"{samples / 1e6:,.3f} million samples"


def _time(minutes: float) -> str:
    return f"{60 * minutes:.1f} s" if minutes < 2 else f"{minutes:,.1f} min"

"""`plan suggest`: a config for a job of any size, with the samples and the time to expect.

`recipes` chooses the batch and takes hyper-parameters from published recipes or interpolates
them; `forecast` gives samples and time.
"""

import argparse
import json
import math
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert_tools.plan.answer import Answer, check_least
from bert_tools.plan.cluster.simulation import MOST_RANKS, Question
from bert_tools.plan.forecast import Forecast, forecast, question_of, too_few_steps
from bert_tools.plan.forecast import in_words as forecast_in_words
from bert_tools.plan.recipes import (
    UNEQUAL,
    Accelerator,
    BatchChoice,
    Sections,
    choose_batch,
    knots,
    lamb_recipe,
    most_sequences,
    open_sections,
)
from bert_tools.plan.sample_index import wikipedia_index
from bert_tools.plan.samples_to_target import Estimate, Recipe, samples_to_target
from mlperf_bert.cli.config import in_words as config_in_words
from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import check_file_name, config_from_tables
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY, RunConfig

SYSTEMS = {"a100": "dgxa100", "h100": "h100", "h200": "h200"}
_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """The sections set, the whole config they make, the expected result and the doubts."""

    name: str
    recipe: Recipe
    accelerator: Accelerator
    sections: Sections
    config: RunConfig
    source: str
    samples: Estimate
    warnings: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Steps to the expected samples."""
        return math.ceil(self.samples.samples / self.config.parallel.global_batch_size)


def answer(args: argparse.Namespace) -> Answer:
    """Write the config to a new file. Raises ConfigError or DataError."""
    found = suggest(
        args.nodes,
        args.gpus_per_node,
        accelerator=args.accelerator,
        recipe=args.recipe,
        local_batch_size=args.local_batch_size,
    )
    path = args.out or Path("runs") / found.name
    if path.suffix != ".toml":
        raise ConfigError("--out", f"{path} does not end in .toml", f"name it {found.name}")
    if os.path.lexists(path):
        raise ConfigError("--out", f"{path} exists", "name a new file, or remove that one")
    check_file_name(path, found.config.parallel)
    expected = expected_time(found)
    if args.out is None:
        make_directory(path.parent)
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
        "expected": {
            "samples": asdict(found.samples),
            "steps": found.steps,
            "time_min": expected.seconds / 60,
            "time_low": expected.low / 60,
            "time_high": expected.high / 60,
            "seq_per_s": expected.simulated.sequences_per_s,
            "forecast": expected.facts,
        },
        "published": [asdict(each) for each in expected.published],
        "warnings": list(found.warnings),
    }
    return Answer(facts=facts, lines=_in_words(found, expected), end=f"config: {path}")


def suggest(
    nodes: int,
    gpus: int,
    *,
    accelerator: Accelerator = "a100",
    recipe: Recipe = "closed_lamb",
    local_batch_size: int | None = None,
) -> Suggestion:
    """The config for `nodes` of `gpus` each. Raises ConfigError for impossible sizes."""
    check_least("--nodes", nodes, 1)
    check_least("--gpus-per-node", gpus, 1)
    ranks = nodes * gpus
    if ranks > MOST_RANKS:
        raise ConfigError("--nodes", f"makes {ranks:,} ranks", f"use {MOST_RANKS:,} at most")
    if local_batch_size is None:
        batch = choose_batch(ranks, recipe, accelerator)
    else:
        check_least("--local-batch-size", local_batch_size, 1)
        batch = BatchChoice(local_batch_size, 1)
    sections, source = _sections(nodes, gpus, batch, recipe)
    config = config_from_tables(sections, "plan suggest")
    size = f"{nodes}x{gpus}x{batch.local_batch_size}x{batch.grad_accum_steps}"
    prefix = "" if recipe.startswith("closed") else f"{recipe}_"
    samples = samples_to_target(config.parallel.global_batch_size, recipe)
    return Suggestion(
        name=f"{prefix}{SYSTEMS[accelerator]}_{size}.toml",
        recipe=recipe,
        accelerator=accelerator,
        sections=sections,
        config=config,
        source=source,
        samples=samples,
        warnings=tuple(_warnings(config, recipe, accelerator, samples, source)),
    )


def expected_time(suggestion: Suggestion) -> Forecast:
    """The forecast of the suggested config. Raises ConfigError for a batch that does not fit."""
    asked = question_of(suggestion.config, suggestion.name, suggestion.accelerator)
    return forecast(Question(**asked | {"recipe": suggestion.recipe}), wikipedia_index())


def _sections(nodes: int, gpus: int, batch: BatchChoice, recipe: Recipe) -> tuple[Sections, str]:
    """The sections the config sets, in order, and the source of its values."""
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
            # No futures, which a capture would have to follow (docs/how/captured_step.md).
            **({"data_parallel": _data_parallel(recipe, gpus)} if ranks > 1 else {}),
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
    if merged["data"].get("balance") == "presort_global" and batch.local_batch_size in UNEQUAL:
        merged["data"]["counts_per_rank"] = "unequal"
    return {name: section for name, section in merged.items() if section}, source


def _data_parallel(recipe: Recipe, gpus: int) -> str:
    """Muon's matrices are dealt to the ranks of a node."""
    return "shard_node" if recipe == "open_muon" and gpus > 1 else "flat"


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


def _warnings(
    config: RunConfig, recipe: Recipe, accelerator: Accelerator, samples: Estimate, source: str
) -> Iterator[str]:
    parallel = config.parallel
    batch, ranks = parallel.global_batch_size, parallel.world_size
    if recipe.startswith("closed"):
        if batch not in [each.global_batch_size for each in knots()]:
            yield f"no set is published for a batch of {batch:,}: {source}, tried by nobody we know"
    elif recipe == "open_hypothesis":
        yield "the open hypothesis goes through two published points, and nobody has tried it"
    elif recipe == "open_muon":
        yield "Muon was compared with a model of 2 layers only, not with BERT-large"
    if samples.basis != "published":
        yield f"samples to the target at a batch of {batch:,} are {samples.in_words}"
    most = most_sequences(accelerator, ranks)
    if parallel.local_batch_size > most:
        yield (
            f"{parallel.local_batch_size:,} sequences a forward are more than the {most} that were "
            f"run on this accelerator"
        )
    if warning := too_few_steps(config, math.ceil(samples.samples / batch)):
        yield warning


def to_toml(suggestion: Suggestion) -> str:
    """Text of a file that `mlperf_bert train` accepts: comments on its sources, then settings."""
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


def _in_words(suggestion: Suggestion, expected: Forecast) -> Iterator[str]:
    """Lines on the config, the expected result and the doubts."""
    yield f"recipe          {suggestion.recipe}: {suggestion.source}"
    yield config_in_words(suggestion.config)
    yield from ("", *forecast_in_words(expected))
    yield from (f"warning: {each}" for each in suggestion.warnings)


def _comments(suggestion: Suggestion) -> Iterator[str]:
    config, parallel = suggestion.config, suggestion.config.parallel
    yield (
        f"Not run. BERT-large on {parallel.world_size:,} {suggestion.accelerator.upper()} "
        f"({parallel.nodes:,} x {parallel.ranks_per_node}), {config.mlperf.division} division, a "
        f"global batch of {parallel.global_batch_size:,}. Made by `mlperf_bert plan suggest`, "
        f"recipe {suggestion.recipe}: {suggestion.source}."
    )
    yield (
        f"Expected: {suggestion.samples.samples / 1e6:,.3f} million samples "
        f"({suggestion.steps:,} steps); the time: `mlperf_bert plan cluster --config FILE`."
    )
    for warning in suggestion.warnings:
        yield f"Warning: {warning}."

"""Writes a config of the closed division for a job of any size, for `plan suggest`.

The module `recipes` chooses the batch, looks up or interpolates the published hyper-parameters, and
estimates the samples to target. `plan cluster` estimates the time to train.
"""

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert_tools.plan.cluster.forecast import slurm_minutes
from bert_tools.plan.cluster.machine import make_machine
from bert_tools.plan.recipes import (
    Accelerator,
    Estimate,
    choose_batch,
    knots,
    lamb_recipe,
    samples_to_target,
)
from mlperf_bert.config.files import config_from_tables, tables_to_toml
from mlperf_bert.config.run_config import (
    CLOSED_TARGET_ACCURACY,
    MOST_OF_UNEQUAL_COUNTS,
    RunConfig,
)
from mlperf_bert.errors import ConfigError, one_line, typed
from mlperf_bert.files import make_directory, write_file

Sections = dict[str, dict[str, Any]]

SYSTEMS = {"a100": "dgxa100", "h100": "h100", "h200": "h200"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A suggested config with the sections that it sets and its estimated samples to target."""

    name: str
    accelerator: Accelerator
    sections: Sections
    config: RunConfig
    source: str
    samples: Estimate

    @property
    def steps(self) -> int:
        """Return the number of steps that train on the estimated samples to target."""
        return math.ceil(self.samples.samples / self.config.parallel.global_batch_size)

    @property
    def own_gpu(self) -> str:
        """Return the option that tells `plan cluster` which GPU to simulate."""
        return f"--accelerator {self.accelerator}"

    @property
    def warnings(self) -> list[str]:
        """Return warnings about hyper-parameters and estimates that were not published."""
        batch = self.config.parallel.global_batch_size
        found = []
        if batch not in [each.global_batch_size for each in knots()]:
            problem = f"no hyper-parameters are published for a batch of {batch:,}"
            found.append(f"{problem}, so they are {self.source}")
        if self.samples.basis != "published":
            found.append(
                f"the samples to target at a batch of {batch:,} are {self.samples.in_words}"
            )
        return found


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Write the suggested config to a new file and describe it.

    Returns the facts for `--json` and the lines for the terminal. Raises ConfigError or DataError
    for a user's mistake.
    """
    found = suggest(args.nodes, args.gpus_per_node, args.accelerator)
    path = args.out or Path("runs") / found.name
    if os.path.lexists(path):
        raise ConfigError("--out", f"{path} exists", "pass a new file, or remove the existing file")
    make_directory(path.parent)
    write_file(path, to_toml(found).encode("ascii"))
    config = found.config
    options = ("--config", path, "--accelerator", found.accelerator)
    facts = {
        "file": str(path),
        "config": found.sections,
        "global_batch_size": config.parallel.global_batch_size,
        "source": found.source,
        "samples": asdict(found.samples),
        "steps": found.steps,
        "warnings": found.warnings,
    }
    lines = [
        f"hyper-parameters: {found.source}",
        f"{config.mlperf.division} division, {config.parallel.world_size:,} ranks, global batch "
        f"{config.parallel.global_batch_size:,}, at most {config.max_steps:,} steps",
        f"expected samples to target: {found.samples.samples:,.0f} ({found.steps:,} steps)",
        *(f"warning: {each}" for each in found.warnings),
        one_line(f"config written to {path}"),
        one_line(f"expected time: {typed('plan', 'cluster', *options)}"),
    ]
    return facts, lines


def suggest(nodes: int, gpus: int, accelerator: Accelerator = "a100") -> Suggestion:
    """Suggest a config for `nodes` nodes of `gpus` GPUs each.

    Raises ConfigError if no config can be suggested for these numbers.
    """
    for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus)):
        if value < 1:
            raise ConfigError(option, f"is {value}", f"set {option} to at least 1")
    ranks = nodes * gpus
    local_batch_size, micro_batches = choose_batch(ranks, accelerator)
    batch = ranks * local_batch_size * micro_batches
    recipe = lamb_recipe(batch)
    sections: Sections = {
        "run": {"device": "cuda", "step_mode": "captured"},
        "model": {"attention": "auto", "kernels": "auto", "precision": "bf16"},
        "data": {},
        "parallel": {
            "nodes": nodes,
            "ranks_per_node": gpus,
            "local_batch_size": local_batch_size,
            "grad_accum_steps": micro_batches,
        },
        "optim": {
            "name": "lamb",
            "learning_rate": recipe.learning_rate,
            "beta_1": recipe.beta_1,
            "beta_2": recipe.beta_2,
            "epsilon": 1e-6,
            "weight_decay": recipe.weight_decay,
        },
        "schedule": {"decay_steps": recipe.decay_steps},
        "clip": {"policy": "after_allreduce", "max_norm": 1.0},
        "eval": {"target_accuracy": CLOSED_TARGET_ACCURACY},
        "mlperf": {"division": "closed"},
    }
    if ranks > 1:  # a captured step must not use futures (docs/concepts/captured_step.md)
        sections["parallel"]["data_parallel"] = "flat"
    if nodes > 1:
        sections["parallel"]["network_gb_s"] = make_machine(accelerator, nodes, gpus).node_gb_s
    if ranks * micro_batches > 1:
        sections["data"]["balance"] = "presort_global"
        if 1 < local_batch_size <= MOST_OF_UNEQUAL_COUNTS:
            sections["data"]["counts_per_rank"] = "unequal"
    if recipe.warmup_steps:
        for name in ("form", "warmup_steps", "start_warmup_step"):
            sections["schedule"][name] = getattr(recipe, name)
    name = f"{SYSTEMS[accelerator]}_{nodes}x{gpus}x{local_batch_size}x{micro_batches}.toml"
    config = config_from_tables(sections, "plan suggest")
    sections["run"]["slurm_minutes"] = slurm_minutes(config, name, accelerator)
    return Suggestion(
        name=name,
        accelerator=accelerator,
        sections=sections,
        config=config_from_tables(sections, "plan suggest"),
        source=recipe.source,
        samples=samples_to_target(batch, "closed_lamb"),
    )


def to_toml(suggestion: Suggestion) -> str:
    """Return the text of the config file, with comments about the sources of its values."""
    lines = [
        f"# Not run. Written by `mlperf_bert plan suggest` for {suggestion.accelerator.upper()}.",
        f"# Hyper-parameters: {suggestion.source}.",
        f"# Expected samples to target: {suggestion.samples.samples / 1e6:,.3f} million "
        f"({suggestion.steps:,} steps).",
        f"# Expected time: `mlperf_bert plan cluster --config FILE {suggestion.own_gpu}`.",
        *(f"# Warning: {warning}." for warning in suggestion.warnings),
        "",
    ]
    return "\n".join(lines) + "\n" + tables_to_toml(suggestion.sections)

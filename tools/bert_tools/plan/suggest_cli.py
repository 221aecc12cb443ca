"""The question `plan suggest`: its arguments, and what they call."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert_tools.plan.batch_choice import ACCELERATORS
from bert_tools.plan.samples_to_target import Recipe
from mlperf_bert.common.errors import ConfigError, one_line

if TYPE_CHECKING:
    from bert_tools.plan.suggest import Suggestion

RECIPES = tuple(each for each in get_args(Recipe) if each != "closed_reference")


def add_suggest(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus", type=int, required=True, metavar="G", help="GPUs of a node")
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default="a100", help="which GPU (default a100)"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default=RECIPES[0],
        help="whose hyper-parameters: LAMB of the closed division (default), Samsung's Adam, "
        "MosaicML's AdamW without dropout, or the line through the latter two",
    )
    parser.add_argument(
        "--local-batch-size",
        type=int,
        metavar="B",
        help="sequences of a rank and forward (default: by the size, docs/scaling.md)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="the config, a new file (default: named by the size, here)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_suggest)


def answer_suggest(args: argparse.Namespace) -> int:
    """Write the config and print what it is. Raises ConfigError or DataError."""
    from bert_tools.plan.suggest import suggest
    from bert_tools.plan.suggest_text import in_words, to_toml
    from mlperf_bert.common.atomic import write_file

    suggestion = suggest(
        args.nodes,
        args.gpus,
        accelerator=args.accelerator,
        recipe=args.recipe,
        local_batch_size=args.local_batch_size,
    )
    path = _new_file(args.out or Path(suggestion.name), suggestion)
    write_file(path, to_toml(suggestion).encode("ascii"))
    if args.json:
        print(json.dumps(_answer(suggestion, path), allow_nan=False))
        return 0
    print(in_words(suggestion))
    print(one_line(f"config: {path}"))
    return 0


def _new_file(path: Path, suggestion: "Suggestion") -> Path:
    from mlperf_bert.config.files import check_file_name

    if path.suffix != ".toml":
        raise ConfigError("--out", f"{path} does not end in .toml", f"name it {suggestion.name}")
    if os.path.lexists(path):
        raise ConfigError("--out", f"{path} exists", "name a new file, or remove that one")
    check_file_name(path, suggestion.config)
    return path


def _answer(suggestion: "Suggestion", path: Path) -> dict[str, Any]:
    expected, parallel = suggestion.expected, suggestion.config.parallel
    return {
        "schema_version": 1,
        "file": str(path),
        "recipe": suggestion.recipe,
        "accelerator": suggestion.accelerator,
        "nodes": parallel.nodes,
        "gpus_per_node": parallel.ranks_per_node,
        "local_batch_size": parallel.local_batch_size,
        "grad_accum_steps": parallel.grad_accum_steps,
        "global_batch_size": parallel.global_batch_size,
        "max_steps": suggestion.config.max_steps,
        "eval_interval_samples": suggestion.config.eval_interval_samples,
        "config": suggestion.sections,
        "source": suggestion.source,
        "expected": asdict(expected),
        "published": [asdict(each) for each in suggestion.published],
        "warnings": list(suggestion.warnings),
    }

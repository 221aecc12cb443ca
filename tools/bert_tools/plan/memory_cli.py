"""The question `plan memory`: its arguments, and what they call."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import add_config

if TYPE_CHECKING:
    from mlperf_bert.config.run_config import RunConfig
    from mlperf_bert.parts.memory_plan import MemoryPlan


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    add_config(parser)
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GB",
        help="as on the GPU's name: 80, 141; then also the largest batch that fits",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_memory)


def answer_memory(args: argparse.Namespace) -> int:
    """Print one rank's memory, part by part. Raises ConfigError for what the user can mend."""
    from mlperf_bert.config.files import load_config
    from mlperf_bert.parts.memory_plan import (
        USABLE_OF_NAMED,
        expected_forward,
        largest_batch,
        plan_memory,
    )

    named = args.device_memory
    if named is not None and not 0 < named < float("inf"):
        raise ConfigError("--device-memory", f"is {named:g}", "set it to a finite number above 0")
    config = load_config(args.config, args.set)
    plan = plan_memory(config, expected_forward(config))
    usable = None if named is None else round(named * USABLE_OF_NAMED)
    largest = None if usable is None else largest_batch(config, plan.forward, usable)
    if args.json:
        answer = {
            "schema_version": 1,
            "sequences": plan.forward.sequences,
            "tokens": plan.forward.tokens,
            "masked": plan.forward.masked,
            "parts": [asdict(part) for part in plan.parts],
            "bytes": plan.num_bytes,
            "bytes_with_margin": plan.with_margin,
            "device_bytes": usable,
            "largest_batch": largest,
        }
        print(json.dumps(answer))
        return 0
    print(_in_words(args.config.stem, config, plan, usable, largest))
    return 0


def _in_words(
    name: str, config: "RunConfig", plan: "MemoryPlan", usable: int | None, largest: int | None
) -> str:
    from mlperf_bert.parts.memory_plan import GIB, MARGIN, is_on_cuda

    forward, model = plan.forward, config.model
    rows = [(part.name, part.num_bytes) for part in plan.parts]
    rows += [("sum", plan.num_bytes), (f"with {MARGIN:.0%} that no block fits", plan.with_margin)]
    width = max(len(text) for text, _ in rows)
    lines = [
        f"{name}: one rank on {'a GPU' if is_on_cuda(config) else 'a CPU'}, {model.precision}, "
        f"{model.num_layers} layers, hidden {model.hidden_size}",
        f"largest forward: {forward.sequences} sequences, {forward.tokens:,} tokens, "
        f"{forward.masked:,} masked positions; published lengths",
        *(f"  {text.ljust(width)}  {size / GIB:8.2f} GiB" for text, size in rows),
    ]
    if usable is not None:
        fits = "fits" if plan.with_margin <= usable else "does not fit"
        lines.append(
            f"{forward.sequences} sequences: {fits} in {usable / GIB:.1f} GiB; at most {largest}"
        )
    return "\n".join(lines)

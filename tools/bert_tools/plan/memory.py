"""`plan memory`: peak memory of a rank, part by part, and the largest batch that fits."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from bert_tools.plan.answer import Answer
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.parts.memory_plan import (
    GIB,
    MARGIN,
    USABLE_OF_NAMED,
    MemoryPlan,
    expected_forward,
    is_on_cuda,
    largest_batch,
    plan_memory,
)


def answer(args: argparse.Namespace) -> Answer:
    """One rank's memory, part by part. Raises ConfigError for a user's mistake."""
    named = args.device_memory
    if named is not None and not 0 < named < float("inf"):
        raise ConfigError("--device-memory", f"is {named:g}", "set it to a finite number above 0")
    config = load_config(args.config, args.set)
    plan = plan_memory(config, expected_forward(config))
    usable = None if named is None else round(named * USABLE_OF_NAMED)
    largest = None if usable is None else largest_batch(config, plan.forward, usable)
    facts = {
        "sequences": plan.forward.sequences,
        "tokens": plan.forward.tokens,
        "masked": plan.forward.masked,
        "parts": [asdict(part) for part in plan.parts],
        "bytes": plan.num_bytes,
        "bytes_with_margin": plan.with_margin,
        "device_bytes": usable,
        "largest_batch": largest,
    }
    return Answer(facts=facts, lines=_in_words(args.config.stem, config, plan, usable, largest))


def _in_words(
    name: str, config: RunConfig, plan: MemoryPlan, usable: int | None, largest: int | None
) -> Iterator[str]:
    forward, model = plan.forward, config.model
    rows = [(part.name, part.num_bytes) for part in plan.parts]
    rows += [("sum", plan.num_bytes), (f"with {MARGIN:.0%} that no block fits", plan.with_margin)]
    width = max(len(text) for text, _ in rows)
    yield (
        f"{name}: one rank on {'a GPU' if is_on_cuda(config) else 'a CPU'}, {model.precision}, "
        f"{model.num_layers} layers, hidden {model.hidden_size}"
    )
    yield (
        f"largest forward: {forward.sequences} sequences, {forward.tokens:,} tokens, "
        f"{forward.masked:,} masked positions; published lengths"
    )
    yield from (f"  {text.ljust(width)}  {size / GIB:8.2f} GiB" for text, size in rows)
    if usable is not None:
        fits = "fits" if plan.with_margin <= usable else "does not fit"
        size = config.parallel.local_batch_size
        yield f"{size} sequences: {fits} in {usable / GIB:.1f} GiB; at most {largest}"

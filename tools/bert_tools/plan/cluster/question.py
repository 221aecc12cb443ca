"""`plan cluster`: simulates the question, and shows the result as tables."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from bert_tools.common.tables import aligned
from bert_tools.plan.forecast import Forecast, forecast, in_words, question_of, too_few_steps
from bert_tools.plan.sample_index import wikipedia_index
from mlperf_bert.config.files import load_config

_NOTE = "A simulation, not a measurement: its constants were fitted on published A100 runs."
_STEP_NAMES = ("a step of the mean rank", "time", "share")


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Simulate the question. Raises ConfigError or DataError for a user's mistake."""
    config = load_config(args.config, args.set)
    question = question_of(config, args.config.stem, args.accelerator, args.node_gb_s)
    expected = forecast(question, wikipedia_index())
    found = expected.simulated
    run, timing = found.run, found.timings[0]
    facts = {
        "kind": "simulation",
        **asdict(question),
        "world_size": question.world_size,
        "global_batch_size": question.global_batch_size,
        "step_ms": run.step_ms,
        "parts_ms": found.parts_ms,
        "communication_ms": found.mean_ms("communication_ms"),
        "exposed_ms": found.mean_ms("exposed_ms"),
        "imbalance_tokens": found.imbalance_tokens,
        "padding_fraction": found.padding_fraction,
        "sequences_per_s": found.sequences_per_s,
        "slowest_rank": timing.slowest_rank,
        "run": asdict(run) | {"seconds": run.seconds},
        "samples_to_target": asdict(found.estimate),
        "forecast": expected.facts,
    }
    lines = list(_in_words(expected))
    if warning := too_few_steps(config, run.steps):
        lines.append(f"warning: {warning}")
    return facts, lines


def _in_words(expected: Forecast) -> Iterator[str]:
    """Lines on machine, step by parts, communication and run."""
    found = expected.simulated
    question, run = found.question, found.run
    batch, accumulated = question.global_batch_size, question.grad_accum_steps
    forwards = f" x {accumulated} forwards" if accumulated > 1 else ""
    parts = [
        (name, f"{value:.1f} ms", f"{value / run.step_ms:.1%}")
        for name, value in found.parts_ms.items()
    ]
    communication, exposed = found.mean_ms("communication_ms"), found.mean_ms("exposed_ms")
    yield (
        f"{question.nodes:,} nodes of {question.gpus_per_node} {question.accelerator}, "
        f"{question.local_batch_size} a rank{forwards}, global batch {batch:,}; "
        f"{question.precision}, {question.sampler}, "
        f"{question.balance}, {question.clip}"
    )
    yield (
        f"tokens of the largest rank over the mean {found.imbalance_tokens:.4f}, "
        f"padding {found.padding_fraction:.2%}; {len(found.timings)} steps drawn"
    )
    rows = [*parts, ("", f"{run.step_ms:.1f} ms", "")]
    yield from ("", *aligned(_STEP_NAMES, rows, left=_STEP_NAMES[0]), "")
    yield (
        f"communication {communication:.1f} ms, of which {exposed:.1f} ms exposed and "
        f"{communication - exposed:.1f} ms beside computing"
    )
    yield (
        f"{found.sequences_per_s:,.0f} sequences/s while training, "
        f"{found.sequences_per_s / question.world_size:.1f} an accelerator"
    )
    yield from in_words(expected)
    yield _NOTE

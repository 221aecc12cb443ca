"""`plan cluster`: simulates the question, and shows the result as tables."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from bert_tools.common.tables import aligned
from bert_tools.plan.answer import Answer
from bert_tools.plan.cluster.simulation import (
    AblationRow,
    Question,
    SweepRow,
    ablation,
    sweep,
    sweep_nodes,
)
from bert_tools.plan.forecast import Forecast, forecast, in_words, question_of, too_few_steps
from bert_tools.plan.sample_index import wikipedia_index
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError

_NOTE = "A simulation, not a measurement: its constants were fitted on published A100 runs."
_SIZES = ("nodes", "gpus_per_node", "local_batch_size")
_STEP_NAMES = ("a step of the mean rank", "time", "share")
_ABLATION_NAMES = ("one exchanged for another", "step", "difference", "exposed", "imbalance")
_SWEEP_NAMES = (
    *("nodes", "accelerators", "local", "global", "step", "exposed", "waiting"),
    *("sequences", "samples", "to target "),
)
_KNOWN = ("published", "given")  # samples that are not marked


def answer(args: argparse.Namespace) -> Answer:
    """Simulate the question. Raises ConfigError or DataError for a user's mistake."""
    config = None if args.config is None else load_config(args.config, args.set)
    question = _asked(args, config)
    index = wikipedia_index()
    expected = forecast(question, index)
    found = expected.simulated
    ablated = ablation(found, index) if args.ablation else []
    swept: list[SweepRow] = []
    if args.sweep:
        swept = list(sweep(question, args.sweep, index))
        if not swept:
            problem = "no size of 1 node to 100,000 accelerators can deal this batch"
            remedy = "use the sampler 'quantile', which any batch can represent"
            raise ConfigError("--sweep", problem, remedy)
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
        "run": asdict(run) | {"seconds": run.seconds, "steady_step_ms": run.steady_step_ms},
        "samples_to_target": asdict(found.estimate),
        "forecast": expected.facts,
        "ablation": [asdict(row) for row in ablated],
        "sweep": [asdict(row) for row in swept],
    }
    lines = list(_in_words(expected, ablated, swept))
    if config is not None and (warning := too_few_steps(config, run.steps)):
        lines.append(f"warning: {warning}")
    return Answer(facts=facts, lines=lines)


def _asked(args: argparse.Namespace, config: RunConfig | None) -> Question:
    """The question: options override the config, which overrides defaults. Raises ConfigError."""
    asked: dict[str, Any] = {}
    if config is not None:
        asked = question_of(config, args.config.stem, args.accelerator)
    elif args.set:
        raise ConfigError("--set", "changes a config, and none is given", "add --config FILE")
    names = {each.name for each in fields(Question)}
    given = {name: value for name, value in vars(args).items() if name in names}
    asked |= {name: value for name, value in given.items() if value is not None}
    for name in _SIZES:
        if name not in asked:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, "is missing", "add it, or give a whole run by --config FILE")
    return Question(**asked)


def _in_words(
    expected: Forecast, ablated: Sequence[AblationRow], swept: Sequence[SweepRow]
) -> Iterator[str]:
    """Lines on machine, step by parts, communication and run; then the tables asked for."""
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
        f"program {question.program}, {question.precision}, {question.sampler}, "
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
    if ablated:
        yield from ("", *_ablation_in_words(ablated))
    if swept:
        yield from ("", *_sweep_in_words(swept, question.gpus_per_node))


def _ablation_in_words(rows: Sequence[AblationRow]) -> list[str]:
    """Table of steps with one technique exchanged at a time; the settings asked for are marked."""
    cells = []
    for row in rows:
        mark = " (as asked)" if row.is_as_asked else ""
        name = f"{row.technique}: {row.setting}{mark}"
        cells.append([name, "-", "-", "-", "-"])
        if row.difference_ms is not None:
            cells[-1][1:] = (
                f"{row.step_ms:.1f} ms",
                f"{row.difference_ms:+.1f} ms",
                f"{row.exposed_ms:.1f} ms",
                f"{row.imbalance_tokens:.4f}",
            )
    left_out = [f"left out: {row.setting} ({row.reason})" for row in rows if row.reason]
    return [*aligned(_ABLATION_NAMES, cells, left=_ABLATION_NAMES[0]), *left_out]


def _sweep_in_words(rows: Sequence[SweepRow], gpus_per_node: int) -> list[str]:
    """Table with a row per size; a time whose samples nobody published is marked."""
    cells = [
        (
            f"{row.nodes:,}",
            f"{row.accelerators:,}",
            f"{row.local_batch_size:,}",
            f"{row.global_batch_size:,}",
            f"{row.step_ms:.1f} ms",
            f"{row.exposed_ms:.1f} ms",
            f"{row.waiting_ms:.1f} ms",
            f"{row.sequences_per_s:,.0f}/s",
            f"{row.samples / 1e6:.2f} M",
            f"{row.time_s:,.1f} s" + (" " if row.basis in _KNOWN else "?"),
        )
        for row in rows
    ]
    lines = aligned(_SWEEP_NAMES, cells, left="nodes")
    shown = {row.nodes for row in rows}
    left_out = [f"{nodes:,}" for nodes in sweep_nodes(gpus_per_node) if nodes not in shown]
    if left_out:
        sizes = ", ".join(left_out)
        lines.append(f"left out, as ranks cannot be dealt the batch, or hold it: {sizes} nodes")
    return [*lines, "?: no published run tells the samples at this batch"]

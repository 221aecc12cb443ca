"""The simulator's answers as tables to read."""

from collections.abc import Sequence

from bert_tools.plan.cluster.ablation import AblationRow
from bert_tools.plan.cluster.question import Answer
from bert_tools.plan.cluster.sweep import SweepRow, sweep_nodes

_NOTE = (
    "A simulation, not a measurement: its constants were fitted on published A100 runs "
    "(docs/cluster_model.md)."
)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines: the first column to the left, all others to the right."""
    cells = [list(names), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:{'<' if number == 0 else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def answer_in_words(found: Answer) -> list[str]:
    """Machine, step by parts, communication, and the run."""
    question, run = found.question, found.run
    parts = [
        (name, f"{value:.1f} ms", f"{value / run.step_ms:.1%}")
        for name, value in found.parts_ms.items()
    ]
    hidden = found.mean_ms("communication_ms") - found.mean_ms("exposed_ms")
    return [
        f"{question.nodes:,} nodes of {question.gpus_per_node} {question.accelerator}, "
        f"{question.local_batch_size} a rank, global batch {question.global_batch_size:,}; "
        f"program {question.program}, {question.precision}, {question.sampler}, "
        f"{question.balance}, {question.clip}",
        f"tokens of the largest rank over the mean {found.imbalance_tokens:.4f}, "
        f"padding {found.padding_fraction:.2%}; {len(found.timings)} steps drawn",
        "",
        *table(("a step of the mean rank", "time", "share"), parts),
        *table(("the step", "time", "share"), [("", f"{run.step_ms:.1f} ms", "")])[1:],
        "",
        f"communication {found.mean_ms('communication_ms'):.1f} ms, of which "
        f"{found.mean_ms('exposed_ms'):.1f} ms exposed and {hidden:.1f} ms beside computing",
        f"{found.sequences_per_s:,.0f} sequences/s while training, "
        f"{found.sequences_per_s / question.world_size:.1f} an accelerator",
        *_run_in_words(found),
    ]


def _run_in_words(found: Answer) -> list[str]:
    run, estimate = found.run, found.estimate
    known = "" if estimate.in_range else ", beyond what is published"
    spread = (
        f"{estimate.low:,.0f} to {estimate.high:,.0f}; " if estimate.low < estimate.high else ""
    )
    return [
        f"samples to the target: {estimate.samples:,.0f} ({spread}{estimate.source}{known})",
        f"time to train: {run.seconds:,.1f} s = {run.steps:,} + {run.skipped_steps} skipped steps "
        f"of {run.step_ms:.1f} ms, {run.evaluations} evaluations of {run.evaluation_ms:.1f} ms, "
        f"start-up {run.start_up_s:g} s",
        _NOTE,
    ]


def ablation_in_words(rows: Sequence[AblationRow]) -> list[str]:
    """One technique exchanged at a time; what was asked for is marked."""
    cells = []
    for row in rows:
        mark = " (as asked)" if row.is_as_asked else ""
        name = f"{row.technique}: {row.setting}{mark}"
        if row.step_ms is None or row.difference_ms is None:
            cells.append((name, "-", "-", "-", "-"))
            continue
        cells.append(
            (
                name,
                f"{row.step_ms:.1f} ms",
                f"{row.difference_ms:+.1f} ms",
                f"{row.exposed_ms:.1f} ms",
                f"{row.imbalance_tokens:.4f}",
            )
        )
    left_out = [f"left out: {row.setting} ({row.reason})" for row in rows if row.reason]
    names = ("one exchanged for another", "step", "difference", "exposed", "imbalance")
    return [*table(names, cells), *left_out]


def sweep_in_words(rows: Sequence[SweepRow], gpus_per_node: int) -> list[str]:
    """Sizes in a row each; a time whose samples nobody published is marked."""
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
            f"{row.time_s:,.1f} s" + (" " if row.in_range else "?"),
        )
        for row in rows
    ]
    names = ("nodes", "accelerators", "local", "global", "step", "exposed", "waiting")
    lines = table((*names, "sequences", "samples", "to target "), cells)
    shown = {row.nodes for row in rows}
    left_out = [f"{nodes:,}" for nodes in sweep_nodes(gpus_per_node) if nodes not in shown]
    if left_out:
        lines.append(
            f"left out, as their ranks cannot be dealt the batch: {', '.join(left_out)} nodes"
        )
    return [*lines, "?: no published run tells the samples at this batch"]

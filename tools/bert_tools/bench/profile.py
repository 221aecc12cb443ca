"""`bench profile`: where the time of a training step goes, as a table and a picture of one step."""

from collections.abc import Callable
from typing import Any

import torch

from bert_tools.bench.profile_plot import kind_of
from bert_tools.bench.spans import Span, gaps, largest, record_spans
from bert_tools.bench.train import heading, surroundings
from bert_tools.bench.training_run import TrainingRun, training_run
from mlperf_bert.config.run_config import RunConfig

NUM_UPDATES = 2
WARM_UP = 5
MOST_ROWS = 10


def profile_training(
    config: RunConfig, device: torch.device, num_steps: int, report: Callable[[str], None]
) -> tuple[dict[str, Any], list[Span]]:
    """The JSON object of `bench profile`, of `num_steps` steps, and the spans of one more.

    `report` gets lines of progress.
    """
    report(f"building on {device}, step {config.run.step_mode}")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        for number in range(WARM_UP):
            run(number).item()
        report(f"profiling {num_steps} steps, then one for a picture")
        spans = record_spans(lambda: _steps(run, num_steps), device)
        one_step = record_spans(lambda: _steps(run, 1), device)
    result = {
        "schema_version": 1,
        **tables(spans, num_steps),
        "unit_of_work": "kernel" if device.type == "cuda" else "operator",
        **surroundings(config, device),
    }
    return result, one_step


def tables(spans: list[Span], num_steps: int) -> dict[str, Any]:
    """The largest names, the same by kind, and the time between spans: a step, on average."""
    total = sum(span.self_us for span in spans)
    idle = gaps(spans)
    of_kind: dict[str, float] = {}
    for span in spans:
        kind = kind_of(span.name)
        of_kind[kind] = of_kind.get(kind, 0.0) + span.self_us
    return {
        "steps": num_steps,
        "step_ms": idle.span_us / 1e3 / num_steps,
        "rows": [
            {
                "name": row.name,
                "kind": kind_of(row.name),
                "ms": row.self_us / 1e3 / num_steps,
                "share": row.self_us / total,
                "calls": row.calls / num_steps,
            }
            for row in largest(spans, MOST_ROWS)
        ],
        "kinds": {
            kind: {"ms": us / 1e3 / num_steps, "share": us / total}
            for kind, us in sorted(of_kind.items(), key=lambda pair: -pair[1])
        },
        "calls": len(spans) / num_steps,
        "gap_ms": idle.total_us / 1e3 / num_steps,
        "gap_share": idle.share,
        "gaps": idle.count / num_steps,
        "longest_gap_us": idle.longest_us,
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    what = result["unit_of_work"]
    lines = [
        heading(result),
        f"{result['step_ms']:.2f} ms a step under the profiler, {result['calls']:.0f} {what}s; "
        f"between them {result['gap_ms']:.2f} ms ({result['gap_share']:.1%}) in "
        f"{result['gaps']:.0f} gaps, the longest {result['longest_gap_us']:.0f} us",
        f"{'ms a step':>9} {'share':>6} {'calls':>6}  kind: {what}",
    ]
    lines += [
        f"{row['ms']:9.3f} {row['share']:6.1%} {row['calls']:6.4g}  {row['kind']}: {row['name']}"
        for row in result["rows"]
    ]
    lines.append("by kind:")
    lines += [
        f"{kind['ms']:9.3f} {kind['share']:6.1%}         {name}"
        for name, kind in result["kinds"].items()
    ]
    return "\n".join(lines)


def _steps(run: TrainingRun, count: int) -> None:
    for number in range(count):
        loss = run(number)
    loss.item()  # the device has done everything

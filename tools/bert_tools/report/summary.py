"""A report as lines for people and as one JSON object for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bert_tools.report.facts import RunFacts
from bert_tools.report.measures import MEASURES, numbers_of, time_split
from bert_tools.report.settings import differences
from mlperf_bert.common.errors import one_line

SCHEMA_VERSION = 1
_IN_A_LINE = ("time_to_train_s", "samples_to_target", "best_accuracy", "samples_per_s")


def as_json(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The schema of docs/report.md; keys are only added."""
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [_run_as_json(each) for each in runs],
        "differences": [{"name": row.name, "values": list(row.values)} for row in differences(runs)]
        if len(runs) > 1
        else [],
    }


def _run_as_json(facts: RunFacts) -> dict[str, Any]:
    split = time_split(facts)
    diagnosis = facts.diagnosis.as_json()
    return {
        "label": facts.label,
        "run": facts.run.name,
        "state": facts.state,
        "stopped_by": facts.outcome.stopped_by if facts.outcome else None,
        "attempts": facts.attempts + 1,
        "resumed_at_samples": list(facts.resumes),
        **numbers_of(facts),
        "time_s": asdict(split) if split else None,
        "evaluations": [asdict(each) for each in facts.run.evaluations],
        "environment": dict(facts.environment),
        "verdict": diagnosis["verdict"],
        "why": diagnosis["why"],
        "causes": diagnosis["causes"],
        "slowness": diagnosis["slowness"],
        "absent": list(facts.absent),
    }


def lines_of(runs: Sequence[RunFacts]) -> list[str]:
    """Two lines for each run: how it ended, and the numbers one asks for first."""
    lines = []
    for facts in runs:
        numbers = numbers_of(facts)
        words = [
            f"{each.label.partition(' (')[0].lower()} {each.in_words(value)}"
            for each in MEASURES
            if each.key in _IN_A_LINE and (value := numbers[each.key]) is not None
        ]
        lines.append(f"{facts.run.name}: {facts.state}, {facts.diagnosis.verdict.kind}")
        lines += [f"  {', '.join(words)}"] if words else []
    return [one_line(line) for line in lines]

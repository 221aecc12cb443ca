"""The diagnosis of a run: a verdict, the likeliest causes, and what made it slow."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bert_tools.report.causes import Cause, find_causes, unlike_published
from bert_tools.report.run import Run
from bert_tools.report.slowness import find_slowness
from bert_tools.report.verdict import Kind, Verdict, judge
from mlperf_bert.common.errors import one_line
from mlperf_bert.data.index import Baseline

SCHEMA_VERSION = 1
EXIT_STATUSES: dict[Kind, int] = {
    "on track": 0,
    "behind": 1,
    "off": 1,
    "cannot be judged": 3,
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `report --doctor` says of one run."""

    run: Run
    verdict: Verdict
    causes: tuple[Cause, ...]
    slowness: tuple[Cause, ...]

    @property
    def exit_status(self) -> int:
        """0 on track, 1 behind or off, 3 cannot be judged."""
        return EXIT_STATUSES[self.verdict.kind]

    def lines(self) -> list[str]:
        """For people."""
        title = f"{self.run.name}: {self.verdict.kind}"
        lines = [title, f"  {self.verdict.why}"]
        lines += _in_words("likeliest causes", self.causes)
        lines += _in_words("what made it slow", self.slowness)
        return [one_line(line) for line in lines]

    def as_json(self) -> dict[str, Any]:
        """For programs; keys are only added."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.run.name,
            "verdict": self.verdict.kind,
            "why": self.verdict.why,
            "causes": [asdict(cause) for cause in self.causes],
            "slowness": [asdict(cause) for cause in self.slowness],
        }


def diagnose(run: Run, baseline: Baseline | None = None) -> Diagnosis:
    """Of a run; `baseline` is what a guess without context reaches on its held-out set."""
    verdict, causes = judge(run), find_causes(run, baseline)
    if any(cause.decisive for cause in causes):
        verdict = replace(verdict, kind="off")
    if not causes and verdict.kind in ("behind", "off"):
        causes = [unlike_published(run)]
    return Diagnosis(run, verdict, tuple(causes), tuple(find_slowness(run)))


def _in_words(title: str, causes: Sequence[Cause]) -> list[str]:
    lines = [f"{title}:"] if causes else []
    for number, cause in enumerate(causes, 1):
        lines += [
            f"  {number}. {cause.cause}",
            f"     seen: {cause.evidence}",
            f"     do: {cause.remedy}",
        ]
    return lines

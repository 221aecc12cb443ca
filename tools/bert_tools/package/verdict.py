"""The making of a package: export, our checks, MLCommons' checkers, verdict and score."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.means import olympic_mean
from bert_tools.package.checkers import run_checkers
from bert_tools.package.export import export
from bert_tools.package.own_checks import Problems, SystemResults, check_systems


@dataclass(frozen=True, slots=True)
class Verdict:
    """Problems found, or the scores if there are none."""

    rulesets: tuple[str, ...]
    problems: Problems
    scores: tuple[dict[str, Any], ...]
    checkers_ran: bool

    @property
    def is_accepted(self) -> bool:
        """True if all checks passed."""
        return not self.problems

    def to_json(self, out: Path) -> str:
        """One JSON object; `out` is the directory of an accepted package."""
        answer = {
            "schema_version": 1,
            "accepted": self.is_accepted,
            "out": str(out) if self.is_accepted else None,
            "rulesets": self.rulesets,
            "checkers_ran": self.checkers_ran,
            "systems": self.scores,
            "problems": [
                dict(zip(("where", "problem", "remedy"), problem.args, strict=True))
                for problem in self.problems
            ],
        }
        return json.dumps(answer)

    def in_words(self, out: Path) -> str:
        """A line for each problem, or the scores; then the verdict."""
        if self.is_accepted:
            verdict = f"accepted under {', '.join(self.rulesets)}: FOUND NO ERRORS, SUCCESS; {out}"
            return "\n".join([*map(_score_in_words, self.scores), verdict])
        unasked = "" if self.checkers_ran else "; MLCommons' checkers were not asked yet"
        count = len(self.problems)
        verdict = f"refused, {out} was not made: {count} problem{'s' * (count != 1)}{unasked}"
        return "\n".join([*map(str, self.problems), verdict])


def make_package(root: Path, results: Path, tree: Path, rulesets: tuple[str, ...]) -> Verdict:
    """Export a repository into the new directory `tree` and check the result.

    Raises ConfigError or DataError if that is not possible at all.
    """
    systems, problems = export(root, results, tree)
    # Without the files left out, the checkers would fail with a traceback or silently.
    ask_checkers = not problems
    checked, found = check_systems(tree, systems)
    problems += found
    scaling: dict[str, float] = {}
    if ask_checkers:
        divisions = {one.name: one.division for one in checked}
        said, scaling = run_checkers(tree, divisions, rulesets)
        problems += said
    scores = () if problems else tuple(_score_of(one, scaling[one.name]) for one in checked)
    return Verdict(rulesets, problems, scores, ask_checkers)


def _score_of(results: SystemResults, scaling_factor: float) -> dict[str, Any]:
    """The score of a system that passed all checks; times in minutes, before any scaling.

    `scaling_factor` comes from the reference convergence points, for runs that needed fewer samples
    than the reference (closed division); else 1.
    """
    minutes = [run.minutes for run in results.runs]
    return {
        "system": results.name,
        "division": results.division,
        "score_minutes": olympic_mean(minutes) * scaling_factor,
        "scaling_factor": scaling_factor,
        "times_minutes": minutes,
        "accuracies": [run.accuracy for run in results.runs],
        "caches_cleared": sum(run.cache_cleared for run in results.runs),
    }


def _score_in_words(score: dict[str, Any]) -> str:
    factor, times = score["scaling_factor"], score["times_minutes"]
    scaled = "" if factor == 1 else f", scaled by {factor:.4f}"
    return (
        f"{score['system']} ({score['division']}): {score['score_minutes']:.3f} minutes, the "
        f"olympic mean of {len(times)} runs{scaled}\n"
        f"  times {' '.join(f'{minutes:.3f}' for minutes in times)}\n"
        f"  accuracy {min(score['accuracies']):.4f} or better; page cache dropped before "
        f"{score['caches_cleared']} of {len(times)} runs"
    )

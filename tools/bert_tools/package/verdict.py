"""What becomes of a package: export, our checks, MLCommons' checkers, and the verdict on all."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bert_tools.package.checkers import run_checkers
from bert_tools.package.export import export
from bert_tools.package.own_checks import Problems, check_systems
from bert_tools.package.score import Score, in_words, score_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and the scores where nothing was."""

    rulesets: tuple[str, ...]
    problems: Problems
    scores: tuple[Score, ...]
    checkers_ran: bool

    @property
    def is_accepted(self) -> bool:
        """Whether everything passed."""
        return not self.problems

    def to_json(self, out: Path) -> str:
        """One JSON object; `out` is where an accepted package lies."""
        answer = {
            "schema_version": 1,
            "accepted": self.is_accepted,
            "out": str(out) if self.is_accepted else None,
            "rulesets": self.rulesets,
            "checkers_ran": self.checkers_ran,
            "systems": [asdict(score) for score in self.scores],
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
            return "\n".join([*map(in_words, self.scores), verdict])
        unasked = "" if self.checkers_ran else "; MLCommons' checkers were not asked yet"
        count = len(self.problems)
        verdict = f"refused, {out} was not made: {count} problem{'s' * (count != 1)}{unasked}"
        return "\n".join([*map(str, self.problems), verdict])


def make_package(root: Path, results: Path, tree: Path, rulesets: tuple[str, ...]) -> Verdict:
    """Export a repository into the new directory `tree` and check what is there.

    Raises ConfigError or DataError where that is not possible at all.
    """
    systems, problems = export(root, results, tree)
    # The checkers would stumble over what was left out, with a traceback or silently.
    ask_checkers = not problems
    checked, found = check_systems(tree, systems)
    problems += found
    scaling: dict[str, float] = {}
    if ask_checkers:
        divisions = {one.name: one.division for one in checked}
        said, scaling = run_checkers(tree, divisions, rulesets)
        problems += said
    scores = () if problems else tuple(score_of(one, scaling[one.name]) for one in checked)
    return Verdict(rulesets, problems, scores, ask_checkers)

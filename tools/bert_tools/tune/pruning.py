"""Whether a training that is under way is hopeless, by its evaluations beside those of others.

Evaluations are compared by their number, so runs of other batch sizes can be as well. A run that
reached its target counts as at the target from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

PruningRule = Literal["median", "halving", "none"]

LEAST_CURVES = 4  # of others, before anything is stopped
HALVING_FACTOR = 3  # a third goes on at every rung: evaluations 1, 3, 9, ... times the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruner:
    """The rule of a study.

    "median": stop where the best accuracy so far is below the median of what the others had by
    then. "halving": successive halving without waiting (ASHA, arXiv 1810.05934): at rungs, go on
    in the best third alone. Nothing is stopped before evaluation `first`.
    """

    rule: PruningRule
    first: int
    target: float

    def is_hopeless(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
        """Whether to stop after the last of the accuracies `own`; `others` as far as they came."""
        number = len(own)
        if self.rule == "none" or number < self.first or max(own) >= self.target:
            return False
        if self.rule == "halving" and not self._is_rung(number):
            return False
        theirs = [best for each in others if (best := self._best_at(number, each)) is not None]
        if len(theirs) < LEAST_CURVES:
            return False
        if self.rule == "median":
            return max(own) < median(theirs)
        better = sum(each > max(own) for each in theirs)
        return better >= (len(theirs) + 1) / HALVING_FACTOR

    def _best_at(self, number: int, accuracies: Sequence[float]) -> float | None:
        """Best of the first `number`; None for a run that neither came so far nor to the target."""
        until = accuracies[:number]
        best = max(until, default=0.0)
        if len(until) < number and best < self.target:
            return None
        return min(best, self.target)

    def _is_rung(self, number: int) -> bool:
        rung = self.first
        while rung < number:
            rung *= HALVING_FACTOR
        return rung == number

"""What a rank is doing just now, for the line that says where it failed or hung."""

from typing import Literal

Doing = Literal["start-up", "batch", "step", "evaluation", "checkpoint", "end"]

_IN_WORDS: dict[Doing, str] = {
    "start-up": "start-up",
    "batch": "waiting for the batch of step {:d}",
    "step": "step {:d}",
    "evaluation": "evaluation after {:,d} samples",
    "checkpoint": "checkpoint of step {:d}",
    "end": "end of the run",
}
_MUST_GO_ON: frozenset[Doing] = frozenset({"batch", "step", "evaluation"})  # disks may be slow


class Whereabouts:
    """Kept up to date by the thread that trains, read by others; begins with start-up."""

    def __init__(self) -> None:
        self._now: tuple[int, Doing, int] = (0, "start-up", 0)  # one object: read as a whole

    def at(self, doing: Doing, number: int | None = None) -> None:
        """From now on this; `number` is the step's, or of an evaluation that of the samples."""
        self._now = (self._now[0] + 1, doing, number or 0)

    @property
    def in_start_up(self) -> bool:
        """Whether the first step has not begun."""
        return self._now[1] == "start-up"

    @property
    def in_words(self) -> str:
        """As `step 37`."""
        _, doing, number = self._now
        return _IN_WORDS[doing].format(number)

    def sign_of_life(self) -> int | None:
        """Another number after each `at`; None in what may take as long as it takes."""
        count, doing, _ = self._now
        return count if doing in _MUST_GO_ON else None

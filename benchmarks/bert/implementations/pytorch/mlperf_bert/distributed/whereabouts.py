"""What a rank is doing, for its messages, its signals and its watchdog."""

from typing import Literal

Doing = Literal["start-up", "warm-up", "batch", "step", "evaluation", "checkpoint", "end"]

_IN_WORDS: dict[Doing, str] = {
    "start-up": "start-up",
    "warm-up": "warm-up, which compiles kernels",
    "batch": "waiting for the batch of step {:d}",
    "step": "step {:d}",
    "evaluation": "evaluation after {:,d} samples",
    "checkpoint": "checkpoint of step {:d}",
    "end": "end of the run",
}
_MUST_GO_ON: frozenset[Doing] = frozenset({"batch", "step", "evaluation"})  # disks may be slow


class Whereabouts:
    """The current activity: set by the training thread, read by others; begins with start-up."""

    def __init__(self) -> None:
        self._now: tuple[int, Doing, int] = (0, "start-up", 0)  # one object: read as a whole

    def at(self, doing: Doing, number: int | None = None) -> None:
        """Set the activity; `number` is the step's, or for an evaluation the samples."""
        self._now = (self._now[0] + 1, doing, number or 0)

    @property
    def in_start_up(self) -> bool:
        """True before the first step."""
        return self._now[1] in ("start-up", "warm-up")

    @property
    def in_words(self) -> str:
        """The activity in words, like `step 37`."""
        _, doing, number = self._now
        return _IN_WORDS[doing].format(number)

    @property
    def progress(self) -> int | None:
        """A number that grows with each `at`; None in an activity without a time limit."""
        count, doing, _ = self._now
        return count if doing in _MUST_GO_ON else None

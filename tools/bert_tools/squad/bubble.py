"""How much of a pipeline's time its ranks wait: measured from what they did, and by formula.

No torch. A bubble is the time of an update in which a rank computes nothing, as a share of all
ranks' time (GPipe, arXiv 1811.06965, section 2.3).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol

from bert_tools.squad.settings import VIRTUAL_STAGES, Schedule

# Forward, backward whole or for the inputs alone, backward for the weights alone.
Kind = Literal["F", "B", "W"]

SAME_CLOCK_S = 1.0  # clocks of two machines count from when each was switched on


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvent:
    """What a rank computed for one microbatch, from when to when in seconds of the update."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float


class Synchronize(Protocol):
    """Waits until the device has done what it was asked to."""

    def __call__(self) -> object:
        """Return then."""


class StageClock:
    """Notes when a rank's stages compute, while it is `running`.

    Args:
        rank: of the events.
        synchronize: called at both ends of each; slows a GPU down, so only some updates are
            measured.
    """

    def __init__(self, rank: int, synchronize: Synchronize = lambda: None) -> None:
        self.running = False
        self._rank = rank
        self._synchronize = synchronize
        self._began = 0.0
        self._events: list[StageEvent] = []

    def start(self, of_first_rank: float | None = None) -> None:
        """Begin an update: now is its second 0.

        Args:
            of_first_rank: what `perf_counter` said on rank 0 when all had met. Processes of one
                machine have the same clock, so that is second 0 for all of them; leaving a
                collective takes each of them another time.
        """
        self.running = True
        self._began = perf_counter()
        if of_first_rank is not None and abs(self._began - of_first_rank) < SAME_CLOCK_S:
            self._began = of_first_rank
        self._events = []

    def stop(self) -> list[StageEvent]:
        """End it, and give what happened."""
        self.running = False
        return self._events

    @contextmanager
    def span(self, stage: int, kind: Kind, microbatch: int) -> Iterator[None]:
        """Note what happens within."""
        if not self.running:
            yield
            return
        self._synchronize()
        begin_s = perf_counter() - self._began
        yield
        self._synchronize()
        event = StageEvent(
            rank=self._rank,
            stage=stage,
            kind=kind,
            microbatch=microbatch,
            begin_s=begin_s,
            end_s=perf_counter() - self._began,
        )
        self._events.append(event)


def measured_bubble(events: Sequence[StageEvent]) -> float:
    """1 - time computing / (ranks * time from the first begin to the last end)."""
    ranks = {event.rank for event in events}
    span = max(event.end_s for event in events) - min(event.begin_s for event in events)
    busy = sum(event.end_s - event.begin_s for event in events)
    return 1 - busy / (len(ranks) * span)


def bubble_by_formula(schedule: Schedule, stages: int, microbatches: int) -> float | None:
    """What s equal stages leave idle with m microbatches, communication free.

    (s - 1) / (m + s - 1) of GPipe and 1F1B (arXiv 2104.04473, section 2.2, which gives it as a
    share of the ideal time: (s - 1) / m); v stages a rank make it (s - 1) / (v m + s - 1).

    The zero-bubble schedule, where forward, backward for inputs and backward for weights take the
    same time (arXiv 2401.10241, section 6): no rank waits but for the first microbatch to arrive,
    at the last after s - 1 of a rank's 6 m + s - 1 units of time. (Zero is the bubble between
    updates, which the paper lets overlap.)

    None where a schedule has too few microbatches for its formula: m < s interleaved, m < 2 s - 1
    of the zero-bubble schedule.
    """
    least, rounds = 1, 1  # units of time that a microbatch takes of a rank
    if schedule == "interleaved":
        least, rounds = stages, VIRTUAL_STAGES
    elif schedule == "zero_bubble":
        least, rounds = 2 * stages - 1, 3 * VIRTUAL_STAGES
    if microbatches < least:
        return None
    return (stages - 1) / (rounds * microbatches + stages - 1)


def timeline(events: Sequence[StageEvent]) -> list[dict[str, Any]]:
    """The events as `squad_result.json` has them, in order of time."""
    return [
        {
            "rank": event.rank,
            "stage": event.stage,
            "kind": event.kind,
            "microbatch": event.microbatch,
            "begin_s": round(event.begin_s, 6),
            "end_s": round(event.end_s, 6),
        }
        for event in sorted(events, key=lambda event: (event.begin_s, event.rank))
    ]

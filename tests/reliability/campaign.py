"""Runs that lose a rank at a chosen or a random moment, go on, and must end as if nothing had been.

Everything random comes from a seed, but the machine decides how far a run is at a moment.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs import POLL_S, Job, freeze, kill, thaw
from runs import Attempt, Phase
from support import sets_of

Aim = Literal["any", "start-up", "step", "evaluation", "checkpoint", "end"]
# Two a run: after an end there is nothing left to kill.
AIMS = (*("start-up", "end", "step", "end", "evaluation", "checkpoint", "any", "end"),)

STEPS = 64
HANG_TIMEOUT_S = 15
STARTS_WITHIN_S = 120  # on a machine that has other work
START_TAKES_S = 2.0  # at least, from the first sign of all ranks to the first step
TRAINING_TAKES_S = 4.0  # about
END_TAKES_S = 0.5  # about: from the clock's stop until the outcome is written
ENDS_WITHIN_S = 60  # after a kill: the others see a closed connection, and wait for no timeout
MISSED, STOPPED, LOST = 3, 75, 70  # statuses: target not reached; by a signal; others are gone
KILLED = 128 + 9
BATCHES = {1: 16, 2: 8, 3: 5, 4: 4}  # of a rank, by the number of ranks
SETTINGS = (
    *(f"run.max_steps={STEPS}", f"schedule.decay_steps={STEPS}"),
    f"run.hang_timeout_s={HANG_TIMEOUT_S}",
    "checkpoint.interval_steps=7",
)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


@dataclass(frozen=True)
class Setup:
    """The trained setup and its ranks; `settings` also cover values tied to their number."""

    data: Path
    config: Path
    ranks: int
    settings: tuple[str, ...] = (*SETTINGS, *DROPOUT)

    def arguments(self, run, *options):
        sets = (
            f"parallel.ranks_per_node={self.ranks}",
            f"parallel.local_batch_size={BATCHES[self.ranks]}",
            *self.settings,
        )
        paths = ("--config", self.config, "--data", self.data, "--run-dir", run.root)
        return ["train", *paths, *sets_of(*sets), *options]

    def start(self, run, *options):
        """Start it; what it prints goes beside the run directory."""
        return Job(self.arguments(run, *options), run.root.with_suffix(".output"))

    def train(self, run, *options):
        """Train to the end."""
        with self.start(run, *options) as job:
            assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        return run


@dataclass
class Kill:
    """One killed rank and what followed."""

    ranks: int
    victim: int
    aim: Aim
    phase: Phase
    step: int  # of the last record before
    status: int  # with which the job ended
    seconds: float  # until it had


def lose_ranks(setup, whole, run, aims, draw):
    """A run that loses a rank once for each of `aims`, and each time goes on; its kills.

    Where it ends before a moment that is aimed at, that is no kill, and the run is over.
    """
    kills = []
    for aim in (*aims, None):
        if kills and kills[-1].phase == "end":
            aim = None  # nothing is left of it that could be killed
        newest, attempt = run.newest_step(), Attempt(run)
        with setup.start(run, "--resume", "auto") as job:
            done = aim and _lose_a_rank(job, setup, attempt, aim, draw)
            if done is None:
                assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        if attempt.has_begun():
            assert run.resumed_from() == newest
        if done is None:
            break
        print(done)
        kills.append(done)
        run.check_so_far(whole)
    run.check_final(whole)
    return kills


def _lose_a_rank(job, setup, attempt, aim, draw):
    """Kill a rank and wait for the end of its job; None where that ended before."""
    victim, is_time = draw.randrange(setup.ranks), _moment(attempt, aim, draw)
    phase = strike(job, attempt, setup.ranks, victim, aim, is_time)
    if phase is None:
        return None
    began = time.monotonic()
    status = job.ended(ENDS_WITHIN_S)
    seconds = time.monotonic() - began
    # At the end the killed rank may have done all it had to.
    assert status in (KILLED, LOST) or (phase, status) == ("end", MISSED), job.printed()
    return Kill(setup.ranks, victim, aim, phase, attempt.run.last_step(), status, seconds)


def _moment(attempt, aim, draw):
    """From when on to strike, as a function of the seconds since all ranks were there."""
    if aim == "start-up":
        drawn = draw.uniform(0, START_TAKES_S)
        return lambda seconds: seconds >= drawn
    if aim == "end":
        return _after(attempt.has_stopped, draw.uniform(0, END_TAKES_S))
    if aim == "any":
        return _after(lambda: attempt.phase() != "start-up", draw.uniform(0, TRAINING_TAKES_S))
    wanted = min(attempt.run.last_step() + draw.randint(1, 16), STEPS - 8)
    return lambda _: attempt.run.last_step() >= wanted


def _after(happens, wait_s):
    """Whether so many seconds have gone since something happened, as a function of the seconds."""
    began = []

    def is_time(seconds):
        if not began and happens():
            began.append(seconds)
        return bool(began) and seconds >= began[0] + wait_s

    return is_time


def strike(job, attempt, ranks, victim, aim, is_time):
    """Kill a rank while the run is where it is aimed at: the phase; None where it ended before.

    In the last seconds, which have a checkpoint too, the moment alone is aimed at.

    All ranks are frozen first: what was true may have passed before the signal arrived.
    """
    processes = job.wait_for_ranks(ranks, STARTS_WITHIN_S)
    began = time.monotonic()
    while job.is_running:
        if is_time(time.monotonic() - began) and aim in ("any", "end", attempt.phase()):
            freeze(list(processes.values()))
            phase = attempt.phase()
            if aim in ("any", "end", phase):
                kill(processes[victim])
                thaw(list(processes.values()))
                return phase
            thaw(list(processes.values()))
        time.sleep(POLL_S)
    return None

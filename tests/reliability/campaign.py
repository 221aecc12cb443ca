"""Runs that lose a rank at a chosen or a random moment, go on, and must end as if nothing had been.

Everything random comes from a seed that is printed, but the machine decides how far a run is at a
moment.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs import POLL_S, Job, freeze, kill, thaw
from runs import Attempt, Phase, Run

Aim = Literal["any", "start-up", "step", "evaluation", "checkpoint", "end"]
# Two a run: after an end there is nothing left to kill.
AIMS = (*("start-up", "end", "step", "end", "evaluation", "checkpoint", "any", "end"),)

STEPS = 64
HANG_TIMEOUT_S = 15
STARTS_WITHIN_S = 120  # on a machine that has other work
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
        words = [word for setting in sets for word in ("--set", setting)]
        return ["train", *paths, *words, *options]

    def start(self, run, *options):
        """Start it; what it prints goes beside the run directory."""
        return Job(self.arguments(run, *options), run.root.with_suffix(".output"))


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody killed, to compare others with."""

    run: Run
    trace: list[tuple[Any, ...]]
    final: dict[str, bytes]
    outcome: dict[str, Any]
    start_up_s: float  # from the first sign of all ranks to the first record
    seconds: float  # from there to the end

    def check_so_far(self, run):
        """Check that a run's records so far are equal, every bit, and its checkpoints are whole."""
        trace = run.trace()
        assert trace == self.trace[: len(trace)]
        run.check_checkpoints()

    def check_final(self, run):
        assert run.trace() == self.trace
        assert run.final_state() == self.final
        assert run.outcome() == self.outcome
        run.check_checkpoints()


def undisturbed(setup, root):
    run = Run(root)
    with setup.start(run) as job:
        job.wait_for_ranks(setup.ranks, STARTS_WITHIN_S)
        began = time.monotonic()
        job.wait_until(lambda: run.last_step() > 0, STARTS_WITHIN_S)
        start_up_s = time.monotonic() - began
        assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        seconds = time.monotonic() - began
    assert len(run.trace()) == STEPS
    return Undisturbed(run, run.trace(), run.final_state(), run.outcome(), start_up_s, seconds)


@dataclass
class Kill:
    """One killed rank and what followed; a line of the table."""

    number: int
    ranks: int
    victim: int
    aim: Aim
    phase: Phase
    step: int  # of the last record before
    status: int  # with which the job ended
    seconds: float  # until it had
    checkpoints: int  # whole ones, then
    next_from: int | None = None  # step from which the next attempt went on, where it came so far
    equal: bool = False  # whether the run ended as the undisturbed one

    def in_words(self):
        """As a line below `HEADING`."""
        next_from = "-" if self.next_from is None else self.next_from
        return (
            f"{self.number:4}  {self.ranks:5}  {self.victim:6}  {self.aim:10}  {self.phase:10}  "
            f"{self.step:4}  {self.status:6}  {self.seconds:7.1f}  {self.checkpoints:11}  "
            f"{next_from:>9}  {'yes' if self.equal else 'NO'}"
        )


HEADING = (
    "kill  ranks  victim  aimed at    hit         step  status  seconds  checkpoints  next from  "
    "equal"
)


@dataclass
class Campaign:
    """Kills over several runs, one after the other."""

    random: random.Random
    directory: Path
    kills: list[Kill] = field(default_factory=list)
    runs: int = 0

    def run(self, setup, expected, aims):
        """One run that loses a rank once for each of `aims`, and each time goes on; its kills.

        Where it ends before a moment that is aimed at, that is no kill, and the run is over.
        """
        self.runs += 1  # not every run has a kill
        run = Run(self.directory / f"run-{self.runs:02d}")
        killed = []
        for aim in (*aims, None):
            if killed and killed[-1].phase == "end":
                aim = None  # nothing is left of it that could be killed
            newest, attempt = run.newest_step(), Attempt(run)
            with setup.start(run, "--resume", "auto") as job:
                kill = aim and self._kill(job, setup, expected, attempt, aim)
                if kill is None:
                    assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
            if attempt.has_begun():
                assert run.resumed_from() == newest
                if killed:
                    killed[-1].next_from = newest
            if kill is None:
                break
            killed.append(kill)
            self.kills.append(kill)
            expected.check_so_far(run)
        expected.check_final(run)
        for each in killed:
            each.equal = True
        return killed

    def _kill(self, job, setup, expected, attempt, aim):
        """Kill a rank and wait for the end of its job; None where that ended before."""
        run, victim = attempt.run, self.random.randrange(setup.ranks)
        is_time = self._moment(expected, attempt, aim)
        phase = strike(job, attempt, setup.ranks, victim, aim, is_time)
        if phase is None:
            return None
        began = time.monotonic()
        status = job.ended(ENDS_WITHIN_S)
        seconds = time.monotonic() - began
        # At the end the killed rank may have done all it had to.
        assert status in (KILLED, LOST) or (phase, status) == ("end", MISSED), job.printed()
        return Kill(
            number=len(self.kills) + 1,
            ranks=setup.ranks,
            victim=victim,
            aim=aim,
            phase=phase,
            step=run.last_step(),
            status=status,
            seconds=seconds,
            checkpoints=run.check_checkpoints(),
        )

    def _moment(self, expected, attempt, aim):
        """From when on to strike, as a function of the seconds since all ranks were there."""
        run = attempt.run
        if aim == "start-up":
            drawn = self.random.uniform(0, 0.5 * expected.start_up_s)
            return lambda seconds: seconds >= drawn
        if aim == "end":
            drawn = self.random.uniform(0, END_TAKES_S)
            stopped = []

            def is_late(seconds):
                if not stopped and attempt.has_stopped():
                    stopped.append(seconds)
                return bool(stopped) and seconds >= stopped[0] + drawn

            return is_late
        if aim == "any":
            # The clock starts with the training: starting takes most of so short a run.
            waited = self.random.uniform(0, expected.seconds - expected.start_up_s)
            begun = []

            def is_time(seconds):
                if not begun and attempt.phase() != "start-up":
                    begun.append(seconds)
                return bool(begun) and seconds >= begun[0] + waited

            return is_time
        wanted = min(run.last_step() + self.random.randint(1, 16), STEPS - 8)
        return lambda _: run.last_step() >= wanted


def strike(
    job,
    attempt,
    ranks,
    victim,
    aim,
    is_time,
):
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

"""Runs that lose a rank in a chosen phase, go on, and must end as if nothing had been.

Everything random comes from a seed, but the machine decides how far a run is at a moment.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from jobs import POLL_S, Job, freeze, kill, thaw
from runs import Attempt
from support import sets_of

PHASES = ("start-up", "step", "evaluation", "checkpoint")
STEPS = 64
HANG_TIMEOUT_S = 15
STARTS_WITHIN_S = 120  # on a machine that has other work
START_TAKES_S = 2.0  # at least, from the first sign of all ranks to the first step
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


def lose_ranks(setup, whole, run, phases, draw):
    """Lose a rank once in each of `phases`, and each time go on; then end as `whole` did."""
    for phase in phases:
        newest, attempt = run.newest_step(), Attempt(run)
        with setup.start(run, "--resume", "auto") as job:
            victim = strike(job, attempt, setup.ranks, phase, draw)
            assert job.ended(ENDS_WITHIN_S) in (KILLED, LOST), job.printed()
            cause = rf"first cause: rank {victim} \(pid \d+\) was killed by SIGKILL$"
            assert job.says(cause), job.printed()
        if attempt.has_begun():
            assert run.resumed_from() == newest
        run.check_so_far(whole)
    newest = run.newest_step()
    setup.train(run, "--resume", "auto")
    assert run.resumed_from() == newest
    run.check_final(whole)


def strike(job, attempt, ranks, phase, draw):
    """Kill a rank in this phase, after a drawn number of steps, or of seconds in the start-up.

    Returns which.

    All ranks are frozen first: what was true may have passed before the signal arrived.
    """
    first_step = attempt.run.last_step() + draw.randint(1, 8)
    wait_s, victim = draw.uniform(0, START_TAKES_S), draw.randrange(ranks)
    processes = job.wait_for_ranks(ranks, STARTS_WITHIN_S)
    began = time.monotonic()
    while True:
        if phase == "start-up":
            is_time = time.monotonic() - began >= wait_s
        else:
            is_time = attempt.run.last_step() >= first_step
        if is_time and attempt.phase() == phase:
            freeze(list(processes.values()))
            is_there = attempt.phase() == phase
            if is_there:
                kill(processes[victim])
            thaw(list(processes.values()))
            if is_there:
                return victim
        assert job.is_running, f"it has ended before a kill in {phase}: {job.printed()}"
        time.sleep(POLL_S)

"""Samples to a target at every batch, by four optimizers: trainings, one line of a file each.

    python study.py DATA WORK [--batches 32,128] [--optimizers adamw,muon] [--workers 2]

`records.jsonl`, beside this file, gets a line whenever a training ends or is put aside, and what it
has is not done again: the same command continues, also on another machine. SIGTERM or Ctrl-C ends
it in order; with the same WORK, unfinished trainings then go on from their checkpoints.

For each batch: TRIALS settings an optimizer, from one Latin hypercube for all; by successive
halving half of them go on at a quarter and at half of the budget. The best is then trained with
SEEDS seeds that no trial had. The rate has come down by the end of the budget. A seed goes on at
its last rate for up to half as many samples again, unless no trial reached the target. The records
also have arms clipped by buckets, each forward alone, which this file no longer trains. Commit
616d0d8d did.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy.stats.qmc import LatinHypercube

from bert_tools.report.run import read_metrics
from bert_tools.tune.study import read_curve
from mlperf_bert.data.index import Manifest
from mlperf_bert.errors import STOPPED, TARGET_MISSED

HERE = Path(__file__).parent
RECORDS = HERE / "records.jsonl"
OPTIMIZERS = ("adamw", "lamb", "muon", "normuon")
OVER_GUESS = 1.5  # the target
NEARER_OVER_GUESS, NEARER_BATCH = 1.25, 2048  # from this batch on
TRIALS, SEEDS = {32: 12, 128: 12, 512: 12, 2048: 8}, 5
TRIAL_SEED, FIRST_SEED = 11, 101
LONGEST = 1.5  # of the budget: a seed that has not reached the target by then has missed it
STAGES = (0.25, 0.5, 1.0)  # of the budget; half of the trials go on after each but the last
BUDGETS = {32: 80_000, 128: 112_000, 512: 192_000, 2048: 458_752}  # samples until the rate is low
INTERVALS = {32: 4000, 128: 3840, 512: 4096, 2048: 8192}  # samples between evaluations
LOCAL = 64  # sequences a forward; larger batches accumulate
# Highest rates at a batch of 32: a factor of 40 around the best of an earlier, thrown away search.
RATES = {"adamw": (1.6e-4, 6.4e-3), "lamb": (5e-4, 2e-2), "muon": (4e-4, 1.6e-2)}
RATES["normuon"] = RATES["muon"]  # whose updates have the same root mean square
RATE_POWER = 0.25  # of the batch: the ranges go up with it
WARM_UP, FALLS, BETA_2, DECAY = (0.01, 0.1), (0.4, 1.0), (0.9, 0.999), (1e-3, 0.3)
LAST_RATE = 0.1  # of the highest; reached after FALLS of the budget, and kept
ENDS = {0: "reached", TARGET_MISSED: "missed", STOPPED: "aside"}


@dataclass(eq=False)
class Training:
    """One training; `name` is its directory and its key in the records."""

    optimizer: str
    batch: int
    kind: str  # "trial" or "seed"
    number: int
    settings: dict

    @property
    def name(self):
        """Key and directory."""
        return f"{self.optimizer}-{self.batch}-{self.kind}-{self.number}"

    @property
    def seed(self):
        """Trials share one; repetitions have seeds of their own."""
        return TRIAL_SEED if self.kind == "trial" else FIRST_SEED + self.number

    def options(self, guess):
        """Words of `train` for it."""
        local = min(LOCAL, self.batch)
        values = {
            "run.seed": self.seed,
            "run.max_steps": longest(self.batch) // self.batch,
            "parallel.local_batch_size": local,
            "parallel.grad_accum_steps": self.batch // local,
            "optim.name": self.optimizer,
            "eval.target_accuracy": goal(OVER_GUESS, guess),
            "eval.interval_samples": INTERVALS[self.batch],
            **self.settings,
        }
        return [word for key, each in values.items() for word in ("--set", f"{key}={each}")]

    def target(self, guess):
        """Accuracy at which it ends."""
        is_nearer = self.batch >= NEARER_BATCH
        return goal(NEARER_OVER_GUESS if is_nearer else OVER_GUESS, guess)


def goal(over, guess):
    """The accuracy so many times the guess, rounded up."""
    return math.ceil(1e4 * over * guess) / 1e4


def longest(batch):
    """Samples after which a training has missed the target."""
    return int(LONGEST * BUDGETS[batch]) // batch * batch


def drawn(optimizer, batch):
    """The settings of each trial: the same points for every optimizer, rates in its own range."""
    points = LatinHypercube(5, seed=batch).random(TRIALS[batch])
    steps, scale = BUDGETS[batch] // batch, (batch / 32) ** RATE_POWER
    for rate, warm_up, falls, beta_2, decay in points:
        highest = _between([scale * each for each in RATES[optimizer]], rate)
        yield {
            "optim.learning_rate": highest,
            "schedule.end_learning_rate": float(f"{LAST_RATE * highest:.4g}"),
            "schedule.decay_steps": round(steps * _between(FALLS, falls)),
            "schedule.warmup_steps": max(1, round(steps * _between(WARM_UP, warm_up))),
            "optim.beta_2": round(1 - _between([1 - each for each in BETA_2], beta_2), 5),
            "optim.weight_decay": _between(DECAY, decay),
        }


def _between(ends, share):
    low, high = map(math.log, ends)
    return float(f"{math.exp(low + share * (high - low)):.4g}")


class Study:
    """The records, and the trainings that go on."""

    path, draw, training = RECORDS, staticmethod(drawn), Training

    def __init__(self, data, work, workers, optimizers=OPTIMIZERS):
        self.data, self.work, self.workers = data, work, workers
        self.optimizers = optimizers
        self.guess = Manifest.load(data / "eval").baseline.context_free_accuracy
        self.records = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                record = json.loads(line)
                self.records[record["name"]] = record
        self.stopping = threading.Event()
        self.lock = threading.Lock()

    def run_all(self, batches):
        """All trainings of these batches, one batch after the other."""
        for batch in batches:
            self.tune(batch)
            self.repeat(batch)

    def tune(self, batch):
        """Successive halving, all optimizers side by side."""
        going = {
            optimizer: [
                self.training(optimizer, batch, "trial", number, settings)
                for number, settings in enumerate(self.draw(optimizer, batch))
            ]
            for optimizer in self.optimizers
        }
        for share in STAGES:
            wanted = [each for arm in going.values() for each in arm]
            self.train(dict.fromkeys(wanted, share), f"to {share:.0%}")
            for optimizer, arm in going.items():
                best_first = sorted(
                    arm, key=lambda each: rank(self.records[each.name], share * BUDGETS[batch])
                )
                going[optimizer] = best_first[: len(arm) // 2]

    def repeat(self, batch):
        """Fresh seeds of each optimizer's best trial."""
        wanted = {}
        for optimizer in self.optimizers:
            best = best_trial(self.records, optimizer, batch)
            share = LONGEST if best["reached"] else 1.0
            for number in range(SEEDS):
                training = self.training(optimizer, batch, "seed", number, best["settings"])
                wanted[training] = share
        self.train(wanted, "with a fresh seed")

    def train(self, shares, title):
        """Train each up to its share of its budget, unless that was done before."""
        todo = [each for each, share in shares.items() if not self.is_done(each, share)]
        start, done = time.monotonic(), 0
        with ThreadPoolExecutor(self.workers) as pool:
            for training, record in zip(
                todo, pool.map(lambda t: self.go(t, shares[t]), todo), strict=True
            ):
                if self.stopping.is_set():
                    continue
                done += 1
                left = (time.monotonic() - start) / done * (len(todo) - done) / 60
                print(
                    f"{training.name} {title}: {record['ended']}, best {record['best']:.4f} after "
                    f"{record['samples']:,} samples, rate "
                    f"{training.settings['optim.learning_rate']:g}; {done} of {len(todo)}, "
                    f"about {left:.0f} min left",
                    flush=True,
                )
        if self.stopping.is_set():
            sys.exit(75)

    def is_done(self, training, share):
        """True if it has ended, or has come as far as this share of its budget."""
        record = self.records.get(training.name)
        wanted = {"settings": training.settings, "target": training.target(self.guess)}
        if record is not None and {name: record[name] for name in wanted} != wanted:
            sys.exit(f"study.py: error: {training.name} is to have {wanted}; see {self.path}")
        return record is not None and (
            record["reached"] is not None or record["samples"] >= self.limit(training, share)
        )

    def limit(self, training, share):
        """Samples after which to put it aside; no trial goes on that can no longer be the best."""
        best = best_trial(self.records, training.optimizer, training.batch)
        fewest = best["reached"] if training.kind == "trial" and best else None
        return min(share * BUDGETS[training.batch], longest(training.batch), fewest or math.inf)

    def go(self, training, share):
        """One training, to its end or until it is put aside at this share of the budget."""
        if self.stopping.is_set():
            return None
        directory, start = self.work / training.name, time.monotonic()
        command = [
            *(sys.executable, "-m", "mlperf_bert", "train", "--config", HERE / "base.toml"),
            *("--data", self.data, "--run-dir", directory, "--resume", "auto"),
            *training.options(self.guess),
        ]
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{directory}.log", "a") as log:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )
        told, curve = False, ()
        while process.poll() is None:
            time.sleep(0.3)
            curve = read_curve(directory / "run_0")
            limit = self.limit(training, share)
            is_far = bool(curve) and curve[-1][0] >= limit < longest(training.batch)
            is_far |= crossing(curve, training.target(self.guess)) is not None
            if not told and (is_far or self.stopping.is_set()):
                process.send_signal(signal.SIGTERM)
                told = True
        if self.stopping.is_set():
            return None
        if process.returncode not in ENDS:
            self.stopping.set()
            sys.exit(f"study.py: error: {training.name} did not end in order, see {directory}.log")
        seconds = time.monotonic() - start
        return self.record(training, directory / "run_0", process.returncode, seconds)

    def record(self, training, run, status, seconds):
        """Append the record of a training that ended or was put aside; seconds are of one core."""
        curve = read_curve(run)
        metrics = read_metrics(run / "metrics.jsonl") if curve else ()
        target = training.target(self.guess)
        reached = crossing(curve, target)
        record = {
            "name": training.name,
            **asdict(training),
            "seed": training.seed,
            "target": target,
            "ended": ENDS[status] if reached is None else "reached",
            "seconds": round(seconds, 1),
            "samples": curve[-1][0] if curve else 0,
            "best": max((accuracy for _, accuracy in curve), default=0.0),
            "reached": reached,
            "curve": [(at, round(accuracy, 5)) for at, accuracy in curve],
            "noise": noise_of(metrics),
        }
        with self.lock:
            self.records[training.name] = record
            with open(self.path, "a") as file:
                print(json.dumps(record), file=file)
        return record


def best_trial(records, optimizer, batch):
    """The record of the trial with the fewest samples to the target; else that came closest."""
    found = [
        record
        for record in list(records.values())  # others may add theirs meanwhile
        if (record["optimizer"], record["batch"], record["kind"]) == (optimizer, batch, "trial")
    ]
    return min(found, key=rank, default=None)


def rank(record, samples=math.inf):
    """Smaller is better: samples to the target, else how close it came in so many samples."""
    if record["reached"] is not None:
        return (0, record["reached"])
    return (1, -max([accuracy for at, accuracy in record["curve"] if at <= samples], default=0.0))


def crossing(curve, target):
    """Samples at the target, on the line between the evaluations before and after; or None."""
    before = (0, 0.0)
    for at, accuracy in curve:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1])
            return round(before[0] + share * (at - before[0]))
        before = (at, accuracy)
    return None


def noise_of(metrics):
    """The last measured noise scales in sequences: plain, and preconditioned by older packages."""
    names = ("noise_scale_plain", "noise_scale")
    found = [each for each in metrics if each.get(names[0]) is not None]
    return {name: found[-1].get(name) for name in names} if found else None


def main(kind=Study, batches=tuple(BUDGETS)):
    """Read the command line and work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--batches", default=",".join(map(str, batches)))
    parser.add_argument("--optimizers", default="adamw,lamb,muon")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    study = kind(args.data, args.work.resolve(), args.workers, args.optimizers.split(","))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: study.stopping.set())
    study.run_all([int(batch) for batch in args.batches.split(",")])


if __name__ == "__main__":
    main()

"""Plausibility of a log: its numbers must agree with each other and with the other logs.

A log is text, and a forgery whose numbers all agree is not detected. docs/start/submission.md lists
what is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import AS_WRITTEN
from bert_tools.package.run_facts import Course, RunFacts
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY
from mlperf_bert.run.mlperf_log import hyperparameters

CONFIGS = "benchmarks/bert/implementations/pytorch/mlperf_bert/configs"
# Throughputs and records use different clocks. In 16 real runs of up to 500 s the two differ by
# 13 ms at most; an operating system that corrects its clock may add 0.05 percent.
CLOCK_SLACK_MS, CLOCK_SLACK_SHARE = 500.0, 0.005
STOP_SLACK_MS, STOP_SLACK_STEPS = 1000.0, 2  # the loop ends in the step that learns the accuracy
# Accuracies are fractions of the same held-out tokens, so that one may be equal by chance.
COPIED_ACCURACIES = 3


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """A config of the submission, as a log shows it."""

    name: str
    hyperparameters: Mapping[str, int | float | str]
    target_accuracy: float


def published_configs(tree: Path) -> tuple[PublishedConfig, ...]:
    """The configs of an exported tree; unreadable ones justify no run."""
    found = []
    for path in sorted((tree / CONFIGS).glob("*.toml")):
        try:
            config = load_config(path)
        except ConfigError:
            continue
        if (target := config.eval.target) is not None:
            found.append(PublishedConfig(path.name, hyperparameters(config), target))
    return tuple(found)


def check_target(run: RunFacts, configs: Sequence[PublishedConfig]) -> Iterator[DataError]:
    """Check that the target is the benchmark's or that of a published config with its settings.

    `own_checks.py` has refused a lower one than the benchmark's in the closed division.
    """
    same = [each for each in configs if each.hyperparameters.items() <= run.settings.items()]
    allowed = {CLOSED_TARGET_ACCURACY, *(each.target_accuracy for each in same)}
    is_refused = run.division == "closed" and run.quality_target < CLOSED_TARGET_ACCURACY
    if is_refused or run.quality_target in allowed:
        return
    known = ", ".join(f"{each.target_accuracy} in {each.name}" for each in same)
    problem = (
        f"quality_target is {run.quality_target}, neither the benchmark's "
        f"{CLOSED_TARGET_ACCURACY} nor that of a config with the log's hyper-parameters "
        f"({known or 'there is none'})"
    )
    yield DataError(run.name, problem, f"put the config of the runs into {CONFIGS}")


def check_course(run: RunFacts) -> Iterator[DataError]:
    """Find contradictions inside one log.

    A run that was resumed or did not succeed is not checked: it is refused for that, and its log
    may begin or end anywhere.
    """
    if run.status == "success" and not run.resumed:
        yield from _check_samples(run)
        yield from _check_clock(run.name, run.course)
        yield from _check_stop(run)


def _check_samples(run: RunFacts) -> Iterator[DataError]:
    """Check that samples come in whole global batches, with an evaluation at each full interval."""
    course, batch = run.course, run.global_batch_size
    forwards = run.ranks * run.grad_accum_steps
    if batch < 1 or forwards < 1 or batch % forwards:
        problem = (
            f"global_batch_size is {batch}, which {run.ranks} ranks with "
            f"{run.grad_accum_steps} forwards each cannot share evenly"
        )
        yield DataError(run.name, problem, AS_WRITTEN)
        return
    samples_and_lines = [(each.samples, each.line) for each in course.evaluations]
    samples_and_lines += [(each.samples, each.line) for each in course.throughputs]
    for samples, line in samples_and_lines:
        if samples % batch:
            problem = f"{samples} samples are no multiple of global_batch_size {batch}"
            yield DataError(f"{run.name}, line {line}", problem, AS_WRITTEN)
            return
    last = course.evaluations[-1]
    if course.train_samples != last.samples:
        problem = f"train_samples is {course.train_samples}, the last evaluation's {last.samples}"
        yield DataError(run.name, problem, AS_WRITTEN)
    yield from _check_intervals(run.name, course, batch)


def _check_intervals(name: str, course: Course, batch: int) -> Iterator[DataError]:
    """Check that evaluation n follows the batch that completes n intervals; the last may be early.

    So n intervals are more than its samples less a batch, and at most its samples.
    """
    least, most = 1, course.evaluations[0].samples
    for number, each in enumerate(course.evaluations, 1):
        least = max(least, (each.samples - batch) // number + 1)
        if each is not course.evaluations[-1]:  # a run that is at its last step evaluates once more
            most = min(most, each.samples // number)
        if least > most:
            problem = f"evaluation {number} comes after {each.samples} samples, unevenly"
            yield DataError(f"{name}, line {each.line}", problem, AS_WRITTEN)
            return


def _check_clock(name: str, course: Course) -> Iterator[DataError]:
    """Check at each throughput that the clock shows the time of samples and evaluations so far.

    Evaluations beside training may take none of it.
    """
    trained_ms, samples, evaluated_ms, number = 0.0, 0, 0, 0
    for rate in course.throughputs:
        trained_ms += 1000 * (rate.samples - samples) / rate.per_s
        samples = rate.samples
        while number < len(course.evaluations) and course.evaluations[number].line < rate.line:
            done = course.evaluations[number]
            evaluated_ms += done.stop_ms - done.start_ms
            number += 1
        most = trained_ms + evaluated_ms
        least = most if course.evaluates_in_turn else trained_ms
        if number < len(course.evaluations):  # began beside training
            most += max(0, rate.time_ms - course.evaluations[number].start_ms)
        clock_ms = rate.time_ms - course.start_ms
        slack_ms = CLOCK_SLACK_MS + CLOCK_SLACK_SHARE * clock_ms
        if not least - slack_ms <= clock_ms <= most + slack_ms:
            problem = (
                f"{clock_ms / 1000:.1f} s since run_start contradict the log's throughputs, by "
                f"which {samples} samples took {trained_ms / 1000:.1f} s, and its evaluations, "
                f"which took {evaluated_ms / 1000:.1f} s"
            )
            remedy = f"{AS_WRITTEN}; if the machine's clock was set meanwhile, run again"
            yield DataError(f"{name}, line {rate.line}", problem, remedy)
            return


def _check_stop(run: RunFacts) -> Iterator[DataError]:
    """Check that the first evaluation at the target is the last, and stops the clock."""
    course = run.course
    last = course.evaluations[-1]
    first = next((e for e in course.evaluations if e.accuracy >= run.quality_target), last)
    if first is not last:
        problem = f"the target {run.quality_target} is reached here, but the run goes on"
        yield DataError(f"{run.name}, line {first.line}", problem, AS_WRITTEN)
        return
    step_ms = 1000 * run.global_batch_size / min(each.per_s for each in course.throughputs)
    limit_ms = STOP_SLACK_MS + STOP_SLACK_STEPS * step_ms
    late_ms = course.stop_ms - last.result_ms
    if late_ms > limit_ms:
        problem = (
            f"run_stop comes {late_ms / 1000:.1f} s after the last evaluation's accuracy; "
            f"{STOP_SLACK_STEPS} steps and a second are {limit_ms / 1000:.1f} s"
        )
        yield DataError(run.name, problem, AS_WRITTEN)


def check_overlap(runs: Sequence[RunFacts], where: str) -> Iterator[DataError]:
    """Check that the runs of one system, one machine or cluster, do not overlap."""
    in_order = sorted(runs, key=lambda run: (run.course.begin_ms, run.course.stop_ms))
    for before, after in pairwise(in_order):
        if after.course.begin_ms < before.course.stop_ms:
            names = " and ".join(sorted(Path(run.name).name for run in (before, after)))
            remedy = "run one after the other; what ran on another machine is another system's"
            yield DataError(where, f"{names} ran at the same time", remedy)


def check_copies(runs: Sequence[RunFacts]) -> Iterator[DataError]:
    """Check that no two runs of any systems have the same results after the same samples."""
    for one, other in combinations(runs, 2):
        accuracies = _shared(_accuracies(one), _accuracies(other))
        rates = _shared(_rates(one), _rates(other))
        if len(set(accuracies)) >= COPIED_ACCURACIES or rates:
            equal = f"{len(accuracies)} accuracies and {len(rates)} throughputs"
            problem = f"{equal} are those of {one.name}: one of the two is a copy"
            yield DataError(other.name, problem, "put the log of a run of its own there")


def _accuracies(run: RunFacts) -> set[tuple[int, float]]:
    return {(each.samples, each.accuracy) for each in run.course.evaluations}


def _rates(run: RunFacts) -> set[tuple[int, float]]:
    return {(each.samples, each.per_s) for each in run.course.throughputs}


def _shared(one: set[tuple[int, Any]], other: set[tuple[int, Any]]) -> list[Any]:
    return [value for _, value in one & other]

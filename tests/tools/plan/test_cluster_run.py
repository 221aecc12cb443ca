"""A simulated run: its arithmetic by hand, and Samsung's published one with its inputs."""

from dataclasses import replace

import pytest

from bert_tools.plan.cluster.machine import default_constants
from bert_tools.plan.cluster.simulation import (
    evaluation_interval,
    evaluation_ms,
    run_time,
)
from cluster_cases import EAGER, FREE, OURS, even, job, simulate
from support import load_study

calibrate = load_study("2026-11-22-cluster-model", "calibrate")


def test_a_run_is_its_steps_evaluations_and_start() -> None:
    of, timing = job(1, 1), simulate(job(1, 1), even(1))
    inputs = {"samples": 2_932_736, "start_up_s": 2.0, "skipped_steps": 7}
    run = run_time(of, [timing], global_batch_size=16_384, **inputs)
    assert (run.step_ms, run.steps) == (timing.step_ms, 179)
    assert run.evaluations == 9  # every 325,000 samples: the rules' example for this batch
    training_s = 186 * run.step_ms / 1e3
    assert run.seconds == pytest.approx(2.0 + training_s + 9 * run.evaluation_ms / 1e3)
    assert run.steady_step_ms == pytest.approx(run.step_ms + 9 * run.evaluation_ms / 179)


@pytest.mark.parametrize(
    ("batch", "interval"), [(448, 150_000), (16_384, 325_000), (3072, 175_000), (4608, 200_000)]
)
def test_evaluations_come_as_often_as_the_rules_say(batch: int, interval: int) -> None:
    assert evaluation_interval(batch) == interval


def test_an_evaluation_is_shared_by_the_ranks() -> None:
    one, eight = (evaluation_ms(job(1, ranks)) for ranks in (1, 8))
    assert 7 < one / eight < 9


def test_small_evaluations_are_quicker_captured() -> None:
    constants = replace(FREE, host_launch_us=50.0)
    eager, captured = (
        evaluation_ms(job(128, 8, constants=constants, program=program))
        for program in (EAGER, OURS)
    )
    assert captured < eager


def test_samsungs_run_with_its_samples_skipped_steps_and_start() -> None:
    (step,) = [each for each in calibrate.published_steps() if each.id == "Samsung x1024 v2.0"]
    assert (step.samples, step.skipped_steps, step.start_up_s) == (2_932_736, 7, 2.15)
    constants = default_constants()
    assert step.run_time(constants).seconds == pytest.approx(22.3, rel=0.03)
    assert calibrate.compare(step, constants).predicted_ms == pytest.approx(108.3, rel=0.03)

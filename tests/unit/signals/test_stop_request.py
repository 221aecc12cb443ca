"""A signal becomes one decision of all ranks, at one step."""

import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from mlperf_bert.signals import stop_request
from mlperf_bert.signals.signal_watch import SIGNALS
from mlperf_bert.signals.stop_request import StopRequest

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", SIGNALS)
def test_one_rank_stops_after_the_step_of_the_signal(number: signal.Signals) -> None:
    with StopRequest(1, CPU) as stop:
        assert stop.agreed(1) is None
        os.kill(os.getpid(), number)
        assert stop.agreed(2) == number.name


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_signal_does_not_end_a_rank_that_saves() -> None:
    with StopRequest(1, CPU) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agreed(1) == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(2) == "SIGTERM"  # named, because scancel may bring both
    os.kill(os.getpid(), signal.SIGTERM)  # nor one that leaves after that


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest(1, CPU):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


class Clock:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("step_s", "most"), [(0.01, 102), (4.0, 1), (1e-6, 1000)])
def test_ranks_ask_each_other_about_once_a_second(
    step_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has the signal from the start; until the next question nobody knows."""
    asked: list[int] = []
    other_has_signal = False
    clock = Clock()
    step = 0

    def all_reduce(numbers: torch.Tensor, operation: object) -> None:
        asked.append(step)
        if other_has_signal:
            numbers[0] = float(signal.SIGTERM)

    monkeypatch.setattr(stop_request.dist, "all_reduce", all_reduce)
    with StopRequest(2, CPU, clock=clock) as stop:
        for step in range(1, 2001):
            clock.now += step_s
            assert stop.agreed(step) is None
        gaps = {after - before for before, after in itertools.pairwise(asked)}
        assert max(gaps) <= most
        assert max(gaps) * step_s <= max(1.01, step_s)
        other_has_signal = True
        answers = []
        for step in range(2001, 2001 + max(gaps)):
            clock.now += step_s
            answers.append(stop.agreed(step))
        assert [answer for answer in answers if answer] == ["SIGTERM"]
        assert stop.step_s == pytest.approx(step_s)


def test_seconds_a_step_are_those_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(numbers: torch.Tensor, operation: object) -> None:
        numbers[1] = max(float(numbers[1]), 0.5)

    monkeypatch.setattr(stop_request.dist, "all_reduce", all_reduce)
    clock = Clock()
    with StopRequest(2, CPU, clock=clock) as stop:
        assert stop.step_s is None
        for step, seconds, slowest in ((121, 0.2, 0.5), (123, 0.8, 0.8)):  # as of a resumed run
            clock.now += seconds * (2 if step > 121 else 1)
            stop.agreed(step)
            assert stop.step_s == pytest.approx(slowest)


def test_one_rank_measures_for_about_a_second() -> None:
    clock = Clock()
    with StopRequest(1, CPU, clock=clock) as stop:
        for step in range(1, 10):
            clock.now += 0.125
            stop.agreed(step)
            assert stop.step_s == (None if step < 8 else 0.125)

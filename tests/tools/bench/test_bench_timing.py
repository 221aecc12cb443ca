"""Interleaved times: who runs when, and what is made of the seconds."""

import weakref
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert_tools.bench import timing
from bert_tools.bench.timing import InterleavedTimes
from mlperf_bert.run.console import ProgressLines

LOSS = torch.zeros(())


class Clock:
    """A clock that contenders move."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def contender(self, name, seconds):
        left = iter(seconds)

        def run(batch):
            self.calls.append((name, batch))
            self.now += next(left)
            return LOSS

        return run

    def measured(self, num_batches, num_steps, limit=100, **seconds):
        """Times of contenders that take these seconds, one step after another."""
        contenders = {name: self.contender(name, each) for name, each in seconds.items()}
        times = InterleavedTimes(contenders, num_batches)
        with redirect_stderr(StringIO()) as out:
            times.measure(num_steps=num_steps, seconds=limit, progress=ProgressLines())
        self.lines = out.getvalue().splitlines()
        return times


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: found.now)
    return found


def test_contenders_take_turns_on_the_same_batches(clock):
    times = clock.measured(2, 5, a=[1.0] * 5, b=[2.0] * 5)
    assert clock.calls == [(name, step % 2) for step in range(5) for name in ("a", "b")]
    assert times.num_steps == 5
    assert clock.lines == [
        "measuring up to 5 steps of each of a, b",
        *(
            f"step {step}/5: a 1.000 s, b 2.000 s; at most about {15 - 3 * step} s left"
            for step in range(1, 6)
        ),
    ]


def test_the_time_left_is_that_to_the_limit_or_to_the_last_new_batch(clock):
    clock.measured(3, 9, 7.0, a=[5.0] * 9)
    left = [int(line.split()[-3]) for line in clock.lines[1:]]
    assert left == [10, 5, 0]
    clock.measured(2, 9, 3.5, a=[1.0] * 9)
    assert clock.lines[2].endswith("; at most about 2 s left")


@pytest.mark.parametrize(("call", "kind"), [(1, torch.OutOfMemoryError), (3, RuntimeError)])
def test_what_fails_is_freed_and_others_go_on(clock, call, kind):
    model = torch.nn.Linear(2, 2)
    is_there = weakref.ref(model)

    def full(batch, model=model, calls=[]):  # noqa: B006
        calls.append(batch)
        if len(calls) == call:
            raise kind("tried to allocate 9 GiB\nmore")
        return LOSS

    contenders = {"full": full, "a": clock.contender("a", [1.0] * 5)}
    times = InterleavedTimes(contenders, 2, may_fail=("full",))
    del model, full, contenders
    progress = ProgressLines()
    times.run_once(progress)
    assert (is_there() is None) == (call == 1)
    times.measure(num_steps=4, seconds=100, progress=progress)
    assert is_there() is None
    assert times.names == ["a"] and times.num_steps == 4
    is_memory = kind is torch.OutOfMemoryError
    words = "out of memory (tried to allocate 9 GiB)" if is_memory else "RuntimeError: tried to"
    assert times.reasons["full"].startswith(words) and "\n" not in times.reasons["full"]


def test_what_may_not_fail_ends_the_measurement():
    def full(_):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        InterleavedTimes({"a": full, "b": full}, 1, may_fail=("b",)).run_once(ProgressLines())


def test_the_median_pass_counts_and_all_batches_equally(clock):
    seconds = [1.0, 10.0, 3.0, 30.0, 2.0, 20.0]  # batches 0, 1, 0, 1, 0, 1
    assert clock.measured(2, 6, a=seconds).seconds_per_batch("a") == (2.0 + 20.0) / 2
    assert clock.measured(2, 5, a=[1.0, 10.0, 3.0, 30.0, 9.0]).seconds_per_batch("a") == 11.0


def test_ratios_are_those_of_all_batches_once(clock):
    """The other side may deal the same samples to its batches in another way."""
    times = clock.measured(2, 5, a=[2.0, 9.0, 4.0, 4.0, 7.0], b=[1.0, 3.0, 4.0, 4.0, 1.0])
    assert times.range_of_ratios("a", "b") == [1.0, (11 / 4 + 1) / 2, 11 / 4]


SECONDS = st.lists(st.integers(1, 9).map(float), min_size=9, max_size=9)


@given(SECONDS, SECONDS, st.integers(1, 3), st.integers(3, 9))
def test_a_ratio_lies_in_its_range(a, b, num_batches, num_steps):
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(timing.time, "perf_counter", lambda: clock.now)
        times = clock.measured(num_batches, num_steps, a=a, b=b)
    low, middle, high = times.range_of_ratios("a", "b")
    ratio = times.seconds_per_batch("a") / times.seconds_per_batch("b")
    assert low - 1e-9 <= ratio <= high + 1e-9 and low <= middle <= high


def test_time_limit_waits_for_every_batch(clock):
    # 7 s passed in the second step, the third batch was still new.
    assert clock.measured(3, 9, 7.0, a=[5.0] * 9).num_steps == 3
    assert clock.measured(2, 9, 3.5, a=[1.0] * 9).num_steps == 4  # before the last step

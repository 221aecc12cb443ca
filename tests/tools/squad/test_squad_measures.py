"""Bubbles by hand; noise scale and efficiency, by hand or of known noise."""

from time import perf_counter

import pytest

from bert_tools.squad.loop import clocked_updates
from bert_tools.squad.measures import (
    Span,
    StageClock,
    covariance_trace,
    efficiency,
    gradient_square,
    measured_bubble,
    noise_scale,
)


def event(rank, begin, end, kind="F"):
    return Span(rank=rank, stage=rank, kind=kind, microbatch=0, begin_s=begin, end_s=end)


def test_a_plain_update_remains_for_the_rate():
    assert list(clocked_updates(range(2, 41), 40)) == [38, 39, 40]
    assert list(clocked_updates(range(2, 21), 20)) == [19, 20]
    assert list(clocked_updates([2, 3], 3)) == [3]
    assert list(clocked_updates([2], 20)) == list(clocked_updates([], 1)) == []


def test_measured_by_hand():
    # GPipe with two stages and one microbatch, forward 1 s and backward 2 s: from 5 s to 11 s
    # two ranks have 12 s, of which they compute 6.
    events = [event(0, 5, 6), event(1, 6, 7), event(1, 7, 9, "B"), event(0, 9, 11, "B")]
    assert measured_bubble(events) == pytest.approx(0.5)
    # One busy rank.
    assert measured_bubble([event(0, 0, 1), event(0, 1, 4, "B")]) == 0


def test_a_clock_notes_only_while_it_runs():
    waits = []
    clock = StageClock(3, lambda: waits.append(1))
    with clock.span(0, "F", 0):
        pass
    assert not waits
    clock.start()
    with clock.span(1, "B", 2):
        pass
    (found,) = clock.stop()
    assert (found.rank, found.stage, found.kind, found.microbatch) == (3, 1, "B", 2)
    assert 0 <= found.begin_s <= found.end_s and len(waits) == 2


@pytest.mark.parametrize(("ahead", "is_shared"), [(0.25, True), (1e6, False), (-1e6, False)])
def test_ranks_of_one_machine_count_from_the_same_moment(ahead, is_shared):
    clock = StageClock(1)
    clock.start(perf_counter() - ahead)
    with clock.span(0, "F", 0):
        pass
    (found,) = clock.stop()
    assert (found.begin_s >= 0.25) is is_shared  # else it would be 0 on each, whenever it came


def estimate(*batches):
    """Both estimates of one update."""
    return {"gradient_square": gradient_square(*batches), "trace": covariance_trace(*batches)}


def test_estimates_invert_the_expected_squares():
    # |G|^2 = 3 and tr(Sigma) = 40: a batch of 4 has 3 + 40 / 4 = 13, one of 20 has 3 + 40 / 20 = 5.
    known = estimate(13.0, 4, 5.0, 20)
    assert known == {"gradient_square": pytest.approx(3.0), "trace": pytest.approx(40.0)}
    assert noise_scale([known]) == pytest.approx(40 / 3)
    # |G|^2 of 2 and 6, tr(Sigma) of 8 and 4; weights 1 and 2 of 3.
    noise = [estimate(10.0, 1, 6.0, 2), estimate(10.0, 1, 8.0, 2)]
    assert noise_scale(noise, decay=0.5) == pytest.approx((8 + 2 * 4) / (2 + 2 * 6))
    assert noise_scale([]) is None
    assert noise_scale([estimate(10.0, 1, 4.0, 2)]) is None  # |G|^2 = 8 - 10 < 0
    assert noise_scale([estimate(4.0, 1, 4.0 + 1e-12, 8)]) == 0.0  # rounding: a trace below zero


def test_efficiency():
    assert efficiency(448.0, 16, 16) == 1  # of the initial batch
    # phi = 100, M0 = 50: (100 + 50) / (100 + 200) = 1/2; a batch without noise is worth M0 / M.
    assert efficiency(100, 50, 200) == pytest.approx(0.5)
    assert efficiency(0, 50, 200) == pytest.approx(0.25)
    # McCandlish et al., equation 2.7: samples E / E_min = 1 + B / phi at batch B, so of two
    # batches the ratio of samples is the inverse of the ratio of efficiencies.
    samples_more = (1 + 1000 / 300) / (1 + 64 / 300)
    assert efficiency(300, 64, 1000) == pytest.approx(1 / samples_more)

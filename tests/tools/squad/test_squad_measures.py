"""Bubbles by hand."""

from time import perf_counter

import pytest

from bert_tools.squad.bubble import Kind, Span, StageClock, measured_bubble


def event(rank: int, begin: float, end: float, kind: Kind = "F") -> Span:
    return Span(rank=rank, stage=rank, kind=kind, microbatch=0, begin_s=begin, end_s=end)


def test_measured_by_hand() -> None:
    # GPipe with two stages and one microbatch, forward 1 s and backward 2 s: from 5 s to 11 s
    # two ranks have 12 s, of which they compute 6.
    events = [event(0, 5, 6), event(1, 6, 7), event(1, 7, 9, "B"), event(0, 9, 11, "B")]
    assert measured_bubble(events) == pytest.approx(0.5)
    # One busy rank.
    assert measured_bubble([event(0, 0, 1), event(0, 1, 4, "B")]) == 0


def test_a_clock_notes_only_while_it_runs() -> None:
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
def test_ranks_of_one_machine_count_from_the_same_moment(ahead: float, is_shared: bool) -> None:
    clock = StageClock(1)
    clock.start(perf_counter() - ahead)
    with clock.span(0, "F", 0):
        pass
    (found,) = clock.stop()
    assert (found.begin_s >= 0.25) is is_shared  # else it would be 0 on each, whenever it came

"""Which trainings are hopeless, and what a training counts: by hand."""

import pytest

from bert_tools.tune.objective import judged
from bert_tools.tune.settings import Pruner

FOUR = ((0.1, 0.2, 0.3), (0.1, 0.3, 0.5), (0.1, 0.4, 0.6), (0.2, 0.5, 0.7))  # median 0.35 at two


def pruner(rule: str, first: int = 2) -> Pruner:
    return Pruner(rule=rule, first=first, target=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "stops"),
    [((0.0,), False), ((0.1, 0.34), True), ((0.1, 0.36), False), ((0.36, 0.1), False)],
)
def test_below_the_median_ends(own: tuple[float, ...], stops: bool) -> None:
    assert pruner("median").is_hopeless(own, FOUR) is stops
    assert not pruner("none").is_hopeless(own, FOUR)


def test_few_others_say_nothing() -> None:
    assert not pruner("median").is_hopeless((0.0, 0.0), FOUR[:3])
    assert not pruner("median").is_hopeless((0.0, 0.0, 0.0, 0.0), FOUR)  # nobody came so far


def test_who_reached_the_target_counts_as_there_later_on() -> None:
    others = [(0.7,), (0.7,), (0.7,), (0.1, 0.1, 0.1)]
    assert pruner("median").is_hopeless((0.2, 0.3, 0.6), others)
    assert not pruner("median").is_hopeless((0.2, 0.3, 0.7), others)


def test_halving_keeps_a_third_at_its_rungs() -> None:
    others = [(level,) * 12 for level in (0.1, 0.2, 0.3, 0.4, 0.5)]  # of six, two go on
    halving = pruner("halving", first=2)
    for number, is_rung in ((1, False), (2, True), (3, False), (6, True), (12, False)):
        assert halving.is_hopeless((0.35,) * number, others) is is_rung
        assert not halving.is_hopeless((0.45,) * number, others)


CURVE = ((100, 0.2), (200, 0.35), (300, 0.3))


def test_what_reached_the_target_counts_what_it_needed() -> None:
    assert judged(CURVE, 300, 6.0, "samples", 0.35, 1000).samples == 200
    assert judged(CURVE, 300, 6.0, "samples", 0.36, 1000).ended == "missed"
    assert judged(CURVE, 300, 6.0, "samples", 0.2, 1000).value == 100
    assert judged(CURVE, 300, 6.0, "time", 0.3, 1000).value == 6.0


def test_a_miss_is_worse_than_the_whole_budget_and_better_the_nearer_it_came() -> None:
    value = judged(CURVE, 300, 6.0, "samples", 0.7, 1000).value
    assert value == pytest.approx(1500)  # half of the target missed
    near = judged(((300, 0.6),), 300, 6.0, "samples", 0.7, 1000).value
    assert near is not None and 1000 < near < 1500
    assert judged((), 40, 1.0, "samples", 0.7, 1000).value == 2000  # diverged
    # Six seconds for 300 samples are twenty for a budget of 1,000.
    assert judged(CURVE, 300, 6.0, "time", 0.7, 1000).value == pytest.approx(30)

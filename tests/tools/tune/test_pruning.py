"""Which trainings are hopeless, and what a training counts: by hand."""

import pytest

from bert_tools.tune.objective import Evaluation, Measured, samples_to, value_of
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
    others = [
        (level,) * 12 for level in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]  # with the own one six: two go on
    halving = pruner("halving", first=2)
    for number, is_rung in ((1, False), (2, True), (3, False), (6, True), (12, False)):
        assert halving.is_hopeless((0.35,) * number, others) is is_rung
        assert not halving.is_hopeless((0.45,) * number, others)


CURVE = (Evaluation(100, 0.2), Evaluation(200, 0.35), Evaluation(300, 0.3))
RUN = Measured(curve=CURVE, samples=300, seconds=6.0)


def test_what_reached_the_target_counts_what_it_needed() -> None:
    assert samples_to(0.35, CURVE) == 200 and samples_to(0.36, CURVE) is None
    assert value_of(RUN, "samples", 0.2, 1000) == 100
    assert value_of(RUN, "time", 0.3, 1000) == 6.0


def test_a_miss_is_worse_than_the_whole_budget_and_better_the_nearer_it_came() -> None:
    assert value_of(RUN, "samples", 0.7, 1000) == pytest.approx(1500)  # half of the target missed
    near = Measured(curve=(Evaluation(300, 0.6),), samples=300, seconds=6.0)
    assert 1000 < value_of(near, "samples", 0.7, 1000) < 1500
    diverged = Measured(curve=(), samples=40, seconds=1.0)
    assert value_of(diverged, "samples", 0.7, 1000) == 2000
    # Six seconds for 300 samples are twenty for a budget of 1,000.
    assert value_of(RUN, "time", 0.7, 1000) == pytest.approx(30)

"""Numbers, axes and curves, against values worked out by hand."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.report.chart import (
    Chart,
    Series,
    seconds,
    significant,
    thinned,
    tick_labels,
    ticks,
)

MINUS = "\N{MINUS SIGN}"


def test_numbers_and_times_are_written_with_few_digits():
    words = {0: "0", 0.27191318: "0.2719", 36272.4: "36,272", 1.0345: "1.034"}
    words |= {-2.5: f"{MINUS}2.500", 0.0000123: f"1.23e{MINUS}05"}
    assert {value: significant(value) for value in words} == words
    words = {0.0306: "0.031 s", 95.24: "95.2 s", 242.4: "4 min 02 s"}
    words |= {3 * 3600 + 425: "3 h 07 min", 7199.9: "120 min 00 s"}
    assert {value: seconds(value) for value in words} == words


NUMBERS = st.floats(min_value=-1e300, max_value=1e300)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_any_range_has_a_few_ticks_with_labels_of_their_own(one, other):
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert 1 <= len(found) <= 13 and found == sorted(found)
    assert all(math.isfinite(each) for each in found) and len(tick_labels(found)) == len(found)
    if high > low:
        assert all(low - (high - low) / 100 <= each <= high + (high - low) / 100 for each in found)


VALUES = st.one_of(st.none(), st.integers(-50, 50).map(float))


@settings(deadline=None, max_examples=30)
@given(st.lists(VALUES, min_size=30, max_size=300), st.integers(8, 40))
def test_a_thinned_curve_keeps_its_ends_extremes_and_gaps(values, most):
    points = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= most + most // 2  # a gap may come to the lowest and the highest of a part
    assert list(kept) == sorted(set(kept), key=lambda point: point[0])
    assert set(kept) <= set(points) and kept[0] == points[0] and kept[-1] == points[-1]
    numbers, left = ([v for _, v in each if v is not None] for each in (points, kept))
    if numbers:
        assert (min(left), max(left)) == (min(numbers), max(numbers))
    assert (None in values) == any(value is None for _, value in kept)


def test_a_level_curve_lies_in_the_middle_of_a_narrow_scale():
    for level in (100.0, -3.0, 0.0):
        curve = Series(run=0, label="run", points=((0.0, level), (8.0, level)))
        scale = Chart(
            key="loss", title="Loss", unit="", about="", series=(curve,), floor=None
        ).value_scale()
        assert scale.low < level < scale.high and 0.45 < scale.share(level) < 0.55
        assert scale.high - scale.low <= max(abs(level), 2)

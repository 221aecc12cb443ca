"""The learning-rate schedule: published values, no jump where there is none, the wsd."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.config.sections import ScheduleSection
from mlperf_bert.optim.schedule import learning_rate, learning_rates

BASE = 3.9299421615882676e-4
END = 4.94549100544884e-5

# Values of the published schedule (reference/presort_and_clipping.md, 3.2), as printed there.
PRINTED = {
    2: "8.63e-05",
    20: "1.725e-04",
    40: "2.684e-04",
    65: "3.882e-04",
    66: "4.497e-04",
    82: "3.930e-04",
    100: "3.292e-04",
    120: "2.584e-04",
    139: "1.911e-04",
    159: "1.203e-04",
    179: "4.945e-05",
    180: "4.945e-05",
    299: "4.945e-05",
}


def _schedule(**changes):
    values = {
        "form": "published",
        "decay_steps": 179,
        "warmup_steps": 82,
        "start_warmup_step": -16,
        "end_learning_rate": END,
        **changes,
    }
    return ScheduleSection(**values)


def test_published_form_gives_the_printed_values():
    for step, printed in PRINTED.items():
        digits = len(printed.split("e")[0].replace(".", "")) - 1
        assert f"{learning_rate(step, _schedule(), BASE):.{digits}e}" == printed
    # It jumps by a seventh where the warm-up ends.
    assert learning_rate(66, _schedule(), BASE) / BASE == pytest.approx(1.144, abs=1e-3)


def _scalar(step, schedule):
    """The formulas in Python's own floats."""
    if step > schedule.decay_steps:
        return schedule.end_learning_rate
    end, position = schedule.end_learning_rate, step - schedule.start_warmup_step
    if position < schedule.warmup_steps or position < 0:
        return BASE * max(position, 0) / max(schedule.warmup_steps, 1)
    if schedule.form == "wsd":
        passed = max(step - (schedule.decay_steps - schedule.cooldown_steps), 0)
        return end + (BASE - end) * (1 - math.sqrt(passed / max(schedule.cooldown_steps, 1)))
    first = schedule.warmup_steps
    if schedule.form == "continuous":
        first += schedule.start_warmup_step
    remaining = (schedule.decay_steps - step) / (schedule.decay_steps - first)
    return end + (BASE - end) * remaining


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(["published", "continuous", "wsd"]),
    warmup_steps=st.integers(0, 82),
    start_warmup_step=st.just(0) | st.integers(-300, 40),
    cooldown_steps=st.integers(0, 50),
)
def test_a_table_is_the_formula(form, cooldown_steps, **changes):
    if form == "wsd":
        changes["cooldown_steps"] = cooldown_steps
    schedule = _schedule(form=form, **changes)
    expected = [_scalar(step, schedule) for step in range(400)]
    table = learning_rates(np.arange(400), schedule, BASE).tolist()
    if form == "wsd":
        assert table == pytest.approx(expected, rel=1e-12)
    else:  # as it was written before the table was
        assert table == expected
    assert [learning_rate(step, schedule, BASE) for step in (1, 100, 179)] == [
        table[step] for step in (1, 100, 179)
    ]


@pytest.mark.parametrize("start", [-16, 0])
def test_continuous_form_has_no_jump(start):
    schedule = _schedule(form="continuous", start_warmup_step=start)
    rates = [learning_rate(step, schedule, BASE) for step in range(1, 300)]
    steepest = max(BASE / 82, (BASE - END) / (179 - 82 - start))
    assert max(abs(b - a) for a, b in pairwise(rates)) <= steepest * (1 + 1e-9)
    assert rates[82 + start - 1] == max(rates) == pytest.approx(BASE, rel=1e-12)
    assert rates[179 - 1] == pytest.approx(END, rel=1e-12)

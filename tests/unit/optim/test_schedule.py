"""The learning-rate schedule: published values, no jump where there is none, the trapezoid."""

import math
from itertools import pairwise

import numpy as np
import pytest

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


def _scalar(step, schedule, base):
    """The formula in Python's own floats, as it was written before the table was."""
    if step > schedule.decay_steps:
        return schedule.end_learning_rate
    position = step - schedule.start_warmup_step
    if position < schedule.warmup_steps or position < 0:
        return base * max(position, 0) / max(schedule.warmup_steps, 1)
    first = schedule.warmup_steps
    if schedule.form == "continuous":
        first += schedule.start_warmup_step
    remaining = (schedule.decay_steps - step) / (schedule.decay_steps - first)
    end = schedule.end_learning_rate
    return end + (base - end) * remaining


@pytest.mark.parametrize("form", ["published", "continuous"])
@pytest.mark.parametrize(("warm_up", "start"), [(82, -16), (0, 0), (0, 30), (50, 40), (1, -300)])
def test_the_table_is_the_scalar_formula_bit_for_bit(form, warm_up, start):
    schedule = _schedule(form=form, warmup_steps=warm_up, start_warmup_step=start)
    table = learning_rates(np.arange(400), schedule, BASE)
    assert table.tolist() == [_scalar(step, schedule, BASE) for step in range(400)]


@pytest.mark.parametrize("start", [-16, 0])
def test_continuous_form_has_no_jump(start):
    schedule = _schedule(form="continuous", start_warmup_step=start)
    rates = [learning_rate(step, schedule, BASE) for step in range(1, 300)]
    steepest = max(BASE / 82, (BASE - END) / (179 - 82 - start))
    changes = [abs(b - a) for a, b in pairwise(rates)]
    assert max(changes) <= steepest * (1 + 1e-9)
    assert rates[82 + start - 1] == pytest.approx(BASE, rel=1e-12)
    assert max(rates) == pytest.approx(BASE, rel=1e-12)
    assert rates[179 - 1] == pytest.approx(END, rel=1e-12)


@pytest.mark.parametrize("form", ["published", "continuous"])
def test_without_warm_up_it_decays_from_base(form):
    schedule = _schedule(form=form, warmup_steps=0, start_warmup_step=0, decay_steps=10)
    rates = [learning_rate(step, schedule, 1.0) for step in (0, 5, 10)]
    assert rates == pytest.approx([1.0, (1 + END) / 2, END])


@pytest.mark.parametrize(
    ("warm_up", "expected"), [(4, [0.0, 0.0, 0.5]), (0, [0.0, 1.0, (1 - 2 / 176) + END * 2 / 176])]
)
def test_a_late_start_waits_at_zero(warm_up, expected):
    schedule = _schedule(warmup_steps=warm_up, start_warmup_step=3, form="continuous")
    rates = [learning_rate(step, schedule, 1.0) for step in (1, 3, 5)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("warm_up", "start", "cooldown"),
    [(20, 0, 40), (20, -5, 1), (0, 0, 100), (20, 3, 77), (20, 0, 0)],
)
def test_the_trapezoid_rises_stays_and_falls_by_one_less_the_root(warm_up, start, cooldown):
    schedule = ScheduleSection(
        form="trapezoid",
        decay_steps=100,
        warmup_steps=warm_up,
        start_warmup_step=start,
        cooldown_steps=cooldown,
        end_learning_rate=END,
    )
    rates = {step: learning_rate(step, schedule, BASE) for step in range(1, 131)}
    for step, rate in rates.items():
        if step < warm_up + start:
            assert rate == BASE * max(step - start, 0) / warm_up
        elif step <= 100 - cooldown:
            assert rate == BASE
        elif step < 100:
            passed = (step - (100 - cooldown)) / cooldown
            assert rate == pytest.approx(END + (BASE - END) * (1 - math.sqrt(passed)), rel=1e-12)
        else:
            assert rate == END
    rising = [rates[step] for step in range(1, warm_up + start + 1)]
    falling = [rates[step] for step in range(max(100 - cooldown, 1), 131)]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert [rates[step] for step in (99, 100)] == learning_rates(
        np.array([99, 100]), schedule, BASE
    ).tolist()

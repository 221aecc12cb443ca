"""The learning rate of a step: linear warm-up, then polynomial decay. Pure functions of the step.

A step is counted from 1 and is the one about to be taken. A negative `start_warmup_step` makes the
warm-up start part-way up; it counts m = step - start_warmup_step.
"""

from mlperf_bert.config_sections import ScheduleSection


def learning_rate(step: int, schedule: ScheduleSection, base: float) -> float:
    """The learning rate to use for `step` (MLPerf Training, BERT: LAMB schedule).

    Both forms rise linearly to `base` while m < warmup_steps, and hold `end_learning_rate` after
    `decay_steps`; they differ in where the decay is taken to begin:

    - `continuous`: where the warm-up really ends, at warmup_steps + start_warmup_step. No jump.
    - `published`: at warmup_steps, although the shifted warm-up ends elsewhere. With a negative
      start the rate therefore jumps above `base` when the warm-up ends. The constants of the
      published 1,024-GPU runs were tuned with this jump, so a faithful preset must keep it.

    Args:
        step: optimizer step about to be taken, from 1.
        schedule: the constants; `decay_steps` lies after the end of the warm-up (config checks it).
        base: rate at the end of the warm-up.
    """
    if step > schedule.decay_steps:
        return schedule.end_learning_rate
    warm_up_position = step - schedule.start_warmup_step
    if warm_up_position < schedule.warmup_steps or warm_up_position < 0:
        # A positive start_warmup_step delays the warm-up: the rate is zero before it, not negative.
        return base * max(warm_up_position, 0) / max(schedule.warmup_steps, 1)
    return _decayed(step, schedule, base)


def _decayed(step: int, schedule: ScheduleSection, base: float) -> float:
    first = schedule.warmup_steps
    if schedule.form == "continuous":
        first += schedule.start_warmup_step
    remaining = (schedule.decay_steps - step) / (schedule.decay_steps - first)
    end = schedule.end_learning_rate
    # float(): mypy sees `**` of two floats as possibly complex; `remaining` is never negative here.
    return end + (base - end) * float(remaining**schedule.power)

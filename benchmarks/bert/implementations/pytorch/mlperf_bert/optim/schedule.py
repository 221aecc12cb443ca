"""The learning rate of a step: linear warm-up, then a decay. Pure functions of the step.

Steps count from 1; `step` is the one about to be taken. With a negative `start_warmup_step` the
warm-up starts part-way up; it counts m = step - start_warmup_step.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ScheduleSection


def learning_rates(
    steps: NDArray[np.int64], schedule: ScheduleSection, base: float
) -> NDArray[np.float64]:
    """The learning rate to use for each of `steps`.

    All forms rise linearly to `base` while m < warmup_steps, and hold `end_learning_rate` after
    `decay_steps`. The first two decay linearly (MLPerf Training, BERT: LAMB schedule):

    - `continuous`: where the warm-up really ends, at warmup_steps + start_warmup_step. No jump.
    - `published`: at warmup_steps, although the shifted warm-up ends elsewhere. With a negative
      start the rate therefore jumps above `base` when the warm-up ends. The constants of the
      published 1,024-GPU runs were tuned with this jump, so a faithful preset must keep it.
    - `wsd`: the rate stays at `base` until `decay_steps - cooldown_steps`. Then it falls to
      `end_learning_rate` by 1 - sqrt(s), s the passed share of the cool-down (Haegele et al.,
      "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv
      2405.18392). Without a cool-down it stays until `decay_steps`.

    Args:
        steps: int64, the optimizer steps about to be taken, from 1; in any order.
        schedule: the constants; `decay_steps` lies after the end of the warm-up (config checks it).
        base: rate at the end of the warm-up.
    """
    end, last, warm_up = schedule.end_learning_rate, schedule.decay_steps, schedule.warmup_steps
    first = warm_up + (schedule.start_warmup_step if schedule.form == "continuous" else 0)
    positions = steps - schedule.start_warmup_step
    # A positive start_warmup_step delays the warm-up: the rate is zero before it, not negative.
    rates = base * np.maximum(positions, 0) / max(warm_up, 1)
    decays = (positions >= warm_up) & (steps <= last)
    rates[steps > last] = end
    if schedule.form == "wsd":
        cooldown = schedule.cooldown_steps
        passed = np.maximum(steps[decays] - (last - cooldown), 0) / max(cooldown, 1)
        root = np.sqrt(passed)
        rates[decays] = base * (1 - root) + end * root  # exactly `base` and `end` at its ends
        return rates
    remaining = (last - steps[decays]) / (last - first)
    rates[decays] = end + (base - end) * remaining
    return rates


def learning_rate(step: int, schedule: ScheduleSection, base: float) -> float:
    """The learning rate of one step; see `learning_rates`."""
    return float(learning_rates(np.array([step]), schedule, base)[0])


def rates_of_run(config: RunConfig, device: torch.device) -> torch.Tensor:
    """The rate of every possible step, float64 [steps + 1]; element 0 is not read."""
    last = max(config.max_steps, config.run.warm_up_steps)
    rates = learning_rates(np.arange(last + 1), config.schedule, config.optim.learning_rate)
    rates[0] = 0.0
    return torch.from_numpy(rates).to(device)

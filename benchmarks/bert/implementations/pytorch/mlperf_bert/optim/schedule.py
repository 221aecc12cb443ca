"""Compute the learning rate of a step, which rises in a linear warm-up and then decays.

Steps count from 1, and `step` is the next step to run. The warm-up uses m = step -
start_warmup_step instead of the step number. If `start_warmup_step` is negative, the learning rate
of step 1 is therefore already partway to its maximum.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ScheduleSection


def learning_rates(
    steps: NDArray[np.int64], schedule: ScheduleSection, base: float
) -> NDArray[np.float64]:
    """Return the learning rate of each of `steps`.

    With all forms of the schedule, the rate rises linearly to `base` while m < warmup_steps, and
    stays at `end_learning_rate` after `decay_steps`. The first two forms decay linearly in between
    (MLPerf Training, BERT: LAMB schedule):

    - `continuous`: The line starts at the real end of the warm-up, which is warmup_steps +
      start_warmup_step, so the rate does not jump at the end of the warm-up.
    - `published`: The line starts at warmup_steps, although the shifted warm-up ends elsewhere. If
      the shift is negative, the rate therefore jumps above `base` at the end of the warm-up. The
      constants of the published 1,024-GPU runs were tuned with this jump, so presets keep it.
    - `wsd`: The rate stays at `base` until `decay_steps - cooldown_steps`. Then it falls to
      `end_learning_rate` in proportion to 1 - sqrt(s), in which s is the completed fraction of the
      cooldown (Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
      Durations", arXiv 2405.18392). If `cooldown_steps` is 0, the rate stays at `base` until
      `decay_steps`.

    Args:
        steps: int64, numbers of steps, counted from 1, in any order.
        schedule: the constants of the schedule. The config ensures that `decay_steps` is after the
            warm-up.
        base: rate at the end of the warm-up.
    """
    end, last, warm_up = schedule.end_learning_rate, schedule.decay_steps, schedule.warmup_steps
    first = warm_up + (schedule.start_warmup_step if schedule.form == "continuous" else 0)
    positions = steps - schedule.start_warmup_step
    # A positive start_warmup_step delays the warm-up. Before it, the rate is zero, not negative.
    rates = base * np.maximum(positions, 0) / max(warm_up, 1)
    decays = (positions >= warm_up) & (steps <= last)
    rates[steps > last] = end
    if schedule.form == "wsd":
        cooldown = schedule.cooldown_steps
        passed = np.maximum(steps[decays] - (last - cooldown), 0) / max(cooldown, 1)
        root = np.sqrt(passed)
        rates[decays] = base * (1 - root) + end * root  # exact at both ends
        return rates
    remaining = (last - steps[decays]) / (last - first)
    rates[decays] = end + (base - end) * remaining
    return rates


def learning_rate(step: int, schedule: ScheduleSection, base: float) -> float:
    """Return the learning rate of one step. `learning_rates` explains the arguments."""
    return float(learning_rates(np.array([step]), schedule, base)[0])


def rates_of_run(config: RunConfig, device: torch.device) -> torch.Tensor:
    """Return the learning rate of every step up to the last one, float64 [steps + 1].

    Steps count from 1, so element 0 is not used.
    """
    last = max(config.max_steps, config.run.warm_up_steps)
    rates = learning_rates(np.arange(last + 1), config.schedule, config.optim.learning_rate)
    rates[0] = 0.0
    return torch.from_numpy(rates).to(device)

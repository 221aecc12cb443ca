"""Smooths what was measured of gradients' noise: for `metrics.jsonl`, and over checkpoints."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.optim.noise_scale import NoiseScale
from mlperf_bert.step.noise_meter import measured_batches

PLAIN, PRECONDITIONED = "noise_scale_plain", "noise_scale"


class NoiseRecord:
    """Collects an interval's measurements on the device, and reads them once, at its end."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self._batches = measured_batches(config)
        self._is_on = config.run.noise_interval_steps > 0
        self._world_size = world_size
        self._measured: list[Tensor] = []
        self._scales = _new_scales()

    def add(self, measured: Tensor | None) -> None:
        """What a step's `NoiseMeter` gave; nothing is read back from the device."""
        if measured is not None:
            self._measured.append(measured)

    def values(self) -> dict[str, float | None]:
        """Both noise scales in sequences, at the end of an interval; None where not known.

        Called by every rank at the same step: measurements are averaged over the ranks.
        """
        small, big = self._batches
        for row in self._rows():
            if row[4] == 1:  # on every rank
                self._scales[PLAIN].add(row[0], small, row[1], big)
                self._scales[PRECONDITIONED].add(row[2], small, row[3], big)
        return {name: self._scales[name].value for name in (PRECONDITIONED, PLAIN)}

    def _rows(self) -> list[list[float]]:
        if not self._measured:
            return []
        rows, self._measured = torch.stack(self._measured), []
        if self._world_size > 1:
            dist.all_reduce(rows)
            rows /= self._world_size
        found: list[list[float]] = rows.tolist()  # host sync, once an interval
        return found

    def state(self) -> dict[str, float]:
        """What a resumed run needs to go on smoothing, at the end of an interval."""
        if not self._is_on:
            return {}
        return {
            f"{name}.{key}": value
            for name, scale in self._scales.items()
            for key, value in scale.state().items()
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a `state()`; anew from one of another version, or where it is empty."""
        self._measured, self._scales = [], _new_scales()
        is_state = set(state) == set(self.state()) and all(map(math.isfinite, state.values()))
        if not (self._is_on and is_state):
            return
        for name, scale in self._scales.items():
            scale.restore({key: state[f"{name}.{key}"] for key in scale.state()})


def _new_scales() -> dict[str, NoiseScale]:
    return {name: NoiseScale() for name in (PLAIN, PRECONDITIONED)}

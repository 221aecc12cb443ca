"""Measurement of gradient noise in some updates, smoothed for `metrics.jsonl`.

The meter takes squared gradient norms of small and large batches, from which the noise scale
follows (noise_scale.py), without a host sync. If an update has several forwards, on one rank or
many, the small batch is a forward's, measured after its backward; the large batch is the update's,
measured after averaging and before clipping. With one forward, two consecutive updates are the
small batches and both together the large one. The meter changes no tensor, so weights keep every
bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clipping import (
    ClipOutcome,
    clips_before,
    gradient_norm,
    limit_factor,
)
from mlperf_bert.distributed.flat_reducer import FlatBuffers
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.noise_scale import NoiseScale

KEY = "noise_scale_plain"  # of the gradient as it is; a record's key, and of its state


def make_noise_meter(
    config: RunConfig, buffers: FlatBuffers, optimizer: FlatOptimizer
) -> "NoiseMeter | None":
    """The meter that a config asks for, for the model in `buffers`; None if it asks for none."""
    if config.run.noise_interval_steps == 0:
        return None
    if config.parallel.num_forwards > 1:
        return ForwardMeter(config, buffers, optimizer)
    return ConsecutiveMeter(config, optimizer)


def measured_batches(config: RunConfig) -> tuple[int, int]:
    """Sequences of the small and of the large batch."""
    whole = config.parallel.global_batch_size
    if config.parallel.num_forwards > 1:
        return config.parallel.local_batch_size, whole
    return whole, 2 * whole


class ForwardMeter:
    """A meter that compares each forward of each rank with the update's average, in a pass each."""

    def __init__(self, config: RunConfig, buffers: FlatBuffers, optimizer: FlatOptimizer) -> None:
        self._config = config
        self._buffers = buffers
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._found: list[Tensor] = []

    def begin(self, step: int) -> None:
        """Watch every parameter's gradient; called before the first forward of update `step`."""
        if step % self._config.run.noise_interval_steps:
            return
        self._found = []
        for parameter in self._buffers.parameters:
            hook: RemovableHandle = parameter.register_hook(self._see)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _see(self, gradient: Tensor) -> None:
        self._found.append(squared_norm(gradient.detach()))

    @torch.no_grad()
    def end(self, outcome: ClipOutcome) -> Tensor | None:
        """The measurement, or None; called before the optimizer's step.

        It is [3] float64, to be averaged over the ranks: |g|^2 of the small batch and of the large
        one, and 1 if the update counts, that is if its gradient was finite and not clipped before
        averaging.
        """
        if not self._hooks:
            return None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        optimizer, forwards = self._optimizer, self._config.parallel.grad_accum_steps
        # The forwards' mean of |A g|^2, as A gradients g of one rank add up to its gradient.
        scale = optimizer.loss_scale.scale.double()
        small = torch.stack(self._found).sum(0) * forwards / scale.square()
        big = squared_norm(optimizer.reduced().gradients)
        # Averaged over the ranks, this is the sum over the shards.
        big *= _inverse_scale(self._config.clip, outcome).square() * optimizer.num_shards
        counts = _counts(self._config.clip, outcome)
        self._found = []
        return torch.stack([small, big, counts])

    def forget(self) -> None:
        """Forget synthetic updates; this meter keeps nothing between updates."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One update's gradient [n], kept for the next, and whether it counts."""

    step: int
    gradient: Tensor
    counts: Tensor


class ConsecutiveMeter:
    """A meter for one rank with one forward an update: it compares two updates, like Pollux.

    It assumes that the true gradient is the same in both: its change counts as noise, and movement
    by the first update's noise is missing in the signal. It holds a buffer of the parameters' size
    between the updates, and two more while it compares them.
    """

    def __init__(self, config: RunConfig, optimizer: FlatOptimizer) -> None:
        self._config = config
        self._optimizer = optimizer
        self._step = 0
        self._kept: _Kept | None = None

    def begin(self, step: int) -> None:
        """Remember the update's number."""
        self._step = step

    @torch.no_grad()
    def end(self, outcome: ClipOutcome) -> Tensor | None:
        """Keep the gradient in the update before a due one, and compare in the due one."""
        interval, kept = self._config.run.noise_interval_steps, self._kept
        compares = self._step % interval == 0 and kept is not None
        keeps = (self._step + 1) % interval == 0
        self._kept = None
        if not (compares or keeps):
            return None
        optimizer = self._optimizer
        shard = optimizer.reduced()
        gradient = shard.gradients.to(shard.masters.dtype)
        gradient = gradient * _inverse_scale(self._config.clip, outcome)
        counts = _counts(self._config.clip, outcome)
        if keeps:
            self._kept = _Kept(self._step, gradient, counts)
        if kept is None or not compares or kept.step != self._step - 1:
            return None
        small = (squared_norm(kept.gradient) + squared_norm(gradient)) / 2
        big = squared_norm((kept.gradient + gradient).mul_(0.5))
        return torch.stack([small, big, kept.counts * counts])

    def forget(self) -> None:
        """Forget the previous update."""
        self._kept = None


# What a step calls around the forwards of every update.
NoiseMeter = ForwardMeter | ConsecutiveMeter


def squared_norm(gradient: Tensor) -> Tensor:
    """|g|^2: 0-d float64, on the gradient's device."""
    return gradient_norm([gradient]).double().square()


def _inverse_scale(clip: ClipSection, outcome: ClipOutcome) -> Tensor:
    """The factor that undoes loss scale and wire, but not the clipping; 0-d."""
    factor = outcome.gradient_factor
    if clip.policy == "after_allreduce":
        # In float32 like the factor: exactly 1 if nothing is scaled.
        return factor / limit_factor(outcome.grad_norm, clip.max_norm).float()
    return factor


def _counts(clip: ClipSection, outcome: ClipOutcome) -> Tensor:
    """1 if the averaged gradient is what the forwards computed, else 0; 0-d float64."""
    spoilt = outcome.skip
    if clips_before(clip):
        spoilt = spoilt + outcome.clipped_fraction
    return (spoilt == 0).double()


class NoiseRecord:
    """Measurements of an interval, kept on the device and read once at its end."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self._batches = measured_batches(config)
        self._is_on = config.run.noise_interval_steps > 0
        self._world_size = world_size
        self._measured: list[Tensor] = []
        self._scale = NoiseScale()

    def add(self, measured: Tensor | None) -> None:
        """Add the result of a step's `NoiseMeter`; nothing is read from the device."""
        if measured is not None:
            self._measured.append(measured)

    def values(self) -> dict[str, float | None]:
        """The noise scale in sequences, at the end of an interval; None if not known.

        Every rank must call it at the same step: measurements are averaged over the ranks.
        """
        small, big = self._batches
        for row in self._rows():
            if row[2] == 1:  # on every rank
                self._scale.add(row[0], small, row[1], big)
        return {KEY: self._scale.value}

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
        """State from which a resumed run goes on smoothing, at the end of an interval."""
        if not self._is_on:
            return {}
        return {f"{KEY}.{key}": value for key, value in self._scale.state().items()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state()`; start anew if it is empty or of another version."""
        self._measured, self._scale = [], NoiseScale()
        is_state = set(state) == set(self.state()) and all(map(math.isfinite, state.values()))
        if not (self._is_on and is_state):
            return
        self._scale.restore({key: state[f"{KEY}.{key}"] for key in self._scale.state()})

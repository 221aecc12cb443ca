"""Measurement of gradient noise in some updates, smoothed for `metrics.jsonl`.

The meter takes squared gradient norms of small and large batches, from which the noise scale
follows (noise_scale.py), without a host sync. If an update has several forwards, on one rank or
many, the small batch is a forward's, measured after its backward; the large batch is the update's,
measured after averaging and before clipping. With one forward, two consecutive updates are the
small batches and both together the large one. The meter changes no tensor, so weights keep every
bit.

The preconditioned norms scale each element as Adam and LAMB do (all elements of a matrix of Muon
alike, by its momentum's mean square in place of v), by
P = 1 / (sqrt(v / (1 - beta_2^t)) + epsilon), with the second moments v before the update: those
after it contain part of the noise being measured. But the moments of rare words' rows have decayed.
The update itself is damped by what the new gradient adds to v, (1 - beta_2) g^2, while P from
before it would let a few such elements outweigh all others. So v has a floor of (1 - beta_2) times
its mean over the tensor, which stands for that g^2. LAMB's trust ratio, one number a tensor, is
left out.
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
from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.distributed.clipping import (
    ClipOutcome,
    clips_before,
    gradient_norm,
    limit_factor,
)
from mlperf_bert.distributed.flat_reducer import FlatBuffers
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.noise_scale import NoiseScale

PLAIN, PRECONDITIONED = "noise_scale_plain", "noise_scale"


def make_noise_meter(
    config: RunConfig, buffers: FlatBuffers, optimizer: FlatOptimizer
) -> "NoiseMeter | None":
    """The meter that a config asks for, for the model in `buffers`; None if it asks for none."""
    if config.run.noise_interval_steps == 0:
        return None
    if has_forwards_to_compare(config):
        return ForwardMeter(config, buffers, optimizer)
    return ConsecutiveMeter(config, optimizer)


def has_forwards_to_compare(config: RunConfig) -> bool:
    """True if an update has more than one forward, over all ranks."""
    return config.parallel.world_size * config.parallel.grad_accum_steps > 1


def measured_batches(config: RunConfig) -> tuple[int, int]:
    """Sequences of the small and of the large batch."""
    whole = config.parallel.global_batch_size
    if has_forwards_to_compare(config):
        return config.parallel.local_batch_size, whole
    return whole, 2 * whole


class ForwardMeter:
    """A meter that compares each forward of each rank with the update's average.

    It takes a few passes over a forward's gradient. If the moments are sharded it gathers them all:
    4 bytes a parameter during the update (8 in float64).
    """

    def __init__(self, config: RunConfig, buffers: FlatBuffers, optimizer: FlatOptimizer) -> None:
        self._config = config
        self._buffers = buffers
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._found: list[Tensor] = []
        self._least = optimizer.shard.masters.new_zeros(0)

    def begin(self, step: int) -> None:
        """Watch every parameter's gradient; called before the first forward of update `step`."""
        if step % self._config.run.noise_interval_steps:
            return
        optimizer, self._found = self._optimizer, []
        moments = optimizer.whole(optimizer.second_moments())
        self._least = least_moments(moments, optimizer)
        correction = optimizer.correction_2()
        places = zip(
            self._buffers.layout.tensors, self._least, self._buffers.parameters, strict=True
        )
        for tensor, least, parameter in places:
            of_tensor = moments[tensor.start : tensor.stop].view(tensor.shape)

            def see(gradient: Tensor, moments: Tensor = of_tensor, least: Tensor = least) -> None:
                scaling = preconditioner(moments, least, correction, optimizer.constants.epsilon)
                self._found.append(squared_norms(gradient.detach(), scaling))

            hook: RemovableHandle = parameter.register_hook(see)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    @torch.no_grad()
    def end(self, outcome: ClipOutcome) -> Tensor | None:
        """The measurement, or None; called before the optimizer's step.

        It is [5] float64, to be averaged over the ranks: |g|^2 of the small batch and of the large
        one, both plain, then both preconditioned; and 1 if the update counts, that is if its
        gradient was finite and not clipped before averaging.
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
        scaling = scaling_of_shard(optimizer, optimizer.second_moments(), self._least)
        big = squared_norms(optimizer.reduced().gradients, scaling)
        # Averaged over the ranks, this is the sum over the shards.
        big *= _inverse_scale(self._config.clip, outcome).square() * optimizer.num_shards
        counts = _counts(self._config.clip, outcome)
        self._found = []
        return torch.stack([small[0], big[0], small[1], big[1], counts])

    def forget(self) -> None:
        """Forget synthetic updates; this meter keeps nothing between updates."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One update's gradient and preconditioner [n], kept for the next, and whether it counts."""

    step: int
    gradient: Tensor
    scaling: Tensor
    counts: Tensor


class ConsecutiveMeter:
    """A meter for one rank with one forward an update: it compares two updates, like Pollux.

    It assumes that the true gradient and the preconditioner are the same in both: their change
    counts as noise, and movement by the first update's noise is missing in the signal. It holds two
    buffers of the parameters' size between the updates, and three more while it compares them.
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
            moments = optimizer.second_moments()
            scaling = scaling_of_shard(optimizer, moments, least_moments(moments, optimizer))
            self._kept = _Kept(self._step, gradient, scaling, counts)
        if kept is None or not compares or kept.step != self._step - 1:
            return None
        first, second = (squared_norms(each, kept.scaling) for each in (kept.gradient, gradient))
        small = (first + second) / 2
        big = squared_norms((kept.gradient + gradient).mul_(0.5), kept.scaling)
        return torch.stack([small[0], big[0], small[1], big[1], kept.counts * counts])

    def forget(self) -> None:
        """Forget the previous update."""
        self._kept = None


# What a step calls around the forwards of every update.
NoiseMeter = ForwardMeter | ConsecutiveMeter


def least_moments(moments: Tensor, optimizer: FlatOptimizer) -> Tensor:
    """The floor of each tensor's second moments, [tensors].

    It is computed from the whole buffer.
    """
    beta_2 = optimizer.constants.beta_2
    slices = (moments[tensor.start : tensor.stop] for tensor in optimizer.layout.tensors)
    return torch.stack([(1 - beta_2) * of_tensor.mean() for of_tensor in slices])


def scaling_of_shard(optimizer: FlatOptimizer, moments: Tensor, least: Tensor) -> Tensor:
    """Preconditioner of this rank's shard, [layout.shard_numel], from the floors of all tensors."""
    of_block = least[optimizer.shard.tensor_of_block.long()][:, None]
    epsilon, correction_2 = optimizer.constants.epsilon, optimizer.correction_2()
    return preconditioner(moments.view(-1, BLOCK), of_block, correction_2, epsilon).view(-1)


def squared_norms(gradient: Tensor, scaling: Tensor) -> Tensor:
    """|g|^2 and |P g|^2 of tensors of one shape: [2] float64, on their device."""
    norms = [gradient_norm([gradient]), gradient_norm([gradient * scaling])]
    return torch.stack([norm.double() for norm in norms]).square()


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


def preconditioner(
    exp_avg_sq: Tensor, least: Tensor, correction_2: Tensor, epsilon: float
) -> Tensor:
    """P, element by element; 0 without any moments, as before the first update.

    Args:
        exp_avg_sq: any shape, float32 or float64, as is the result.
        least: from `least_moments`, 0-d or of a shape that broadcasts.
        correction_2: 0-d, 1 - beta_2^t after t updates.
    """
    moments = torch.maximum(exp_avg_sq, least)
    is_unknown = moments == 0
    scaling = moments.div_(correction_2).sqrt_().add_(epsilon).reciprocal_()
    return scaling.masked_fill_(is_unknown, 0)


class NoiseRecord:
    """Measurements of an interval, kept on the device and read once at its end."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self._batches = measured_batches(config)
        self._is_on = config.run.noise_interval_steps > 0
        self._world_size = world_size
        self._measured: list[Tensor] = []
        self._scales = _new_scales()

    def add(self, measured: Tensor | None) -> None:
        """Add the result of a step's `NoiseMeter`; nothing is read from the device."""
        if measured is not None:
            self._measured.append(measured)

    def values(self) -> dict[str, float | None]:
        """Both noise scales in sequences, at the end of an interval; None if not known.

        Every rank must call it at the same step: measurements are averaged over the ranks.
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
        """State from which a resumed run goes on smoothing, at the end of an interval."""
        if not self._is_on:
            return {}
        return {
            f"{name}.{key}": value
            for name, scale in self._scales.items()
            for key, value in scale.state().items()
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state()`; start anew if it is empty or of another version."""
        self._measured, self._scales = [], _new_scales()
        is_state = set(state) == set(self.state()) and all(map(math.isfinite, state.values()))
        if not (self._is_on and is_state):
            return
        for name, scale in self._scales.items():
            scale.restore({key: state[f"{name}.{key}"] for key in scale.state()})


def _new_scales() -> dict[str, NoiseScale]:
    return {name: NoiseScale() for name in (PLAIN, PRECONDITIONED)}

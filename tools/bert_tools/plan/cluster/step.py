"""Simulates one training step: the ranks' computation, launches, communication and waits.

Shape letters: R ranks, P phases. Times are in ms from the start of the step, float64 [R] or [P, R].
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from bert_tools.plan.cluster.device import Device, Phase, SentBucket, phases_of, sent_buckets
from bert_tools.plan.cluster.machine import (
    Constants,
    Machine,
    MatrixPrecision,
    Network,
    Scope,
    StepOptimizer,
)
from bert_tools.plan.cluster.workload import Float64Array, Workload
from mlperf_bert.config.sections import ClipPolicy
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB

_UPDATE_KERNELS = 5  # kernels of the optimizer, including the one that zeroes the gradients
_ADAM_BYTES = 28  # bytes that are read and written per parameter
_UPDATE_BYTES: dict[StepOptimizer, int] = {
    "adam": _ADAM_BYTES,
    # LAMB also writes and reads the update, reads the weight again (all fp32), and reads the
    # gradient for a norm.
    "lamb": _ADAM_BYTES + 14,
}
_CLIP_PASSES = 3  # passes over a gradient, one to compute its norm and two to scale it


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The properties of the program and its machine that determine a step's time.

    The simulation of a step also needs the lengths of the step's samples.
    """

    machine: Machine
    constants: Constants
    precision: MatrixPrecision
    element_bytes: int  # of a gradient
    sent_fraction: float = 1.0  # bytes sent per byte of gradient
    clip: ClipPolicy
    bucket_cap_mb: float = DEFAULT_CAP_MB
    capture: Literal["on", "off"] = "on"
    sharding: Scope = "none"
    optimizer: StepOptimizer = "adam"

    @property
    def device(self) -> Device:
        """Return the speed model of one accelerator."""
        return Device(self.machine.accelerator, self.precision, self.constants)

    @property
    def network(self) -> Network:
        """Return the model of the collectives over all ranks."""
        return Network(self.machine, self.constants)

    @property
    def buckets(self) -> tuple[SentBucket, ...]:
        """Return the gradient buckets in the order in which they are sent."""
        return sent_buckets(self.element_bytes, self.bucket_cap_mb)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(bucket.num_bytes for bucket in self.buckets) // self.element_bytes

    def phases(self, work: Workload) -> list[Phase]:
        """Return the phases of the forward and the backward pass."""
        return phases_of(self.device, work)

    def launch_ms(self, launches: int) -> float:
        """Return the host's time for kernel launches in ms.

        It is 0 for a captured step, which needs only one launch.
        """
        each_us = 0.0 if self.capture == "on" else self.constants.host_launch_us
        return launches * each_us / 1e3


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """The times of all events of a simulated step.

    The `parts` of each rank, including its waits, add up to the time of the step.
    """

    phases: list[Phase]
    starts: Float64Array  # [P, R], when the device starts a phase
    ends: Float64Array  # [P, R], when the device ends a phase
    input_ms: float
    clip_ms: Float64Array  # [R], clipping during the backward pass
    backward_end: Float64Array  # [R], including clipping
    communication: list[tuple[float, float]]  # start and end of each bucket
    clip_after_ms: float
    optimizer_ms: float
    optimizer_wait_ms: float  # wait because the host launches too late
    all_gather_ms: float  # time that does not overlap with a forward pass
    overlapped_ms: Float64Array  # [R], delay of the backward pass by communication
    earlier_ms: float = 0.0  # time of the update's earlier micro-batches

    @property
    def forward_ms(self) -> float:
        """Return the forward and backward time of the slowest rank in ms, without communication."""
        return float(self.ends[-1].max()) - self.input_ms

    @property
    def reduced(self) -> float:
        """Return the time in ms at which the gradients of all buckets have been averaged."""
        slowest = float(self.backward_end.max())
        return max(slowest, self.communication[-1][1]) if self.communication else slowest

    @property
    def step_ms(self) -> float:
        """Return the time of the whole step, which ends at the same time on all ranks."""
        update = self.optimizer_ms + self.optimizer_wait_ms
        tail = self.clip_after_ms + update + self.all_gather_ms
        return self.earlier_ms + self.reduced + tail

    @property
    def communication_ms(self) -> float:
        """Return the time to average all buckets and to gather the updated weights, in ms.

        The time of the buckets includes the part that overlaps with computation. The time of the
        weights does not.
        """
        return sum(end - start for start, end in self.communication) + self.all_gather_ms

    @property
    def exposed_ms(self) -> float:
        """Return the communication time in ms that does not overlap with computation."""
        return self.reduced - float(self.backward_end.max()) + self.all_gather_ms

    @cached_property
    def parts(self) -> dict[str, Float64Array]:
        """Return the parts of each rank's step in ms, [R] each: first its work, then its waits.

        The parts of a rank add up to the time of the step.
        """
        ones = np.ones(self.starts.shape[1])
        work = np.array([phase.device_ms for phase in self.phases])
        is_forward = np.array([phase.direction == "forward" for phase in self.phases])
        slowest = float(self.backward_end.max())
        busy = work.sum(axis=0) + self.overlapped_ms + self.clip_ms + self.input_ms
        behind = np.maximum(self.backward_end - busy, 0.0)
        return {
            "input exchange": self.input_ms * ones,
            **({"earlier micro-batches": self.earlier_ms * ones} if self.earlier_ms else {}),
            "forward": work[is_forward].sum(axis=0),
            "backward": work[~is_forward].sum(axis=0),
            "slowed by communication": self.overlapped_ms,
            "clipping": self.clip_ms + self.clip_after_ms,
            "optimizer": self.optimizer_ms * ones,
            "wait: launches and host syncs": behind + self.optimizer_wait_ms,
            "wait: slower ranks": slowest - self.backward_end,
            "wait: communication": self.exposed_ms * ones,
        }


def simulate_step(job: Job, work: Workload, speed: Float64Array) -> StepTiming:
    """Simulate one step and return the times of its events.

    `speed`, [R], has factors for the ranks' device times (jitter). All ranks start together,
    because an all-reduce ended the previous step.
    """
    phases = [replace(phase, device_ms=phase.device_ms * speed) for phase in job.phases(work)]
    input_ms = _gather_ms(job, work.input_scope, work.input_bytes)
    starts, ends, host_ends = _run_phases(job, phases, input_ms, work.world_size)
    first_back = next(i for i, phase in enumerate(phases) if phase.direction == "backward")
    gradient_bytes = job.element_bytes * job.parameters
    clip_ms = np.zeros(work.world_size)
    if job.clip == "whole_before_allreduce":
        clip_ms += _clip_ms(job, gradient_bytes)
    elif job.clip == "bucket_before_allreduce":
        clip_ms += sum(_clip_ms(job, bucket.num_bytes) for bucket in job.buckets)
    if job.machine.world_size == 1:
        end, sent, slowed = ends[-1] + clip_ms, [], np.zeros(work.world_size)
    elif job.clip == "whole_before_allreduce":
        end, slowed = ends[-1] + clip_ms, np.zeros(work.world_size)
        begin = float(end.max())
        sent = [(begin, begin + _reduce_ms(job, gradient_bytes))]
    else:
        end, sent, slowed = _send_buckets(job, starts[first_back:], ends[first_back:])
    update_ms, update_wait_ms = _update(job, host_ends, sent, end)
    after = job.clip == "after_allreduce"
    return StepTiming(
        phases=phases,
        starts=starts,
        ends=ends,
        input_ms=input_ms,
        clip_ms=clip_ms,
        backward_end=end,
        communication=sent,
        clip_after_ms=_clip_ms(job, gradient_bytes) / _shards(job) if after else 0.0,
        optimizer_ms=update_ms,
        optimizer_wait_ms=update_wait_ms,
        all_gather_ms=_weights_gather_ms(job, phases[:first_back]),
        overlapped_ms=slowed,
    )


def jitter(ranks: int, fraction: float, seed: int) -> Float64Array:
    """Draw random factors, [R], that multiply the ranks' device times in one step."""
    generator = np.random.default_rng(seed)
    return np.maximum(1 + fraction * generator.standard_normal(ranks), 0.5)


def _gather_ms(job: Job, scope: Scope, num_bytes: float) -> float:
    """Return the time of an all-gather over `scope`, in ms.

    The all-gather collects samples before the forward pass, or weights after the update.
    """
    if scope == "none":
        return 0.0
    network = job.network
    return (network.all_gather_in_node_ms if scope == "node" else network.all_gather_ms)(num_bytes)


def _reduce_ms(job: Job, num_bytes: float) -> float:
    """Return the time to average `num_bytes` of gradients over the ranks, in ms.

    The ranks use a reduce-scatter if the optimizer state is sharded over all of them, because each
    rank then needs only its own part. Otherwise they use an all-reduce.
    """
    num_bytes *= job.sent_fraction
    scattered = job.sharding == "world" or (job.sharding == "node" and job.machine.nodes == 1)
    network = job.network
    return (network.reduce_scatter_ms if scattered else network.all_reduce_ms)(num_bytes)


def _run_phases(
    job: Job, phases: list[Phase], begin: float, ranks: int
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Simulate the phases, of which the first starts at the time `begin`.

    Returns the phases' starts and ends on the device, and the times at which the host has launched
    them, [P, R] each. A phase starts when the previous phase has ended and the host has started to
    launch its kernels. It ends after its device time, but not before the host has launched all of
    its kernels.
    """
    host = np.full(ranks, begin)
    device = np.full(ranks, begin)
    shape = len(phases), ranks
    starts, ends, host_ends = np.empty(shape), np.empty(shape), np.empty(shape)
    for number, phase in enumerate(phases):
        starts[number] = np.maximum(device, host)
        host = host + job.launch_ms(phase.launches)
        device = np.maximum(starts[number] + phase.device_ms, host)
        ends[number], host_ends[number] = device, host
    return starts, ends, host_ends


def _send_buckets(
    job: Job, starts: Float64Array, ends: Float64Array
) -> tuple[Float64Array, list[tuple[float, float]], Float64Array]:
    """Simulate the communication of the gradient buckets.

    A bucket is sent when it is ready on the slowest rank and the previous bucket has been sent.
    Returns the end of each rank's backward pass, [R], the start and end of each bucket's
    communication, and the time by which communication slows each rank's backward pass, [R].
    """
    ranks = starts.shape[1]
    slowdown = job.constants.overlap_slowdown
    behind, slowed = np.zeros(ranks), np.zeros(ranks)
    before = starts[0]
    sent: list[tuple[float, float]] = []
    busy_from = busy_to = 0.0
    for bucket in job.buckets:
        begin, end = starts[bucket.phase], ends[bucket.phase]
        if job.clip == "bucket_before_allreduce":
            behind = behind + _clip_ms(job, bucket.num_bytes)
        ready = begin + bucket.fraction * (end - begin) + behind
        overlap = np.clip(np.minimum(ready, busy_to) - np.maximum(before, busy_from), 0.0, None)
        behind, slowed = behind + slowdown * overlap, slowed + slowdown * overlap
        ready = before = ready + slowdown * overlap
        start = max(float(ready.max()), busy_to)
        if start > busy_to or not sent:
            busy_from = start
        busy_to = start + _reduce_ms(job, bucket.num_bytes)
        sent.append((start, busy_to))
    return ends[-1] + behind, sent, slowed


def _update(
    job: Job, host_ends: Float64Array, sent: list[tuple[float, float]], end: Float64Array
) -> tuple[float, float]:
    """Return the time of the optimizer, and its wait for the host's launches, in ms."""
    moved = _UPDATE_BYTES[job.optimizer] * job.parameters / _shards(job)
    moved += job.element_bytes * job.parameters  # zeroing the gradients
    update_ms = float(job.device.memory_ms(moved)) + job.device.kernels_ms(_UPDATE_KERNELS)
    ready = max(float(end.max()), sent[-1][1] if sent else 0.0)
    launched = float(host_ends[-1].max()) + job.launch_ms(_UPDATE_KERNELS)
    return update_ms, max(0.0, launched - ready - update_ms)


def _weights_gather_ms(job: Job, forward: list[Phase]) -> float:
    """Return the time to gather updated weights that does not overlap with computation, in ms.

    A captured step gathers all weights before it ends. Otherwise the weights arrive bucket by
    bucket during the forward pass, in the order in which its phases need them.
    """
    if job.capture == "on":
        return _gather_ms(job, job.sharding, job.element_bytes * job.parameters)
    coming = [
        (len(forward) - 1 - bucket.phase, _gather_ms(job, job.sharding, bucket.num_bytes))
        for bucket in reversed(job.buckets)
    ]
    arrived = np.cumsum([time for _, time in coming])
    waiting = hidden = np.zeros_like(forward[0].device_ms)
    for number, phase in enumerate(forward):
        own = [at for (needed, _), at in zip(coming, arrived, strict=True) if needed <= number]
        waiting = np.maximum(waiting, max(own, default=0.0)) + phase.device_ms
        hidden = hidden + phase.device_ms
    return float(waiting.max() - hidden.max())


def _shards(job: Job) -> int:
    if job.sharding == "none":
        return 1
    return job.machine.gpus_per_node if job.sharding == "node" else job.machine.world_size


def _clip_ms(job: Job, num_bytes: float) -> float:
    kernels = job.device.kernels_ms(_CLIP_PASSES)
    return float(job.device.memory_ms(_CLIP_PASSES * num_bytes)) + kernels

"""The phases of a step, in order: device time, launches and syncs of each; and which bucket when.

A phase is the embeddings, one encoder layer or the heads, in one direction. Shape letters: R ranks.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from bert_tools.plan.buckets_model import backward_order
from bert_tools.plan.cluster.device import Device, embedding_ms, head_ms, layer_work
from bert_tools.plan.cluster.software import Software
from bert_tools.plan.cluster.workload import Float64Array, Workload
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, plan_buckets

_TYPICAL_TOKENS, _TYPICAL_MASKED = 256, 38  # of Wikipedia's sequences; shares hardly depend on it


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of forward or backward: device time [R] in ms, and what the host does for it."""

    name: str
    direction: Literal["forward", "backward"]
    device_ms: Float64Array
    launches: int
    ends_with_sync: bool


@dataclass(frozen=True, slots=True)
class SentBucket:
    """A bucket of gradients, ready a `fraction` of the way through backward phase `phase`."""

    num_bytes: int
    phase: int
    fraction: float


def phases_of(
    device: Device, model: ModelSection, program: Software, work: Workload
) -> list[Phase]:
    """Embeddings, layers, heads; heads, layers, embeddings."""
    layers = model.num_layers
    last_rows = work.tokens
    if program.last_layer_rows == "masked":
        last_rows = np.minimum(work.masked + work.sequences, work.tokens)
    full = layer_work(device, model, program, work, work.tokens)
    last = layer_work(device, model, program, work, last_rows)
    heads = head_ms(device, model, work.masked)
    embeddings = embedding_ms(device, model, work.tokens)
    others = program.other_kernels // 4  # of embeddings and heads, forward and backward
    extra = device.kernels_ms(others)
    hooked = program.syncs_in_hooks == "each bucket"

    def phase(
        name: str, back: bool, device_ms: Float64Array, launches: int, sync: bool = False
    ) -> Phase:
        return Phase(name, "backward" if back else "forward", device_ms, launches, sync)

    names = [f"layer {number}" for number in range(layers)]
    works = [full] * (layers - 1) + [last]
    forward, backward = program.forward_kernels, program.backward_kernels
    backward += program.hook_kernels  # about one bucket a layer
    return [
        phase("embeddings", False, embeddings[0] + extra, others),
        *(
            phase(name, False, each.forward, forward)
            for name, each in zip(names, works, strict=True)
        ),
        phase("heads", False, heads[0] + extra, others),
        phase("heads", True, heads[1] + extra, others),
        *(
            phase(name, True, each.backward, backward, hooked)
            for name, each in zip(names[::-1], works[::-1], strict=True)
        ),
        phase("embeddings", True, embeddings[1] + extra, others, hooked),
    ]


@cache
def sent_buckets(
    model: ModelSection, element_bytes: int, cap_mb: float = DEFAULT_CAP_MB
) -> tuple[SentBucket, ...]:
    """DistributedDataParallel's buckets, each with the backward phase that it is ready in."""
    order = backward_order(model, "separate", _TYPICAL_TOKENS, _TYPICAL_MASKED)
    phase_of = {gradient.name: _backward_phase(gradient.name, model) for gradient in order}
    ends = np.zeros(model.num_layers + 2)
    for gradient in order:
        ends[phase_of[gradient.name]] = gradient.ready_at
    begins = np.concatenate([[0.0], ends[:-1]])
    buckets = []
    for bucket in plan_buckets(order, element_bytes, cap_mb):
        number = phase_of[bucket.names[-1]]
        length = ends[number] - begins[number]
        fraction = (bucket.earliest_start - begins[number]) / length if length else 1.0
        buckets.append(SentBucket(bucket.num_bytes, number, float(fraction)))
    return tuple(buckets)


def _backward_phase(name: str, model: ModelSection) -> int:
    if name.startswith("bert.encoder.layer."):
        return model.num_layers - int(name.split(".")[3])
    return model.num_layers + 1 if name.startswith("bert.embeddings") else 0

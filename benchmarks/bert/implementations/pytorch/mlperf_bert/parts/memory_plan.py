"""Plan of one rank's peak memory, the largest batch that fits, and the refusal of others.

Counted by hand from the config and the sizes of a forward; the bytes that a forward saves are in
`model/saved_bytes.py`. Not yet measured on a GPU.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.length_histogram import (
    masked_counts_of,
    real_lengths,
    run_shapes,
    wikipedia_lengths,
)
from mlperf_bert.data.shards import IntArray
from mlperf_bert.model.saved_bytes import (
    AttentionKind,
    Forward,
    Kernels,
    PaddedAttention,
    SavedBytes,
)
from mlperf_bert.optim.muon_plan import STACK_ELEMENTS, hidden_matrices

GIB = 2**30
# Share of the sum, for blocks that the allocator holds but cannot use. An estimate.
MARGIN = 0.04
# Usable share of a GB in a GPU's name: 79.1 GiB of an H100's 80, 139.8 of an H200's 141.
USABLE_OF_NAMED = 0.988 * GIB
# Outside torch's allocator: context, kernels, cuBLAS; and NCCL's buffers. Estimates.
CONTEXT_BYTES, NCCL_BYTES = 1 * GIB, 1 * GIB
# Gradients [T, D] alive at once in a layer's backward, beside the saved bytes of earlier layers.
_BACKWARD_TENSORS = 5
_EVALUATED_TOKENS = {True: 16_384, False: 4_096}  # on CUDA or not: eval.tokens_per_forward "auto"
_LARGEST_BATCH = 2**16  # largest that is searched for


@dataclass(frozen=True, slots=True)
class Part:
    """One row: `held` all the time, `saved` by a forward, or `working`, the peak beside both."""

    name: str
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's memory at its peak, part by part."""

    forward: Forward
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, without a margin."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def with_margin(self) -> int:
        """Bytes that a device should have."""
        return round((1 + MARGIN) * self.num_bytes)

    def of_kind(self, kind: str) -> int:
        """Bytes of all parts of a kind."""
        return sum(part.num_bytes for part in self.parts if part.kind == kind)


def is_on_cuda(config: RunConfig) -> bool:
    """True if the plan is for a GPU, as with run.device "auto"."""
    return config.run.device != "cpu"


def kernels_of(config: RunConfig) -> Kernels:
    """The kernels of a run of `config`; for "auto", those that the rule prefers."""
    on_cuda, model = is_on_cuda(config), config.model
    kinds: dict[str, AttentionKind] = {"triton": "keyed", "flash": "fused", "cudnn": "fused"}
    kind = kinds.get(model.attention, "padded")
    if model.attention == "auto" and on_cuda and model.precision != "fp32":
        kind = "keyed"
    return Kernels(fused=on_cuda and model.kernels != "reference", attention=kind, on_cuda=on_cuda)


def expected_forward(config: RunConfig) -> Forward:
    """The largest forward of a run, with published lengths.

    Without capture that is the warm-up's, whose sequences have full length.
    """
    data, count = config.data, config.parallel.local_batch_size
    if config.run.step_mode == "eager" and config.run.warm_up_steps:
        lengths = np.full(count, data.max_seq_length)
        most = min(data.max_predictions, data.max_seq_length - 1)
        return forward_of_lengths(config, lengths, np.full(count, most))
    shape = run_shapes(config)[-1]
    lengths = real_lengths(count, data.max_seq_length, 1)
    masked_counts = masked_counts_of(lengths, data.max_predictions, data.masking_rate)
    of_lengths = forward_of_lengths(config, lengths, masked_counts)
    return replace(forward_of_shape(shape), padded=of_lengths.padded, local=of_lengths.local)


def forward_of_run(config: RunConfig, shapes: tuple[StaticShape, ...]) -> Forward:
    """The largest forward of a run with steps captured in `shapes`, the smallest first."""
    return forward_of_shape(shapes[-1]) if shapes else expected_forward(config)


def forward_of_shape(shape: StaticShape) -> Forward:
    """The forward of batches padded to a capacity, for lengths like the published ones."""
    published = wikipedia_lengths()
    return Forward(
        sequences=shape.sequences,
        tokens=shape.tokens,
        masked=shape.masked,
        longest=shape.max_seqlen,
        mean_length=published.mean_length * shape.max_seqlen / published.max_length,
    )


def forward_of_lengths(config: RunConfig, lengths: IntArray, masked_counts: IntArray) -> Forward:
    """The forward of one unpadded batch; both arrays are int64 [B]."""
    model = config.model
    longest, policy = model.max_position_embeddings, model.attention
    queries = masked_counts + (model.objective == "mlm_nsp")
    padded = local = None
    if kernels_of(config).attention == "padded":
        padded = local = PaddedAttention.of_lengths(policy, lengths, queries, longest)
        if policy not in ("reference", "packed") and model.local_share:
            local = (
                PaddedAttention.of_chunks(lengths, queries, model.reach)
                if model.attention_dropout == 0
                else PaddedAttention.of_lengths("reference", lengths, queries, longest)
            )
    return Forward(
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        masked=int(masked_counts.sum()),
        longest=longest,
        padded=padded,
        local=local,
    )


def plan_memory(config: RunConfig, forward: Forward, *, evaluates: bool = True) -> MemoryPlan:
    """The plan of one rank; `evaluates`: whether held-out samples are evaluated on it as well."""
    saved = SavedBytes(config.model, kernels_of(config), forward)
    parts = [
        *(Part(name, "held", size) for name, size in _held(config, forward, evaluates).items()),
        *(Part(name, "saved", size) for name, size in saved.parts().items()),
    ]
    phases = _phases(config, saved)
    fullest = max(phases, key=phases.__getitem__)
    parts.append(Part(f"working memory: {fullest}", "working", max(0, phases[fullest])))
    return MemoryPlan(
        forward, tuple(part for part in parts if part.num_bytes or part.kind != "held")
    )


def largest_batch(
    config: RunConfig, forward: Forward, device_bytes: float, *, evaluates: bool = True
) -> int:
    """The largest `local_batch_size` of these lengths that fits with the margin; 0 if none fits."""
    low, high = 0, _LARGEST_BATCH  # size 0 has no plan
    slots = forward.sequences / config.parallel.local_batch_size  # above 1 with unequal counts
    while low < high:
        middle = (low + high + 1) // 2
        plan = plan_memory(config, forward.of_batch(round(slots * middle)), evaluates=evaluates)
        low, high = (middle, high) if plan.with_margin <= device_bytes else (low, middle - 1)
    return low


def refuse_what_cannot_fit(
    config: RunConfig, forward: Forward, device_bytes: float, *, evaluates: bool = True
) -> None:
    """Raise ConfigError if the plan's sum, without a margin, exceeds the device's memory."""
    plan = plan_memory(config, forward, evaluates=evaluates)
    if plan.num_bytes <= device_bytes:
        return
    largest = largest_batch(config, forward, device_bytes, evaluates=evaluates)
    problem = (
        f"{config.parallel.local_batch_size} sequences a forward need about "
        f"{plan.num_bytes / GIB:.1f} GiB, the device has {device_bytes / GIB:.1f} GiB"
    )
    raise ConfigError("parallel.local_batch_size", problem, _remedy(config, largest))


def _remedy(config: RunConfig, largest: int) -> str:
    parallel = config.parallel
    if not largest:
        return "not one sequence fits: use a smaller model, or a larger device"
    of_rank = parallel.local_batch_size * parallel.grad_accum_steps
    for forwards in range(parallel.grad_accum_steps + 1, of_rank + 1):
        each, rest = divmod(of_rank, forwards)
        if each <= largest and not rest:
            return (
                f"the largest that fits is {largest}; {each} with parallel.grad_accum_steps "
                f"{forwards} is the same global batch (mlperf_bert plan memory)"
            )
    return f"the largest that fits is {largest} (mlperf_bert plan memory)"


def _held(config: RunConfig, forward: Forward, evaluates: bool) -> dict[str, int]:
    """Bytes that are held all the time, by part."""
    model, parallel = config.model, config.parallel
    numel, width = model.num_parameters, _weight_width(config)
    own = -(-numel // _shards(config))
    is_cut = own < numel
    wire = {"fp32": 4, "bf16": 2, "fp16": 2}.get(parallel.allreduce_dtype, width)
    is_ours = parallel.world_size > 1 and parallel.data_parallel != "ddp"
    keeps_gradient = config.run.noise_interval_steps > 0 and parallel.num_forwards == 1
    held = {
        "weights": numel * width + (own * width if is_cut and width != 4 else 0),
        "fp32 masters": 0 if width == 4 and not is_cut else 4 * own,
        "moments": 8 * own,
        "directions of Muon": _direction_width(config) * own,
        "gradients": numel * width,
        "gradients, reduced": own * wire if is_ours and (is_cut or wire != width) else 0,
        "buckets of DistributedDataParallel": numel * width if _has_ddp(config) else 0,
        "noise meter": 4 * own if keeps_gradient else 0,
        "inputs": _inputs(config, forward),
    }
    if evaluates and config.run.step_mode == "captured" and is_on_cuda(config):
        held["evaluation's graph"] = _evaluation(config)
    if evaluates and config.eval.overlap == "side_stream":
        held["weights that are evaluated"] = numel * width
    if is_on_cuda(config):
        nccl = NCCL_BYTES if parallel.world_size > 1 else 0
        held["context and libraries (estimate)"] = CONTEXT_BYTES + nccl
    return held


def _phases(config: RunConfig, saved: SavedBytes) -> dict[str, int]:
    """Peak bytes beside held and saved ones, by phase of the step."""
    model, forward = config.model, saved.forward
    hidden, product = saved.widths
    numel = model.num_parameters
    # Without a reducer a backward leaves its gradients where autograd made them until the update.
    left = numel * hidden if config.parallel.world_size == 1 else 0
    before = left if config.parallel.grad_accum_steps > 1 else 0
    widest = _BACKWARD_TENSORS * model.hidden_size
    if model.architecture == "modern":  # gradients of the gated half's product, and of its result
        widest = max(widest, 3 * model.intermediate_size + model.hidden_size)
    of_tokens = widest * forward.tokens * product
    if forward.padded is not None:
        of_tokens += 3 * model.num_heads * forward.padded.largest * product
    of_tables = model.padded_vocab_size * model.hidden_size * hidden
    done = saved.heads() + saved.last_layer()
    all_saved = sum(saved.parts().values())
    # Matrices sent, received, stacked and returned, and four stacks in Newton-Schulz.
    matrices = sum(map(math.prod, hidden_matrices(model))) // _shards(config)
    routed = 4 * _direction_width(config) * (matrices + min(STACK_ELEMENTS, matrices))
    return {
        "logits": before + saved.loss_forward,
        "gradients of logits": before + saved.loss_backward,
        "a layer's backward": before + of_tokens + of_tables - done,
        "all gradients": left + of_tables - all_saved,
        "momentum made orthogonal": left + routed - all_saved,
    }


def _has_ddp(config: RunConfig) -> bool:
    return config.parallel.world_size > 1 and config.parallel.data_parallel == "ddp"


def _shards(config: RunConfig) -> int:
    parallel = config.parallel
    shards = {"shard_node": parallel.ranks_per_node, "shard_world": parallel.world_size}
    return shards.get(parallel.data_parallel, 1)


def _direction_width(config: RunConfig) -> int:
    """Bytes of an element of what Muon makes orthogonal; 0 for other optimizers."""
    if config.optim.name != "muon":
        return 0
    return 2 if is_on_cuda(config) else _weight_width(config)


def _weight_width(config: RunConfig) -> int:
    """Bytes of a weight of the model."""
    return 4 if config.model.precision in ("fp32", "bf16_autocast") else 2


def _inputs(config: RunConfig, forward: Forward) -> int:
    """Batches on the device: those of a step, and two steps' in transit."""
    one = 8 * (3 * forward.tokens + 2 * forward.masked + 3 * forward.sequences)
    return 3 * config.parallel.grad_accum_steps * one


def _evaluation(config: RunConfig) -> int:
    """Bytes of a forward without a backward: a layer, and the logits."""
    model, setting = config.model, config.eval.tokens_per_forward
    tokens = _EVALUATED_TOKENS[is_on_cuda(config)] if setting == "auto" else setting
    width = 4 if model.precision == "fp32" else 2
    # A gated half's product is twice as wide, and the residual stays beside its norm.
    wide, narrow = (3, 4) if model.architecture == "modern" else (2, 3)
    of_layer = tokens * (wide * model.intermediate_size + narrow * model.hidden_size)
    masked = masked_counts_of(np.array([tokens]), tokens).item()
    return width * (of_layer + masked * model.padded_vocab_size)

"""Set up how gradients are averaged over the ranks and clipped after the backward pass."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.bucket_plan import (
    FlatLayout,
    ddp_bucket_cap_mb,
    plan_in_reverse,
    plan_layout,
)
from mlperf_bert.distributed.clipping import Clipping, SumInFp32, make_clipping, wire_dtype
from mlperf_bert.distributed.flat_reducer import (
    FlatBuffers,
    FlatReducer,
    ShardGroup,
    flat_weights,
    num_shards,
)
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import check_nodes
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.step.eager import weights_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """A model whose gradients are averaged over the ranks and clipped according to `clip.policy`.

    Args:
        model: the model to call, wrapped in DistributedDataParallel if the config requires it.
        clipping: averages and clips gradients between backward pass and update.
        buffers: flat buffers of the model's weights and gradients.
        gradients: this rank's shard of the averaged gradients, which the optimizer reads.
        shards: process group of the ranks that own the other shards of the optimizer state.
    """

    model: nn.Module
    clipping: Clipping
    buffers: FlatBuffers
    gradients: Tensor
    shards: ShardGroup


def make_data_parallel(
    model: BertForPretraining, config: RunConfig, info: RankInfo, device: torch.device
) -> tuple[DataParallel, Tensor]:
    """Move weights and gradients into flat buffers, and set up gradient averaging and clipping.

    All ranks must call this collective function. `model` must be on `device` and have its initial
    weights. The function changes the memory of the model's weights and gradients and, in 16-bit
    precisions, their dtype. A run with one rank has no process group and averages no gradients.

    The second result is the initial weights before rounding to 16 bits, float32 [elements], for the
    optimizer. A sharded optimizer copies its part of them, so delete this tensor afterwards to save
    memory.
    """
    parallel = config.parallel
    check_nodes("parallel.data_parallel", parallel.data_parallel, info, parallel.ranks_per_node)
    layout = _plan_layout(model, config, num_shards(parallel.data_parallel, info))
    initial = flat_weights(model, layout)
    buffers = FlatBuffers(
        model, layout, initial.to(weights_dtype(config.model.precision, initial.dtype))
    )
    shards = ShardGroup(info, layout.num_shards, device)
    wire = wire_dtype(buffers.weights.dtype, parallel.allreduce_dtype)
    wrapped: nn.Module = model
    clipping: Clipping
    sums = SumInFp32(buffers.parameters) if _sums_in_16_bits(buffers, config) else None
    if dist.is_initialized() and parallel.data_parallel != "ddp":
        clipping = FlatReducer(model, buffers, config.clip, shards, wire, info.world_size)
        gradients = clipping.shard_gradients
    else:
        if dist.is_initialized():
            wrapped = DistributedDataParallel(
                model,
                bucket_cap_mb=ddp_bucket_cap_mb(parallel.bucket_cap_mb),
                gradient_as_bucket_view=True,
            )
            # DDP's statistics wait for the device every 100 steps, which would break a capture.
            wrapped._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
        clipping = make_clipping(config.clip, wrapped, wire, bucket_cap_mb=parallel.bucket_cap_mb)
        gradients = buffers.gradients
    if sums is not None:
        sums.clipping = clipping
    made = DataParallel(
        model=wrapped,
        clipping=sums or clipping,
        buffers=buffers,
        gradients=gradients,
        shards=shards,
    )
    return made, initial


def _sums_in_16_bits(buffers: FlatBuffers, config: RunConfig) -> bool:
    return buffers.weights.dtype.itemsize < 4 and config.parallel.grad_accum_steps > 1


def _plan_layout(model: nn.Module, config: RunConfig, num_shards: int) -> FlatLayout:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    dtype = weights_dtype(config.model.precision, next(iter(trained.values())).dtype)
    buckets = plan_in_reverse(
        {name: param.numel() for name, param in trained.items()},
        dtype.itemsize,
        config.parallel.bucket_cap_mb,
    )
    shapes = {name: tuple(param.shape) for name, param in trained.items()}
    return plan_layout(shapes, buckets, num_shards)

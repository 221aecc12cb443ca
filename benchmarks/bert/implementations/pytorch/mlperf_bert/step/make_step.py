"""The step of a run: flat weights and gradients, their averaging and clipping, the optimizer."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.distributed.bucket_plan import (
    FlatLayout,
    ddp_bucket_cap_mb,
    plan_in_reverse,
    plan_layout,
)
from mlperf_bert.distributed.clipping import Clipping, make_clipping, wire_dtype
from mlperf_bert.distributed.flat_reducer import (
    FlatBuffers,
    FlatReducer,
    ShardGroup,
    flat_weights,
    num_shards,
)
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import check_nodes
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.optim.schedule import learning_rates
from mlperf_bert.step.captured import CapturedStep, Step
from mlperf_bert.step.eager import EagerStep, weights_dtype

WARM_UP_CALLS = 3  # calls of an update before its capture
READ_LENGTHS_ON_THE_HOST = ("reference", "grouped")  # on CUDA
DDP_WARM_UP_CALLS = 11  # torch's notes on CUDA graphs require this with DistributedDataParallel


def make_step(
    model: BertForPretraining,
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    shapes: tuple[StaticShape, ...] = (),
) -> tuple[FlatOptimizer, Step]:
    """The optimizer of this rank's part of the state, and the step that drives it.

    `shapes` are those of a captured step, the smallest first; without any the step is eager.
    `model` has its initial weights, on `device`. Only the memory of its weights and gradients
    changes and, in 16-bit precisions, their dtype. Every rank must call it at the same time.
    """
    if shapes:
        _check_capturable(model.attention, device)
    parallel = config.parallel
    check_nodes("parallel.data_parallel", parallel.data_parallel, info, parallel.ranks_per_node)
    layout = _plan_layout(model, config, num_shards(parallel.data_parallel, info))
    initial = flat_weights(model, layout)
    dtype = weights_dtype(config.model.precision, initial.dtype)
    buffers = FlatBuffers(model, layout, initial.to(dtype))
    parallel_model, clipping, gradients, others = _reduction(model, buffers, config, info, device)
    optimizer = make_optimizer(config.optim, buffers, initial, gradients, others)
    step = EagerStep(
        parallel_model,
        optimizer,
        _learning_rates(config, device),
        clipping,
        model.step,
        config.model.precision,
    )
    if not shapes:
        return optimizer, step
    wrapped = isinstance(parallel_model, DistributedDataParallel)
    return optimizer, CapturedStep(
        step,
        shapes,
        forwards=parallel.grad_accum_steps,
        device=device,
        warm_up_calls=DDP_WARM_UP_CALLS if wrapped else WARM_UP_CALLS,
    )


def _check_capturable(attention: AttentionChoice, device: torch.device) -> None:
    """Raise ConfigError for attention that a graph cannot hold."""
    if device.type != "cuda":
        return
    if attention.name in READ_LENGTHS_ON_THE_HOST:
        problem = (
            f"{attention.name!r} reads lengths on the host, which a captured step cannot do "
            f"[{attention.note}]"
        )
        remedy = "use 'triton' or 'flash' (bf16), or run.step_mode 'eager'"
        raise ConfigError("model.attention", problem, remedy)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        problem = "'captured' with ranks that share a GPU, and so talk over gloo"
        raise ConfigError("run.step_mode", problem, "use 'eager', or a rank for each GPU")


def _plan_layout(model: nn.Module, config: RunConfig, num_shards: int) -> FlatLayout:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    dtype = weights_dtype(config.model.precision, next(iter(trained.values())).dtype)
    buckets = plan_in_reverse(
        {name: each.numel() for name, each in trained.items()},
        dtype.itemsize,
        config.parallel.bucket_cap_mb,
    )
    shapes = {name: tuple(each.shape) for name, each in trained.items()}
    return plan_layout(shapes, buckets, num_shards)


def _reduction(
    model: nn.Module,
    buffers: FlatBuffers,
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
) -> tuple[nn.Module, Clipping, Tensor, ShardGroup]:
    """The averaging of gradients, their buffer, and the group of the other shards.

    A run of one rank has no process group and averages nothing.
    """
    parallel = config.parallel
    wire = wire_dtype(buffers.weights.dtype, parallel.allreduce_dtype)
    group = ShardGroup(info, buffers.layout.num_shards, device)
    if dist.is_initialized() and parallel.data_parallel != "ddp":
        reducer = FlatReducer(model, buffers, config.clip, group, wire, info.world_size)
        return model, reducer, reducer.shard_gradients, group
    if dist.is_initialized():
        model = DistributedDataParallel(
            model,
            bucket_cap_mb=ddp_bucket_cap_mb(parallel.bucket_cap_mb),
            gradient_as_bucket_view=True,
        )
        # DDP's own statistics wait for the device every 100 steps, which a capture forbids.
        model._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
    clipping = make_clipping(config.clip, model, wire, bucket_cap_mb=parallel.bucket_cap_mb)
    return model, clipping, buffers.gradients, group


def _learning_rates(config: RunConfig, device: torch.device) -> Tensor:
    """Rates of every possible step from 1, warm-up included; element 0 is not read."""
    last = max(config.max_steps, config.run.warm_up_steps)
    rates = learning_rates(np.arange(last + 1), config.schedule, config.optim.learning_rate)
    rates[0] = 0.0
    return torch.from_numpy(rates).to(device)

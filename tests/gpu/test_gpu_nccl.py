"""A captured step's collectives through NCCL, in a group of one rank: DDP's hook and ours."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graph_cases import LARGE, SMALL, Run, to_smallest
from mlperf_bert.distributed.flat_reducer import ShardGroup
from mlperf_bert.step.captured import use_capturable_stream
from mlperf_bert.step.warm_up import warm_up

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: nothing can be captured here"
)
STEPS = range(1, 21)
TOLERANCE = 0.02  # bf16 weights, and sums of embedding gradients in no fixed order
ON_GPU = (
    *("run.device=cuda", "model.precision=bf16", "model.attention=triton", "clip.max_norm=0.5"),
    *("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
)


@pytest.fixture(scope="module", autouse=True)
def stream() -> None:
    use_capturable_stream(torch.device("cuda"))


@pytest.mark.parametrize(
    ("data_parallel", "policy", "wire"),
    [
        ("ddp", "after_allreduce", "as_gradients"),
        ("ddp", "bucket_before_allreduce", "as_gradients"),
        # The hook's future copies on a stream of its pool, which the capture has to follow.
        ("ddp", "after_allreduce", "fp32"),
        ("flat", "bucket_before_allreduce", "as_gradients"),
        ("shard_world", "after_allreduce", "fp32"),
    ],
)
def test_captured_is_eager_through_nccl(
    tiny_config: Path, tmp_path: Path, data_parallel: str, policy: str, wire: str
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    options = (
        *(f"parallel.data_parallel={data_parallel}", f"parallel.allreduce_dtype={wire}"),
        f"clip.policy={policy}",
    )
    losses = {}
    for name, shapes in (("eager", ()), ("captured", (SMALL, LARGE))):
        dist.init_process_group(
            "nccl", init_method=f"file://{tmp_path / name}", rank=0, world_size=1, device_id=device
        )
        try:
            run = Run(tiny_config, *ON_GPU, *options, shapes=shapes, device=device)
            reduce_alone(run)
            warm_up(run.config, run.step, run.model, run.optimizer, device)
            with run.step:
                losses[name] = run.losses(STEPS, to_smallest)
            del run
            gc.collect()  # parts of a run refer to each other, and hold the group
        finally:
            dist.destroy_process_group()
    assert losses["captured"] == pytest.approx(losses["eager"], abs=TOLERANCE)


def reduce_alone(run: Run) -> None:
    """Have our own reducer call NCCL on one rank too, where it would send to nobody."""
    group = run.optimizer.others
    if isinstance(group, ShardGroup):
        group._replicas = dist.group.WORLD
        if run.config.parallel.data_parallel == "shard_world":
            group._shards = dist.group.WORLD

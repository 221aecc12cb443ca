"""The captured step on a GPU: a graph's updates are those of the eager step, through NCCL too."""

import gc

import pytest
import torch
import torch.distributed as dist

from graph_cases import LARGE, SMALL, Run, batch_of, state_of, to_large, to_smallest
from mlperf_bert.distributed.flat_reducer import ShardGroup
from mlperf_bert.step.captured import use_capturable_stream, warm_up
from resume_cases import MODERN

STEPS = range(1, 101)
ON_GPU = (
    *("run.device=cuda", "model.precision=bf16", "model.attention=triton", "clip.max_norm=0.5"),
    *("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
)
# bf16 weights, and sums (of embedding gradients) whose order is not fixed on a GPU.
TOLERANCE = 0.02
# How many times as much is allowed: flash adds up gradients in any order, FP8's units see padding,
# and Muon's matrices carry a rounded bit to all their elements.
TIMES = {"model.attention=flash": 10, "model.precision=fp8": 10, "optim.name=muon": 2}


@pytest.fixture(scope="module", autouse=True)
def stream():
    use_capturable_stream(torch.device("cuda"))


def warm(config, *options, shapes=(SMALL, LARGE), change=lambda run: None):
    """A run whose graphs, if it has shapes, are captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    run = Run(config, *ON_GPU, *options, shapes=shapes, device=device)
    change(run)
    warm_up(run.config, run.step, run.model, run.optimizer, device)
    return run


def losses_of(run, steps=STEPS):
    with run.step:
        return run.losses(steps, to_smallest)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.attention=flash", "model.attention_dropout=0"),  # it draws its own
        ("optim.name=lamb",),
        ("optim.name=muon",),
        ("model.precision=fp8",),
        ("model.kernels=reference",),
        ("model.objective=mlm",),
        MODERN,
        (*MODERN, "model.precision=fp8", "optim.name=muon"),
    ],
    ids=lambda overrides: overrides[0] if overrides else "bf16",
)
def test_captured_is_eager_over_100_steps(tiny_config, overrides):
    eager = losses_of(warm(tiny_config, *overrides, shapes=()))
    captured = losses_of(warm(tiny_config, *overrides))
    tolerance = TOLERANCE * max(TIMES.get(each, 1) for each in ("", *overrides))
    assert eager[0] - min(eager) > 2 * tolerance
    assert captured == pytest.approx(eager, abs=tolerance)


def test_captured_updates_by_apex_are_ours(tiny_config):
    pytest.importorskip("amp_C", reason="apex with its CUDA extensions is not installed")
    ours, apex = (
        losses_of(warm(tiny_config, "optim.name=lamb", f"optim.implementation={name}"))
        for name in ("ours", "apex")
    )
    assert ours[0] - min(ours) > 2 * TOLERANCE
    assert apex == pytest.approx(ours, abs=TOLERANCE)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_init_phase_leaves_every_bit_of_state(tiny_config, precision):
    device = torch.device("cuda")
    options = (*ON_GPU, f"model.precision={precision}")
    run = Run(tiny_config, *options, shapes=(SMALL, LARGE), device=device)
    before = state_of(run)
    warm_up(run.config, run.step, run.model, run.optimizer, device)
    after = state_of(run)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_replay_makes_the_host_wait_for_nothing(tiny_config):
    run = warm(tiny_config, shapes=(LARGE,))
    batches = [to_large(batch_of(step)).to("cuda") for step in range(1, 4)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches, start=1):
            run.step(step, (batch,))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("data_parallel", "policy", "more"),
    [
        ("ddp", "after_allreduce", ()),
        ("flat", "bucket_before_allreduce", ()),
        (
            *("zero1", "after_allreduce"),
            ("model.precision=bf16_autocast", "parallel.allreduce_dtype=bf16"),
        ),
    ],
)
def test_captured_is_eager_through_nccl(tiny_config, tmp_path, data_parallel, policy, more):
    device = torch.device("cuda", torch.cuda.current_device())
    options = (f"parallel.data_parallel={data_parallel}", f"clip.policy={policy}", *more)
    losses = {}
    for name, shapes in (("eager", ()), ("captured", (SMALL, LARGE))):
        dist.init_process_group(
            "nccl", init_method=f"file://{tmp_path / name}", rank=0, world_size=1, device_id=device
        )
        try:
            run = warm(tiny_config, *options, shapes=shapes, change=reduce_alone)
            losses[name] = losses_of(run, STEPS[:20])
            del run
            gc.collect()  # parts of a run refer to each other, and hold the group
        finally:
            dist.destroy_process_group()
    assert losses["captured"] == pytest.approx(losses["eager"], abs=TOLERANCE)


def reduce_alone(run):
    """Have our own reducer call NCCL on one rank too, where it would send to nobody."""
    group = run.optimizer.others
    if isinstance(group, ShardGroup):
        group._replicas = dist.group.WORLD
        if run.config.parallel.data_parallel == "zero1":
            group._shards = dist.group.WORLD

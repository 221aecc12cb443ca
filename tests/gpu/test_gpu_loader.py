"""Loading onto a GPU: right contents whatever runs when, and a host that does not wait."""

import pytest
import torch

from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, pad
from mlperf_bert.data.capacity import plan_shapes, shape_of
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import DaliCopy, DirectSource, Loader, Staging
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.shards import SampleReader
from shard_sets import write_set

NUM_STEPS = 30
ON_THE_HOST = ("lengths", "masked_counts", "shape")
TENSORS = [name for name in UnpaddedBatch.__slots__ if name not in ON_THE_HOST]


@pytest.fixture
def parts(tmp_path):
    manifest = write_set(tmp_path / "set", [(90, "<u2"), (80, "<u2")], seed=1)
    index = LengthIndex.open(tmp_path / "set")
    planner = StepPlanner(
        UniformSampler(manifest.num_samples, 16, seed=1),
        index.lengths,
        index.masked_counts,
        world_size=1,
        grad_accum_steps=2,
    )
    return planner, SampleReader(tmp_path / "set", manifest)


def sums_of(batch):
    return torch.stack([getattr(batch, name).double().sum() for name in TENSORS])


@pytest.mark.parametrize("kind", ["thread", "dali", "padded", "padded dali"])
def test_batches_are_right_when_the_device_lags_behind(parts, kind):
    planner, reader = parts
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    source = DirectSource(reader, 0)
    shapes, copy = (), None
    if "dali" in kind:
        pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
        copy = DaliCopy(device)
    if "padded" in kind:
        manifest = reader.manifest
        limits = {"max_seqlen": manifest.max_seq_length, "max_masked": manifest.max_predictions}
        shapes = plan_shapes(planner, NUM_STEPS, **limits)
    sums = []
    with Loader(planner, source, device, staging=Staging(device, copy, shapes)) as loader:
        for step in loader:
            # Work queued long before it runs: a block given away too early would be overwritten.
            torch.cuda._sleep(5_000_000)
            for batch in step.micro_batches:
                assert batch.input_ids.device == device
                sums.append(sums_of(batch))
            del step, batch
            if len(sums) == 2 * NUM_STEPS:
                break
    direct, expected = DirectSource(reader, 0), []
    for plan in map(planner.plan, range(1, NUM_STEPS + 1)):
        shape = shape_of(plan, shapes) if shapes else None
        assert (shape is None) == ("padded" not in kind)
        for batch in direct.micro_batches(plan):
            expected.append(sums_of(batch if shape is None else pad(batch, shape)))
    assert torch.stack(sums).tolist() == torch.stack(expected).tolist()

"""The bucket plan against DistributedDataParallel's own buckets after its rebuild, on two ranks."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bert_tools.plan.buckets import backward_order, ddp_bucket
from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.bucket_plan import ddp_bucket_cap_mb, plan_buckets
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import loss_sums, pretraining_loss
from mlperf_bert.step.warm_up import synthetic_batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = (("fp32", 0.1), ("bf16", 0.1), ("fp32", 0.05), ("fp32", 25.0))


def buckets_of_a_step(config: RunConfig, dtype: str, cap_mb: float) -> list[dict[str, Any]]:
    """DDP's own buckets, in the order in which its hook got them."""
    model = BertForPretraining(config.model, torch.device("cpu")).to(DTYPES[dtype])
    names = {parameter: name for name, parameter in model.named_parameters()}
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=ddp_bucket_cap_mb(cap_mb), gradient_as_bucket_view=True
    )
    seen: list[dict[str, Any]] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        start = buffer.storage_offset()
        seen.append(
            {
                "names": [names[parameter] for parameter in bucket.parameters()],
                "offsets": [each.storage_offset() - start for each in bucket.gradients()],
                "numel": buffer.numel(),
                "num_bytes": buffer.numel() * buffer.element_size(),
            }
        )
        sent = dist.all_reduce(buffer, async_op=True).get_future()
        return sent.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    batch = synthetic_batch(config)
    for _ in range(3):
        seen.clear()
        pretraining_loss(loss_sums(ddp(batch), batch), batch).backward()
    return seen


# Large enough for a second bucket after a first one of 1 MiB.
SIZES = ("model.hidden_size=128", "model.intermediate_size=512")


@pytest.fixture(scope="module")
def config_path(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buckets") / "wider.toml"
    path.write_text(config_to_toml(load_config(tiny_config, SIZES)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def seen(config_path: Path) -> list[list[dict[str, Any]]]:
    """DDP's buckets of every case; the two ranks are started once for all of them."""
    buckets: list[list[dict[str, Any]]]
    buckets, other = what_ranks_saw(__file__, (config_path,), 2, config_path.parent)
    assert buckets == other
    return buckets


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number]))
)
def test_plan_is_what_ddp_does(
    config_path: Path, seen: list[list[dict[str, Any]]], case: int
) -> None:
    dtype, cap_mb = CASES[case]
    config = load_config(config_path)
    gradients = backward_order(config.model, "separate", num_tokens=32, num_masked=5)
    planned = []
    element_bytes = DTYPES[dtype].itemsize
    for bucket in plan_buckets(gradients, element_bytes, cap_mb):
        fields = asdict(ddp_bucket(bucket, element_bytes))
        del fields["earliest_start"]
        planned.append(fields | {key: list(fields[key]) for key in ("names", "offsets")})
    assert seen[case] == planned
    assert len(planned) > 1


def all_cases(config_path: Path) -> list[list[dict[str, Any]]]:
    """The buckets that DDP's hook was given in the third step, of every case."""
    config = load_config(config_path)
    return [buckets_of_a_step(config, *case) for case in CASES]


if __name__ == "__main__":
    as_rank(lambda info: all_cases(Path(sys.argv[1])), Path(sys.argv[2]))

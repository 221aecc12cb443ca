"""What test_ddp_buckets.py runs on two ranks: `buckets_job.py CONFIG OUTPUT`.

Rank 0 writes to OUTPUT, for every case, the buckets that DDP's hook was given in the third step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.bucket_plan import ddp_bucket_cap_mb
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
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


def main(config_path: Path, output: Path) -> int:
    """Every case, one after the other, in one process group."""

    def run(info: RankInfo, device: torch.device) -> int:
        config = load_config(config_path)
        seen = [buckets_of_a_step(config, *case) for case in CASES]
        if info.rank == 0:
            output.write_text(json.dumps(seen))
        return 0

    return in_session(run, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

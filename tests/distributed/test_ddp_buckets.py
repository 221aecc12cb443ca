"""The bucket plan against DistributedDataParallel's own buckets after its rebuild, on two ranks."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from buckets_job import CASES, DTYPES

from bert_tools.plan.buckets import backward_order
from forked_ranks import free_port
from mlperf_bert.config.files import config_to_toml, load_config
from mlperf_bert.distributed.bucket_plan import plan_buckets
from support import run_process

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
    output = config_path.with_name("seen.json")
    done = run_process(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2),
        *("--master-addr", "127.0.0.1", "--master-port", free_port()),
        *(Path(__file__).with_name("buckets_job.py"), config_path, output),
    )
    assert done.returncode == 0, done.stderr
    buckets: list[list[dict[str, Any]]] = json.loads(output.read_text())
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
    for bucket in plan_buckets(gradients, DTYPES[dtype].itemsize, cap_mb):
        fields = asdict(bucket)
        del fields["earliest_start"]
        planned.append(fields | {key: list(fields[key]) for key in ("names", "offsets")})
    assert seen[case] == planned
    assert len(planned) > 1

"""Planning over a large index takes little private memory: the index stays in mapped files."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.data.index import IndexFile, ShardEntry
from shard_sets import manifest_of
from support import run_process

MAX_LENGTH = 512
ALLOWED_BYTES = 64 * 2**20

# Prints how far private memory rises, at rest and at its largest, in bytes.
PLAN = """
import itertools, json, resource, sys
from pathlib import Path
from mlperf_bert.data.balance import Balance, CostModel, StepPlanner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.sampler import make_sampler

def private_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))

before = private_bytes("RssAnon")
# Address space for private data: what a step takes and gives back again is limited as well.
limit = private_bytes("VmData") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
index = LengthIndex.open(Path(sys.argv[1]))
names = ("uniform", "quantile", "strata", "strata_6_3_2_5")
for (counts, size), name in itertools.product((("equal", 16), ("unequal", 4)), names):
    planner = StepPlanner(
        make_sampler(
            name,
            order_by_length=index.order_by_length,
            length_histogram=index.manifest.length_histogram,
            global_batch_size=1024 * size,
            seed=1,
        ),
        index.lengths,
        index.masked_counts,
        world_size=1024,
        balance=Balance(policy="presort_global", counts=counts),
    )
    for step in range(1, 6):
        planner.plan(step)
print(json.dumps(private_bytes("RssAnon") - before))
"""


def write_large_index(set_dir: Path, num_samples: int) -> None:
    """An index whose lengths run 1 .. 512 over and over, so that its order can be written down."""
    repeats, rest = divmod(num_samples, MAX_LENGTH)
    assert not rest
    (set_dir / "index").mkdir(parents=True)
    lengths = np.arange(1, MAX_LENGTH + 1)
    block = 1000
    masked = np.clip(lengths // 7, 1, 76)
    for name, dtype, values in (
        ("lengths.u16", "<u2", lengths),
        ("masked_counts.u8", "u1", masked),
    ):
        with (set_dir / "index" / name).open("wb") as file:
            for start in range(0, repeats, block):
                file.write(np.tile(values.astype(dtype), min(block, repeats - start)).tobytes())
    with (set_dir / "index/order_by_length.u32").open("wb") as file:
        for length in range(1, MAX_LENGTH + 1):
            file.write(np.arange(length - 1, num_samples, MAX_LENGTH, dtype="<u4").tobytes())
    manifest = manifest_of(
        (ShardEntry("none.hdf5", num_samples, "0" * 64, "0" * 64),),
        vocab_size=30522,
        max_seq_length=MAX_LENGTH,
        max_predictions=76,
        length_histogram=(0, *[repeats] * MAX_LENGTH),
        index_files=tuple(
            IndexFile(path.name, path.stat().st_size, "0" * 64)
            for path in sorted((set_dir / "index").iterdir())
        ),
    )
    (set_dir / "index/dataset.json").write_bytes(manifest.to_json())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("blocks", [31_250, pytest.param(312_500, marks=pytest.mark.slow)])
def test_planning_takes_at_most_64_mib(tmp_path: Path, blocks: int) -> None:
    num_samples = blocks * MAX_LENGTH  # 16 and 160 million
    needed = 8 * num_samples
    if shutil.disk_usage(tmp_path).free < needed:
        pytest.skip(f"needs {needed:,} bytes of disk")
    write_large_index(tmp_path / "set", num_samples)
    try:
        done = run_process(sys.executable, "-c", PLAN, tmp_path / "set", ALLOWED_BYTES)
    finally:
        shutil.rmtree(tmp_path / "set")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) <= ALLOWED_BYTES

"""Step plans: nothing lost, exact denominators, imbalance by definition, little private memory."""

import json
import shutil
import sys
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, SamplerName
from mlperf_bert.data.balance import Balance
from mlperf_bert.data.index import IndexFile, ShardEntry
from plan_cases import planner_of
from shard_sets import manifest_of
from support import run_process

LENGTHS = np.random.default_rng(1).integers(5, 512, 1000).astype(np.uint16)
MASKED = np.maximum(1, LENGTHS // 7).astype(np.uint8)
SHAPES = st.sampled_from([(1, 1), (4, 1), (2, 3), (8, 2), (1, 48), (24, 1)])


def planner(world_size, accumulation, sampler="uniform", **options):
    return planner_of(
        LENGTHS,
        48,
        sampler,
        masked_counts=MASKED,
        world_size=world_size,
        grad_accum_steps=accumulation,
        **options,
    )


@given(
    shape=SHAPES,
    step=st.integers(1, 60),
    sampler=st.sampled_from(get_args(SamplerName)),
    policy=st.sampled_from(get_args(BalancePolicy)),
    counts=st.sampled_from(get_args(CountsPerRank)),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_is_the_global_batch_cut_into_forwards(policy, counts, shape, step, sampler):
    per_node = 2 if shape[0] % 2 == 0 else 1
    balance = Balance(policy=policy, ranks_per_node=per_node, counts=counts)
    made, same = (planner(*shape, sampler, balance=balance) for _ in "ab")
    made.plan(step + 7)  # any step is planned directly
    plan, direct = made.plan(step), same.plan(step)
    assert np.array_equal(direct.sample_ids, plan.sample_ids)
    assert np.array_equal(direct.counts, plan.counts)
    batch = made.sampler.global_batch(step)
    assert np.array_equal(plan.drawn_ids.ravel(), batch)
    assert np.array_equal(np.sort(plan.sample_ids), np.sort(batch))
    forwards = {slot: plan.ids_of(*slot) for slot in np.ndindex(plan.counts.shape)}
    assert np.array_equal(np.concatenate(list(forwards.values())), plan.sample_ids)
    for slot, ids in forwards.items():
        assert len(ids) == plan.counts[slot] >= 1
        assert LENGTHS[ids].sum() == plan.num_tokens[slot]
        assert MASKED[ids].sum() == plan.num_masked[slot]
    per_rank = plan.num_tokens.sum(axis=1)
    assert plan.imbalance_tokens == pytest.approx(per_rank.max() / per_rank.mean())
    # Summed over forwards and averaged over ranks, any losses over denominators are their mean.
    losses = np.random.default_rng(step).random(plan.counts.shape)
    for denominators, total in (
        (plan.mlm_denominators, MASKED[batch].sum()),
        (plan.nsp_denominators, len(batch)),
    ):
        mean = (losses / denominators).sum(axis=1).mean()
        assert mean == pytest.approx(losses.sum() / total)


def test_per_rank_denominators_are_the_forwards_own():
    plan = planner(4, 3, loss_normalization="per_rank").plan(1)
    own = MASKED[plan.drawn_ids].sum(axis=2, dtype=float)
    assert np.array_equal(plan.mlm_denominators, own * 3)
    assert np.array_equal(plan.nsp_denominators, np.full((4, 3), 4.0 * 3))


MAX_LENGTH = 512
ALLOWED_BYTES = 64 * 2**20
# Prints how far private memory rises, at rest and at its largest, in bytes.
PLAN = """
import itertools, json, resource, sys
from pathlib import Path
from mlperf_bert.data.balance import Balance, StepPlanner
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
names = ("uniform", "quantile", "strata_6_3_2_5")
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


def write_large_index(set_dir, num_samples):
    """An index whose lengths run 1 .. 512 over and over, so that its order can be written down."""
    repeats = num_samples // MAX_LENGTH
    (set_dir / "index").mkdir(parents=True)
    lengths = np.arange(1, MAX_LENGTH + 1, dtype="<u2")
    masked = np.clip(lengths // 7, 1, 76).astype("u1")
    for name, values in (("lengths.u16", lengths), ("masked_counts.u8", masked)):
        with (set_dir / "index" / name).open("wb") as file:
            file.writelines(values.tobytes() for _ in range(repeats))
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


@pytest.mark.parametrize("blocks", [31_250, pytest.param(312_500, marks=pytest.mark.longest)])
def test_planning_takes_at_most_64_mib(tmp_path, blocks):
    num_samples = blocks * MAX_LENGTH  # 16 and 160 million, of five bytes on the disk
    write_large_index(tmp_path / "set", num_samples)
    try:
        done = run_process(sys.executable, "-c", PLAN, tmp_path / "set", ALLOWED_BYTES)
    finally:
        shutil.rmtree(tmp_path / "set")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) <= ALLOWED_BYTES

"""What `plan` prints and its --json, held whole; `--snapshot-update` writes both anew."""

from pathlib import Path

import pytest

FILTERS = "--filter submitter~NVIDIA --filter division=closed"
SMALL = "--set mlperf.enforce_rules=false --set parallel.nodes=2 --set parallel.ranks_per_node=4"
OF_CLUSTER = "cluster --config dgxa100_16x8x24x1 --set mlperf.enforce_rules=false"
QUESTIONS = {
    "law of A100 in round 2.1": f"law {FILTERS} --filter accelerator~A100 --filter round=2.1",
    "law of A100 in round 2.0": f"law {FILTERS} --filter accelerator~A100 --filter round=2.0",
    "law of A100 in round 0.7": f"law {FILTERS} --filter accelerator~A100 --filter round=0.7",
    "law of H100": f"law {FILTERS} --filter accelerator~H100 --filter 'round>=3.0'",
    "cluster of 1 node": "cluster --config dgxa100_1x8x56x1",
    "cluster of 128 nodes": "cluster --config dgxa100_128x8x4x1",
    "cluster of H100 that accumulates": "cluster --config h100_1x1x112x4",
    "cluster of an open config": "cluster --config open_adamw_dgxa100_128x8x4x1 --accelerator h100",
    "cluster of a batch with a recipe": "cluster --config open_adamw_dgxa100_128x8x16x1",
    "cluster that stops early": "cluster --config open_adamw_h200_1x1x448x1 "
    "--set run.max_steps=100",
    "cluster, eager and clipped by buckets": f"{OF_CLUSTER} --set run.step_mode=eager "
    "--set clip.policy=bucket_before_allreduce --set data.balance=exchange_local",
    "cluster, clipped whole before a slow network": f"{OF_CLUSTER} --node-bandwidth 5 "
    "--set clip.policy=whole_before_allreduce --set data.balance=exchange_global",
    "cluster, sharded by node and eager": f"{OF_CLUSTER} --set parallel.data_parallel=zero1_node "
    "--set run.step_mode=eager --set data.balance=none",
    "cluster, fp32 in small buckets": f"{OF_CLUSTER} --set model.precision=fp32 "
    "--set run.step_mode=eager --set parallel.bucket_cap_mb=5",
    "buckets of bf16": "buckets --config dgxa100_16x8x24x1",
    "buckets of fp32": "buckets --config dgxa100_16x8x24x1 --set model.precision=fp32 "
    "--set run.step_mode=eager",
    "balance of equal counts": f"balance --config dgxa100_1x8x56x1 --draws 3 {SMALL} "
    "--set parallel.local_batch_size=6",
    "balance of unequal counts": "balance --config dgxa100_128x8x4x1 --draws 3 "
    "--set parallel.nodes=1 --set data.counts_per_rank=equal",
    "balance clipped by rank": "balance --config dgxa100_128x8x4x1 --draws 3 "
    "--set parallel.nodes=1 --set clip.policy=whole_before_allreduce "
    "--set data.counts_per_rank=equal",
    "balance without strata": f"balance --config dgxa100_1x8x56x1 --draws 3 {SMALL} "
    "--set parallel.local_batch_size=5",
}
# Nodes and GPUs of each: published sets, between two of them, beyond the last, and accumulation.
SIZES = ("1 8", "8 8", "128 8", "512 8", "3 4", "5 8", "2000 5", "1 1", "1 2", "1 4")


def shown(facts):
    """Facts with numbers of four digits, which are the same on every machine."""
    if isinstance(facts, dict):
        return {key: shown(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [shown(value) for value in facts]
    return float(f"{round(facts, 9):.4g}") + 0.0 if isinstance(facts, float) else facts


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer(name, asked, told, snapshot):
    words = QUESTIONS[name]
    assert told(words) == snapshot(name="printed")
    if "buckets" not in name:  # whose table has it all
        assert shown(asked(words)) == snapshot(name="json")
    assert not list(Path().iterdir())


@pytest.mark.parametrize("size", SIZES)
def test_a_suggestion_and_its_file(size, asked, told, snapshot):
    nodes, gpus = size.split()
    words = f"suggest --nodes {nodes} --gpus-per-node {gpus}"
    assert told(words, "--out own.toml") == snapshot(name="printed")
    assert Path("own.toml").read_text() == snapshot(name="file")
    assert shown(asked(words)) == snapshot(name="json")

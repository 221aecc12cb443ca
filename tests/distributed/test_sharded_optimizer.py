"""The sharded optimizer and the flat reducer on two and four ranks, beside DDP; its checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shard_job import (
    BUCKET_STEPS,
    CPU,
    DTYPES,
    LAST,
    POLICIES,
    RULES,
    SAVED,
    SAVED_AT,
    SPOILT_BY,
    SPOILT_STEPS,
    VOCABULARY,
    accumulations,
    load_and_go_on,
    modes,
    trained_cases,
)
from small_runs import MICRO_BATCHES, start
from torch import Tensor

from forked_ranks import run_ranks
from mlperf_bert.checkpoint import load
from mlperf_bert.checkpoint.load import load_checkpoint
from mlperf_bert.checkpoint.manifest import read_state
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.distributed.launch import RankInfo

# Absolute, of weights: sums of four ranks in another order, 50 steps with an epsilon of 1e-6.
TOLERANCES = {"float64": 1e-10, "fp32": 2e-6}
RANKS = (4, 2)  # the second goes on where the first has saved
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def output(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs wrote; each number of ranks is started once for all tests."""
    output = tmp_path_factory.mktemp("shard")
    script = Path(__file__).with_name("shard_job.py")
    for number in RANKS:  # four ranks are two nodes
        statuses, printed = run_ranks(script, (tiny_config, output), number, 2)
        assert statuses == [0] * number, printed
    return output


def read(output: Path, ranks: int) -> Seen:
    paths = sorted((output / f"ranks_{ranks}").glob("rank_*.pt"))
    assert len(paths) == ranks
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.fixture(scope="module")
def both(output: Path) -> dict[int, Seen]:
    return {ranks: read(output, ranks) for ranks in RANKS}


@pytest.fixture(params=RANKS)
def seen(request: pytest.FixtureRequest, both: dict[int, Seen]) -> Seen:
    return both[request.param]


def modes_of(seen: Seen) -> tuple[str, ...]:
    return modes(RankInfo(0, len(seen), 0, 2, 0, "torchrun"))


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_sharded_training_is_ddps(seen: Seen, rule: str, dtype: str) -> None:
    expected = seen[0][f"ddp {rule} {dtype}"]
    assert 0 < expected["clipped"].mean() < 1  # after_allreduce: some steps are clipped
    assert expected["losses"][-10:].mean() < 0.9 * expected["losses"][:10].mean()
    for mode in (each for each in modes_of(seen) if (rule, dtype) in trained_cases(each)):
        for rank in seen:
            found = rank[f"{mode} {rule} {dtype}"]
            assert next(iter(found["weights"].values())).dtype == DTYPES[dtype]
            assert largest_difference(found["weights"], expected["weights"]) <= TOLERANCES[dtype]
            torch.testing.assert_close(found["clipped"], expected["clipped"])
            assert_equal(found["model"], seen[0][f"{mode} {rule} {dtype}"]["model"])


@pytest.mark.parametrize("rule", RULES)
def test_two_ranks_train_as_four_do(both: dict[int, Seen], rule: str) -> None:
    four, two = (both[ranks][0][f"shard_world {rule} float64"] for ranks in RANKS)
    torch.testing.assert_close(two["losses"], four["losses"], rtol=0, atol=1e-10)
    assert largest_difference(two["weights"], four["weights"]) <= TOLERANCES["float64"]


@pytest.mark.parametrize("case", ["buckets", "forwards"])
def test_shards_clip_the_buckets_that_a_flat_optimizer_clips(seen: Seen, case: str) -> None:
    for rank in seen:
        expected = rank[f"flat {case}"]
        assert 0 < expected["clipped"].mean() < 1
        assert len(expected["losses"]) == BUCKET_STEPS
        for mode in modes_of(seen)[1:]:
            found = rank[f"{mode} {case}"]
            assert torch.equal(found["clipped"], expected["clipped"])
            assert largest_difference(found["weights"], expected["weights"]) <= 1e-10


def test_optimizer_state_shrinks_with_the_ranks(seen: Seen) -> None:
    whole = seen[0]["flat state"]
    shards = {"ddp": 1, "flat": 1, "shard_world": len(seen), "shard_node": 2}
    for mode in ("ddp", *modes_of(seen)):
        # Masters and two moments; a bucket is filled up to a block for each shard.
        padding = 3 * seen[0][f"{mode} parts"] * (shards[mode] - 1) * BLOCK
        for rank in seen:
            assert whole <= shards[mode] * rank[f"{mode} state"] <= whole + padding


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_skip_the_step_in_which_one_is_spoilt(seen: Seen, policy: str) -> None:
    skipped = [float(step in SPOILT_BY) for step in range(1, SPOILT_STEPS + 1)]
    for mode in modes_of(seen):
        for accumulation in accumulations(policy):
            case = f"{mode} {policy} {accumulation} spoilt"
            for rank in seen:
                assert rank[case]["skipped"].tolist() == skipped
                assert rank[case]["updates"] == SPOILT_STEPS - len(SPOILT_BY)
                assert_equal(rank[case]["model"], seen[0][case]["model"])
                assert all(bool(each.isfinite().all()) for each in rank[case]["model"].values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_skipped_first_step_leaves_the_initial_weights(seen: Seen, precision: str) -> None:
    for mode in modes_of(seen):
        for rank in seen:
            found = rank[f"{mode} {precision} skip"]
            assert found["updates"] == 0 and found["skip"] == 1
            assert_equal(found["warmed up"], found["at first"])
            assert_equal(found["skipped"], found["at first"])


@pytest.mark.parametrize("policy", POLICIES)
def test_buckets_are_sent_while_backward_runs(seen: Seen, policy: str) -> None:
    for mode in modes_of(seen):
        for rank in seen:
            events = rank[f"{mode} {policy} events"]
            sent = [place for place, event in enumerate(events) if event == "sent"]
            last_ready = len(events) - 1 - events[::-1].index("ready")
            early = [place for place in sent if place < last_ready]
            assert len(sent) > 2
            # The last bucket's last gradient is backward's last.
            assert len(early) == (0 if policy == "whole_before_allreduce" else len(sent) - 1)
            forwards = MICRO_BATCHES // len(seen)  # gradients of those before the last are not sent
            assert (
                events[: sent[0]].count("ready")
                > (forwards - 1) * events.count("ready") // forwards
            )


def test_a_forward_waits_for_new_weights_as_it_comes_to_them(seen: Seen) -> None:
    for mode in modes_of(seen):
        for rank in seen:
            events = rank[f"{mode} waits"]
            numbers = [event for event in events if event != "embeddings"]
            if mode == "flat":
                assert numbers == []
                continue
            assert numbers == list(range(rank[f"{mode} parts"] - 1, -1, -1))
            assert events.index("embeddings") < events.index(0)  # the heads' come last


@pytest.mark.parametrize("rule", RULES)
def test_state_of_four_ranks_continues_on_others(
    both: dict[int, Seen], output: Path, tiny_config: Path, rule: str
) -> None:
    expected = both[4][0][f"shard_world {rule} saved"]
    alone = start(tiny_config, ONE_RANK, SAVED[rule][0], SAVED[rule][1], seed=9)
    continued = [load_and_go_on(alone, output / rule)]
    continued += [rank[f"{mode} {rule} loaded"] for rank in both[2] for mode in modes_of(both[2])]
    for found in continued:
        assert_equal(found["saved"], expected["saved"])
        assert found["updates"] == SAVED_AT
        assert len(found["losses"]) == LAST - SAVED_AT
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=1e-10)
        assert largest_difference(found["weights"], expected["weights"]) <= 1e-10


def test_a_checkpoint_of_16_bit_weights_has_exact_masters(
    both: dict[int, Seen], output: Path, tiny_config: Path
) -> None:
    expected = both[4][0]["shard_world bf16 saved"]["saved"]
    assert any(not torch.equal(each, each.bfloat16().float()) for each in expected.values())
    alone = start(tiny_config, ONE_RANK, SAVED["bf16"][0], seed=9)
    continued = [load_and_go_on(alone, output / "bf16")]
    continued += [rank[f"{mode} bf16 loaded"] for rank in both[2] for mode in modes_of(both[2])]
    for found in continued:
        assert_equal(found["saved"], expected)
        assert_equal(found["model"], {name: each.bfloat16() for name, each in expected.items()})
        assert bool(found["losses"].isfinite().all())


def test_every_rank_goes_on_from_its_own_random_stream(
    both: dict[int, Seen], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "on_every_rank", lambda info, restore: restore())
    streams = [rank["shard_world lamb saved"]["stream"] for rank in both[4]]
    (step,) = (output / "lamb").glob("step_*")
    state = replace(read_state(step), world_size=len(streams))
    without_fp8: Any = SimpleNamespace(fp8_state=dict)
    for number, stream in enumerate(streams):
        assert sum(torch.equal(stream, other) for other in streams) == 1
        torch.manual_seed(99)
        info = RankInfo(number, 4, number, 4, 0, "torchrun")
        load.restore_rank_states(step, state, without_fp8, info, CPU)
        assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize("damage", ["flip", "remove", "unlist", "mix"])
def test_damaged_optimizer_state_is_named(
    both: dict[int, Seen], output: Path, tiny_config: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(output / "lamb", tmp_path / "lamb")
    (step,) = (tmp_path / "lamb").glob("step_*")
    victim = step / "optimizer" / "rank_00002.safetensors"
    manifest = json.loads((step / "manifest.json").read_text())
    if damage == "flip":
        contents = bytearray(victim.read_bytes())
        contents[-1] ^= 1
        victim.write_bytes(contents)
    elif damage == "remove":
        victim.unlink()
    elif damage == "unlist":
        del manifest["files"]["optimizer/rank_00002.safetensors"]
    else:  # the same shard twice
        of_others = manifest["files"]["optimizer/rank_00001.safetensors"]
        manifest["files"]["optimizer/rank_00002.safetensors"] = of_others
        shutil.copy(victim.with_name("rank_00001.safetensors"), victim)
    (step / "manifest.json").write_text(json.dumps(manifest))
    run = start(tiny_config, ONE_RANK, SAVED["lamb"][0], SAVED["lamb"][1])
    with pytest.raises(CheckpointError, match="optimizer") as caught:
        load_checkpoint(run.optimizer, tmp_path / "lamb", VOCABULARY, ONE_RANK)
    assert "\n" not in str(caught.value)

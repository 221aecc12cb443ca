"""The sharded optimizer and the flat reducer on two and four ranks, beside DDP; its checkpoints.

Four ranks are two nodes; test_exchange.py trains so in every run of the tests.
"""

import copy
import json
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.checkpoint import load
from mlperf_bert.checkpoint.load import load_checkpoint
from mlperf_bert.checkpoint.manifest import CheckpointState, read_state
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.distributed.flat_reducer import ShardGroup
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import CheckpointError
from mlperf_bert.step.captured import warm_up
from small_runs import CPU, MICRO_BATCHES, micro_batch, start

STEPS = 30
MODERN = ("model.architecture=modern", "model.objective=mlm", "model.attention_window=4")
RULES = {  # and rates that learn something in STEPS
    "adamw": ("optim.name=adamw", "optim.learning_rate=3e-3"),
    "lamb": ("optim.name=lamb", "optim.learning_rate=1e-2"),
    "muon of ModernBERT": ("optim.name=muon", "optim.learning_rate=3e-3", *MODERN),
    "muon": ("optim.name=muon", "optim.learning_rate=3e-3"),
}
ON_TWO_RANKS = ("adamw", "lamb", "muon of ModernBERT")
DTYPES = {"float64": torch.float64, "fp32": torch.float32}
POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")
BUCKETS = "clip.policy=bucket_before_allreduce"
BUCKET_STEPS = 10  # those of runs that clip bucket by bucket
SAVED_AT, LAST = 4, 8
VOCABULARY = "ab"
SPOILT_BY = {2: float("nan"), 3: float("inf"), 5: 1e30}  # by step; the last: its square overflows
SPOILT_STEPS = max(SPOILT_BY) + 1


def modes(info):
    """The modes that differ on this number of ranks and nodes."""
    by_node = ("zero1_node",) if info.local_world_size < info.world_size else ()
    return ("flat", "zero1", *by_node)


def trained_cases(mode, world_size):
    """Rule and dtype of its long runs: `flat` shares its parts with the others, and has one."""
    if mode == "flat":
        return [("adamw", "float64")]
    some = [*product(ON_TWO_RANKS, ["float64"]), ("lamb", "fp32")]
    return list(product(RULES, DTYPES)) if world_size > 2 else some


def spoilt_cases(world_size):
    """Policy and micro-batches of an update."""
    some = [("none", 2), ("after_allreduce", 1), ("whole_before_allreduce", 1), (POLICIES[-1], 2)]
    return list(product(POLICIES, (1, 2))) if world_size > 2 else some


def trained(run, last):
    """The result of steps 1 to `last`."""
    found = run.steps(1, last)
    return {
        **found,
        "weights": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
    }


def state_elements(optimizer):
    """The number of elements of this rank's state beside the model's own weights."""
    owned = (optimizer.shard.masters, *optimizer.flat_state().values())
    return sum(tensor.numel() for tensor in owned)


def spoilt(config, info, overrides):
    """A run in which the last rank's gradient is bad: one tensor's, in a step's first micro-batch.

    The tensor is of the bucket with the most padding, so that a shard of four has padding alone.
    """
    run = start(config, info, overrides)
    buckets = run.optimizer._buffers.layout.buckets
    bucket = max(buckets, key=lambda each: each.stop - each.tensors[-1].stop)
    calls = 0

    def hook(gradient):
        nonlocal calls
        step, forward = divmod(calls, run.config.parallel.grad_accum_steps)
        calls += 1
        bad = SPOILT_BY.get(step + 1) if forward == 0 else None
        return gradient if bad is None else torch.full_like(gradient, bad)

    if info.rank == info.world_size - 1:
        run.model.get_parameter(bucket.tensors[0].name).register_hook(hook)
    return trained(run, SPOILT_STEPS)


def warmed_up_and_skipped(config, info, overrides):
    """Weights at the start, after the warm-up, and after a skipped step."""
    run = start(config, info, overrides)
    found = {"at first": copy.deepcopy(run.model.state_dict())}
    warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    found["warmed up"] = copy.deepcopy(run.model.state_dict())
    found["updates"] = run.optimizer.scalar_state()["updates"].clone()
    bias = run.model.get_parameter("bert.pooler.dense.bias")
    bias.register_hook(lambda gradient: gradient * torch.nan)
    found["skip"] = run.steps(1, 1)["skipped"]
    run.optimizer.wait_for_weights()
    found["skipped"] = copy.deepcopy(run.model.state_dict())
    return found


def order_of_events(run):
    """In one update: "ready" for each gradient that becomes whole, "sent" for each bucket."""
    events = []
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: events.append("ready"))
    reduce = ShardGroup.reduce

    def recording(group, whole, piece):
        events.append("sent")
        reduce(group, whole, piece)

    ShardGroup.reduce = recording
    try:
        run.steps(1, 1)
    finally:
        ShardGroup.reduce = reduce
    return events


def save(run, directory):
    """Train to SAVED_AT, save there, and go on."""
    run.steps(1, SAVED_AT)
    state = CheckpointState(
        step=SAVED_AT, samples=0, seed=1, mlm_accuracy=None, vocabulary_sha256=VOCABULARY
    )
    if run.info.rank == 0:
        directory.mkdir()
    dist.barrier()
    torch.manual_seed(run.info.rank)
    writer = CheckpointWriter(directory, run.optimizer, run.config, run.info, CPU)
    writer.begin(state)
    writer.finish()
    return go_on(run) | {"stream": torch.get_rng_state()}


def load_and_go_on(run, directory):
    """With a checkpoint in place of the run's own beginning."""
    state = load_checkpoint(run.optimizer, directory, VOCABULARY, run.info)
    assert state.step == SAVED_AT
    return go_on(run)


def go_on(run):
    """From SAVED_AT to LAST, and what there was at first."""
    return {
        "saved": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
        "losses": run.steps(SAVED_AT + 1, LAST)["losses"],
        "weights": run.optimizer.exact_weights(),
    }


def sums(config, info, parallel):
    """What `summed` finds in bf16, for each policy."""
    options = (parallel, "model.precision=bf16")
    return [summed(config, info, (*options, f"clip.policy={policy}")) for policy in POLICIES]


def summed(config, info, overrides):
    """The norm of the gradients of 16 equal micro-batches, over that of one."""
    run = start(config, info, (*overrides, "parallel.grad_accum_steps=16"))
    batch = micro_batch(1, info.rank, 1)
    norms = []
    for count in (1, 16):
        run.optimizer.zero_grad()
        for number in range(1, count + 1):
            run.step._backward(batch, is_last=number == count)
        norms.append(run.step._clip.finish().grad_norm)
    return float(norms[1] / norms[0])


SAVED = {  # by directory: rule, config options, dtype
    **{rule: (options, torch.float64) for rule, options in RULES.items()},
    "bf16": (("model.precision=bf16",), torch.float32),
}
AGAIN = ("lamb", "bf16")  # go on from there on as many ranks


def all_cases(config, loaded, saved, info):
    """Everything that test_sharded_optimizer.py looks at."""
    seen = {}
    for mode in ("ddp", *modes(info)):
        parallel = f"parallel.data_parallel={mode}"
        for rule, name in trained_cases(mode, info.world_size):
            run = start(config, info, (parallel, *RULES[rule]), DTYPES[name])
            seen[f"{mode} {rule} {name}"] = trained(run, STEPS)
        seen[f"{mode} state"] = state_elements(run.optimizer)
        seen[f"{mode} parts"] = len(run.optimizer.parts)
        for policy, micro_batches in spoilt_cases(info.world_size):
            more = (f"clip.policy={policy}", f"parallel.grad_accum_steps={micro_batches}")
            options = (parallel, *RULES["muon"], *more)  # its vectors have AdamW
            seen[f"{mode} {policy} {micro_batches} spoilt"] = spoilt(config, info, options)
        seen[f"{mode} sums"] = sums(config, info, parallel)
    for mode in modes(info):
        parallel = f"parallel.data_parallel={mode}"
        run = start(config, info, (parallel, BUCKETS, *RULES["muon"]), torch.float64)
        seen[f"{mode} buckets"] = trained(run, BUCKET_STEPS)
        options = (parallel, "model.precision=bf16")
        seen[f"{mode} skip"] = warmed_up_and_skipped(config, info, options)
        for policy in POLICIES:
            options = (parallel, f"clip.policy={policy}")
            seen[f"{mode} {policy} events"] = order_of_events(start(config, info, options))
        for name, (options, dtype) in SAVED.items():
            if loaded.exists():
                run = start(config, info, (parallel, *options), dtype, seed=2)
                seen[f"{mode} {name} loaded"] = load_and_go_on(run, loaded / name)
            if mode == "zero1":
                run = start(config, info, (parallel, *options), dtype)
                seen[f"{name} saved"] = save(run, saved / name)
                if name in AGAIN:
                    run = start(config, info, (parallel, *options), dtype, seed=2)
                    seen[f"{name} again"] = load_and_go_on(run, saved / name)
    return seen


# Absolute, of weights: sums of the ranks in another order, 30 steps with an epsilon of 1e-6.
TOLERANCES = {"float64": 1e-10, "fp32": 2e-6}
RANKS = [2, pytest.param(4, marks=pytest.mark.longest)]
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The directory of the ranks' checkpoints; four ranks go on from those of two."""
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def of_two(output, tiny_config, tmp_path_factory):
    """Observations of two ranks, which are started once for all tests."""
    return observations(2, output, tiny_config, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(of_two, output, tiny_config, tmp_path_factory):
    return observations(4, output, tiny_config, tmp_path_factory.mktemp("four"))


def observations(ranks, output, config, directory):
    saved = output / str(ranks)
    saved.mkdir()
    places = (config, output / "2" if ranks == 4 else output / "none", saved)
    return what_ranks_saw(__file__, places, ranks, directory, ranks_per_node=2)


@pytest.fixture(params=RANKS)
def seen(request):
    return request.getfixturevalue({2: "of_two", 4: "of_four"}[request.param])


def modes_of(seen):
    return modes(RankInfo(0, len(seen), 0, 2, 0, "torchrun"))


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_sharded_training_is_ddps(seen):
    cases = [(mode, *case) for mode in modes_of(seen) for case in trained_cases(mode, len(seen))]
    for mode, rule, dtype in cases:
        expected = seen[0][f"ddp {rule} {dtype}"]
        assert 0 < expected["clipped"].mean() < 1  # after_allreduce: some steps are clipped
        assert expected["losses"][-10:].mean() < 0.9 * expected["losses"][:10].mean()
        for rank in seen:
            found = rank[f"{mode} {rule} {dtype}"]
            assert next(iter(found["weights"].values())).dtype == DTYPES[dtype]
            assert largest_difference(found["weights"], expected["weights"]) <= TOLERANCES[dtype]
            torch.testing.assert_close(found["clipped"], expected["clipped"])
            assert_equal(found["model"], seen[0][f"{mode} {rule} {dtype}"]["model"])


@pytest.mark.longest
@pytest.mark.parametrize("rule", ON_TWO_RANKS)
def test_two_ranks_train_as_four_do(of_two, of_four, rule):
    two, four = (each[0][f"zero1 {rule} float64"] for each in (of_two, of_four))
    torch.testing.assert_close(two["losses"], four["losses"], rtol=0, atol=1e-10)
    assert largest_difference(two["weights"], four["weights"]) <= TOLERANCES["float64"]


def test_shards_clip_the_buckets_that_a_flat_optimizer_clips(seen):
    for rank in seen:
        expected = rank["flat buckets"]
        assert 0 < expected["clipped"].mean() < 1
        assert len(expected["losses"]) == BUCKET_STEPS
        for mode in modes_of(seen)[1:]:
            found = rank[f"{mode} buckets"]
            assert torch.equal(found["clipped"], expected["clipped"])
            assert largest_difference(found["weights"], expected["weights"]) <= 1e-10


def test_optimizer_state_shrinks_with_the_ranks(seen):
    whole = seen[0]["flat state"]
    shards = {"ddp": 1, "flat": 1, "zero1": len(seen), "zero1_node": 2}
    for mode in ("ddp", *modes_of(seen)):
        # Masters and two moments; a bucket is filled up to a block for each shard.
        padding = 3 * seen[0][f"{mode} parts"] * (shards[mode] - 1) * BLOCK
        for rank in seen:
            assert whole <= shards[mode] * rank[f"{mode} state"] <= whole + padding


def test_micro_batches_are_not_summed_in_16_bits(seen, tiny_config):
    """A sum of 16 equal gradients is exact in fp32, and so is 16 times one of them in bf16."""
    found = {
        (mode, rank): seen[rank][f"{mode} sums"]
        for mode in ("ddp", *modes_of(seen))
        for rank in range(len(seen))
    }
    found["one rank"] = sums(tiny_config, ONE_RANK, "parallel.data_parallel=ddp")
    for case, ratios in found.items():
        assert ratios == pytest.approx([16] * len(POLICIES), rel=1e-6), case


def test_all_ranks_skip_the_step_in_which_one_is_spoilt(seen):
    skipped = [float(step in SPOILT_BY) for step in range(1, SPOILT_STEPS + 1)]
    cases = product(("ddp", *modes_of(seen)), spoilt_cases(len(seen)), seen)
    for mode, (policy, micro_batches), rank in cases:
        case = f"{mode} {policy} {micro_batches} spoilt"
        assert rank[case]["skipped"].tolist() == skipped, case
        assert rank[case]["updates"] == SPOILT_STEPS - len(SPOILT_BY), case
        assert_equal(rank[case]["model"], seen[0][case]["model"])
        assert all(bool(each.isfinite().all()) for each in rank[case]["model"].values()), case


def test_a_skipped_first_step_leaves_the_initial_weights(seen):
    for mode in modes_of(seen):
        for rank in seen:
            found = rank[f"{mode} skip"]
            assert found["updates"] == 0 and found["skip"] == 1
            assert_equal(found["warmed up"], found["at first"])
            assert_equal(found["skipped"], found["at first"])


@pytest.mark.parametrize("policy", POLICIES)
def test_buckets_are_sent_while_backward_runs(seen, policy):
    for mode in modes_of(seen):
        for rank in seen:
            events = rank[f"{mode} {policy} events"]
            sent = [place for place, event in enumerate(events) if event == "sent"]
            last_ready = len(events) - 1 - events[::-1].index("ready")
            early = [place for place in sent if place < last_ready]
            assert len(sent) > 2
            # The last bucket's last gradient is backward's last.
            assert len(early) == (0 if policy == "whole_before_allreduce" else len(sent) - 1)
            micro_batches = MICRO_BATCHES // len(
                seen
            )  # gradients of those before the last are not sent
            assert (
                events[: sent[0]].count("ready")
                > (micro_batches - 1) * events.count("ready") // micro_batches
            )


@pytest.mark.parametrize("name", SAVED)
def test_state_of_ranks_continues_on_one(seen, output, tiny_config, name):
    expected = seen[0][f"{name} saved"]
    alone = start(tiny_config, ONE_RANK, *SAVED[name], seed=9)
    check_continued([load_and_go_on(alone, output / str(len(seen)) / name)], expected, name)


@pytest.mark.parametrize("name", AGAIN)
def test_state_of_ranks_continues_on_as_many(seen, name):
    check_continued([rank[f"{name} again"] for rank in seen], seen[0][f"{name} saved"], name)


@pytest.mark.longest
@pytest.mark.parametrize("name", SAVED)
def test_state_of_two_ranks_continues_on_four(of_two, of_four, name):
    continued = [rank[f"{mode} {name} loaded"] for rank in of_four for mode in modes_of(of_four)]
    check_continued(continued, of_two[0][f"{name} saved"], name)


def check_continued(continued, expected, name):
    masters = expected["saved"]
    # Masters of 16-bit weights are more than those.
    assert any(not torch.equal(each, each.bfloat16().to(each)) for each in masters.values())
    for found in continued:
        assert_equal(found["saved"], masters)
        assert found["updates"] == SAVED_AT
        assert len(found["losses"]) == LAST - SAVED_AT
        if name == "bf16":
            assert_equal(found["model"], {key: each.bfloat16() for key, each in masters.items()})
            assert bool(found["losses"].isfinite().all())
            continue
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=1e-10)
        assert largest_difference(found["weights"], expected["weights"]) <= 1e-10


def test_every_rank_goes_on_from_its_own_random_stream(of_two, output, monkeypatch):
    """Of more ranks than saved, all keep theirs, and FP8 units are the first one's."""
    monkeypatch.setattr(load, "on_every_rank", lambda info, restore: restore())
    streams = [rank["lamb saved"]["stream"] for rank in of_two]
    (step,) = (output / "2/lamb").glob("step_*")
    state = replace(read_state(step), world_size=2)
    without_fp8 = SimpleNamespace(fp8_state=dict)
    for number, stream in enumerate(streams):
        assert sum(torch.equal(stream, other) for other in streams) == 1
        torch.manual_seed(99)
        info = RankInfo(number, 2, number, 2, 0, "torchrun")
        load.restore_rank_states(step, state, without_fp8, info, CPU)
        assert torch.equal(torch.get_rng_state(), stream)
    states = {"cpu": torch.stack(streams), "fp8.unit": torch.tensor([1.0, 2.0])}
    monkeypatch.setattr(load, "read_tensors", lambda path: states)
    torch.manual_seed(98)
    before, unit = torch.get_rng_state(), torch.zeros(())
    with_fp8 = SimpleNamespace(fp8_state=lambda: {"unit": unit})
    load.restore_rank_states(step, state, with_fp8, RankInfo(3, 4, 3, 4, 0, "torchrun"), CPU)
    assert unit == 1 and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("damage", ["unlisted", "twice"])
def test_damaged_optimizer_state_is_named(of_two, output, tiny_config, tmp_path, damage):
    """A rank's part is missing, or another's is in its place; other damage: unit/checkpoint."""
    shutil.copytree(output / "2/lamb", tmp_path / "lamb")
    (step,) = (tmp_path / "lamb").glob("step_*")
    first, second = (f"optimizer/rank_0000{rank}.safetensors" for rank in range(2))
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["files"][second]
    if damage == "twice":
        manifest["files"][second] = manifest["files"][first]
        shutil.copy(step / first, step / second)
    (step / "manifest.json").write_text(json.dumps(manifest))
    run = start(tiny_config, ONE_RANK, SAVED["lamb"][0], SAVED["lamb"][1])
    with pytest.raises(CheckpointError, match="optimizer") as caught:
        load_checkpoint(run.optimizer, tmp_path / "lamb", VOCABULARY, ONE_RANK)
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    places = [Path(each) for each in sys.argv[1:]]
    as_rank(lambda info: all_cases(*places[:3], info), places[-1])

"""The sharded optimizer and the flat reducer on two and four ranks, beside DDP; its checkpoints."""

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
from small_runs import CPU, MICRO_BATCHES, start

STEPS = 30
RULES = {  # and rates that learn something in STEPS
    "adamw": ("optim.name=adamw", "optim.learning_rate=3e-3"),
    "lamb": ("optim.name=lamb", "optim.learning_rate=1e-2"),
    "muon of ModernBERT": (
        *("optim.name=muon", "optim.learning_rate=3e-3"),
        *("model.architecture=modern", "model.objective=mlm", "model.attention_window=4"),
    ),
    "muon": ("optim.name=muon", "optim.learning_rate=3e-3"),
}
DTYPES = {"float64": torch.float64, "fp32": torch.float32}
POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")
BUCKETS = "clip.policy=bucket_before_allreduce"
BUCKET_STEPS = 10  # those of runs that clip bucket by bucket
SAVED_AT, LAST = 4, 8
VOCABULARY = "ab"
SPOILT_BY = {2: float("nan"), 3: float("inf"), 5: 1e30}  # by step; the last: its square overflows
FORWARDS = (1, 2)  # an update
SPOILT_STEPS = max(SPOILT_BY) + 1


def modes(info):
    """The modes that differ on this number of ranks and nodes."""
    by_node = ("shard_node",) if info.local_world_size < info.world_size else ()
    return ("flat", "shard_world", *by_node)


def trained_cases(mode):
    """Rule and dtype of its long runs: `flat` shares its parts with the others, and has one."""
    return [("adamw", "float64")] if mode == "flat" else list(product(RULES, DTYPES))


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
    """A run in which the last rank's gradient is bad: one tensor's, in a step's first forward.

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
    run.optimizer.settle()
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


def waits(run):
    """In the forward after an update: buckets waited for, and "embeddings" when they have run."""
    run.steps(1, 1)
    events = []
    wait_for = ShardGroup.wait_for

    def recording(group, number):
        if number in group._gathering:
            events.append(number)
        wait_for(group, number)

    embeddings = dict(run.model.named_modules())["bert.embeddings"]
    handle = embeddings.register_forward_hook(lambda *_: events.append("embeddings"))
    ShardGroup.wait_for = recording
    try:
        run.step(2, run.micro_batches(2))
    finally:
        ShardGroup.wait_for = wait_for
        handle.remove()
    run.optimizer.settle()
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


SAVED = {  # by directory: rule, config options, dtype
    **{rule: (options, torch.float64) for rule, options in RULES.items()},
    "bf16": (("model.precision=bf16",), torch.float32),
}


def all_cases(config, output, info):
    """Everything that test_sharded_optimizer.py looks at."""
    seen = {}
    for mode in ("ddp", *modes(info)):
        for rule, name in trained_cases(mode):
            options = (f"parallel.data_parallel={mode}", *RULES[rule])
            run = start(config, info, options, DTYPES[name])
            seen[f"{mode} {rule} {name}"] = trained(run, STEPS)
        seen[f"{mode} state"] = state_elements(run.optimizer)
        seen[f"{mode} parts"] = len(run.optimizer.parts)
    for mode, policy in product(("ddp", *modes(info)), POLICIES):
        options = (f"parallel.data_parallel={mode}", f"clip.policy={policy}")
        options += RULES["muon"]  # its vectors have AdamW
        for forwards in FORWARDS:
            more = f"parallel.grad_accum_steps={forwards}"
            seen[f"{mode} {policy} {forwards} spoilt"] = spoilt(config, info, (*options, more))
    for mode in modes(info):
        parallel = f"parallel.data_parallel={mode}"
        run = start(config, info, (parallel, BUCKETS, *RULES["muon"]), torch.float64)
        seen[f"{mode} buckets"] = trained(run, BUCKET_STEPS)
        options = (parallel, "model.precision=bf16")
        seen[f"{mode} skip"] = warmed_up_and_skipped(config, info, options)
        for policy in POLICIES:
            options = (parallel, f"clip.policy={policy}")
            seen[f"{mode} {policy} events"] = order_of_events(start(config, info, options))
        seen[f"{mode} waits"] = waits(start(config, info, (parallel,)))
        seen |= saved_or_loaded(config, output, info, mode)
    return seen


def saved_or_loaded(config, output, info, mode):
    """Four ranks save, and go on; fewer go on from there."""
    seen = {}
    for name, (options, dtype) in SAVED.items():
        case = (f"parallel.data_parallel={mode}", *options)
        if info.world_size < MICRO_BATCHES:
            run = start(config, info, case, dtype, seed=2)
            seen[f"{mode} {name} loaded"] = load_and_go_on(run, output / name)
        elif mode == "shard_world":
            run = start(config, info, case, dtype)
            seen[f"{mode} {name} saved"] = save(run, output / name)
    return seen


# Absolute, of weights: sums of four ranks in another order, 30 steps with an epsilon of 1e-6.
TOLERANCES = {"float64": 1e-10, "fp32": 2e-6}
RANKS = (4, 2)  # the second goes on where the first has saved
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The directory of the four ranks' checkpoints, from which two ranks continue."""
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def both(output, tiny_config, tmp_path_factory):
    """Observations of the ranks; each number of ranks is started once for all tests."""
    return {  # four ranks are two nodes
        ranks: what_ranks_saw(
            __file__,
            (tiny_config, output),
            ranks,
            tmp_path_factory.mktemp("ranks"),
            ranks_per_node=2,
        )
        for ranks in RANKS
    }


@pytest.fixture(params=RANKS)
def seen(request, both):
    return both[request.param]


def modes_of(seen):
    return modes(RankInfo(0, len(seen), 0, 2, 0, "torchrun"))


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_sharded_training_is_ddps(seen, rule, dtype):
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
def test_two_ranks_train_as_four_do(both, rule):
    four, two = (both[ranks][0][f"shard_world {rule} float64"] for ranks in RANKS)
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
    shards = {"ddp": 1, "flat": 1, "shard_world": len(seen), "shard_node": 2}
    for mode in ("ddp", *modes_of(seen)):
        # Masters and two moments; a bucket is filled up to a block for each shard.
        padding = 3 * seen[0][f"{mode} parts"] * (shards[mode] - 1) * BLOCK
        for rank in seen:
            assert whole <= shards[mode] * rank[f"{mode} state"] <= whole + padding


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_skip_the_step_in_which_one_is_spoilt(seen, policy):
    skipped = [float(step in SPOILT_BY) for step in range(1, SPOILT_STEPS + 1)]
    for mode, forwards in product(("ddp", *modes_of(seen)), FORWARDS):
        case = f"{mode} {policy} {forwards} spoilt"
        for rank in seen:
            assert rank[case]["skipped"].tolist() == skipped
            assert rank[case]["updates"] == SPOILT_STEPS - len(SPOILT_BY)
            assert_equal(rank[case]["model"], seen[0][case]["model"])
            assert all(bool(each.isfinite().all()) for each in rank[case]["model"].values())


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
            forwards = MICRO_BATCHES // len(seen)  # gradients of those before the last are not sent
            assert (
                events[: sent[0]].count("ready")
                > (forwards - 1) * events.count("ready") // forwards
            )


def test_a_forward_waits_for_new_weights_as_it_comes_to_them(seen):
    for mode in modes_of(seen):
        for rank in seen:
            events = rank[f"{mode} waits"]
            numbers = [event for event in events if event != "embeddings"]
            if mode == "flat":
                assert numbers == []
                continue
            assert numbers == list(range(rank[f"{mode} parts"] - 1, -1, -1))
            assert events.index("embeddings") < events.index(0)  # the heads' come last


@pytest.mark.parametrize("name", SAVED)
def test_state_of_four_ranks_continues_on_others(both, output, tiny_config, name):
    expected = both[4][0][f"shard_world {name} saved"]
    alone = start(tiny_config, ONE_RANK, *SAVED[name], seed=9)
    continued = [load_and_go_on(alone, output / name)]
    continued += [rank[f"{mode} {name} loaded"] for rank in both[2] for mode in modes_of(both[2])]
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


def test_every_rank_goes_on_from_its_own_random_stream(both, output, monkeypatch):
    monkeypatch.setattr(load, "on_every_rank", lambda info, restore: restore())
    streams = [rank["shard_world lamb saved"]["stream"] for rank in both[4]]
    (step,) = (output / "lamb").glob("step_*")
    state = replace(read_state(step), world_size=len(streams))
    without_fp8 = SimpleNamespace(fp8_state=dict)
    for number, stream in enumerate(streams):
        assert sum(torch.equal(stream, other) for other in streams) == 1
        torch.manual_seed(99)
        info = RankInfo(number, 4, number, 4, 0, "torchrun")
        load.restore_rank_states(step, state, without_fp8, info, CPU)
        assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize("damage", ["flip", "remove", "unlist", "mix"])
def test_damaged_optimizer_state_is_named(both, output, tiny_config, tmp_path, damage):
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


if __name__ == "__main__":
    places = [Path(each) for each in sys.argv[1:]]
    as_rank(lambda info: all_cases(*places[:2], info), places[-1])

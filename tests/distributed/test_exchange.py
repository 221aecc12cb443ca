"""Exchange policies on four real ranks, two "nodes" of two: batches, losses and errors."""

import hashlib
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.exchange import ExchangeSource
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.session import check_nodes, make_exchange_group
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.train import train
from mlperf_bert.vocabulary.word_pieces import token_dtype
from support import metrics_losses

SIZES = ("parallel.nodes=2", "parallel.ranks_per_node=2", "parallel.local_batch_size=4")
POLICIES = ("none", "exchange_local", "exchange_global", "presort_local", "presort_global")
BATCH_CASES = {policy: (f"data.balance={policy}",) for policy in POLICIES}
TRAIN_CASES = {
    **BATCH_CASES,
    "zero1_node": ("data.balance=exchange_local", "parallel.data_parallel=zero1_node"),
    **{
        f"per_rank {policy}": (f"data.balance={policy}", "optim.loss_normalization=per_rank")
        for policy in ("none", "exchange_global")
    },
}
TRAIN_STEPS = 8
SHORT = (
    *("checkpoint.interval_steps=never", "eval.interval_samples=1000000"),
    *(f"run.max_steps={TRAIN_STEPS}", "schedule.decay_steps=20"),
)
STEPS = range(1, 6)
CPU = torch.device("cpu")


class BrokenReader(SampleReader):
    """Cannot read on rank 3, from the second step on."""

    reads = 0

    def read(self, ids):
        """Read, or fail."""
        self.reads += 1
        if dist.get_rank() == 3 and self.reads > 1:
            raise DataError("shard", "is broken", "mend it")
        return super().read(ids)


def digest(batch):
    """One digest of all that a batch holds, types included."""
    contents = hashlib.sha256()
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            value = (str(value.dtype), value.tolist())
        contents.update(repr(value).encode())
    return contents.hexdigest()


def open_planned(config, data):
    """The planner of a config, and a reader of its samples."""
    index = LengthIndex.open(data / "train")
    return make_planner(config, index, seed=5), SampleReader(data / "train", index.manifest)


def planned_batches(config, data, info, steps=STEPS):
    """Digests of what the plan, the policy's single-process definition, gives to this rank."""
    planner, reader = open_planned(config, data)
    found = []
    for plan in map(planner.plan, steps):
        for ids, denominators in plan.micro_batches_of(info.rank):
            found.append(digest(make_batch(reader.read(ids), ids, **denominators)))
    return found


def exchanged_batches(config, data, info):
    """Digests of what this rank gets by exchange."""
    planner, reader = open_planned(config, data)
    group = make_exchange_group(config.data.balance, info, config.parallel.ranks_per_node)
    assert group is not None
    token = token_dtype(config.model.vocab_size)
    source = ExchangeSource(reader, info.rank, group, token)
    found = []
    for plan in map(planner.plan, STEPS):
        found += map(digest, source.micro_batches(plan))
    source.close()
    return found


def error_of_a_broken_reader(config, data, info):
    """The error of this rank when rank 3 cannot read."""
    planner, reader = open_planned(config, data)
    broken = BrokenReader(reader.set_dir, reader.manifest)
    group = make_exchange_group("exchange_global", info, config.parallel.ranks_per_node)
    assert group is not None
    source = ExchangeSource(broken, info.rank, group, "<u2")
    source.micro_batches(planner.plan(1))
    try:
        source.micro_batches(planner.plan(2))
    except DataError as error:
        return str(error)
    finally:
        source.close()
    return ""


def error_of_other_nodes(info):
    """The error of this rank on a node that the config does not have."""
    try:
        elsewhere = replace(info, node_rank=1 - info.node_rank)
        check_nodes("data.balance", "exchange_local", elsewhere, 2)
    except ConfigError as error:
        return str(error)
    return ""


RANKS = 4
LOSS_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The directory of the runs."""
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def seen(job, tiny_config, synthetic_data):
    """Observations of the four ranks, which are started once for all tests."""
    places = (tiny_config, synthetic_data)
    return what_ranks_saw(__file__, places, RANKS, job, ranks_per_node=RANKS // 2)


@pytest.mark.parametrize(
    ("policy", "definition"),
    [("exchange_local", "presort_local"), ("exchange_global", "exchange_global")],
)
def test_exchanged_batches_are_those_of_the_definition(seen, policy, definition):
    for of_rank in seen:
        received = of_rank[f"{policy} received"]
        assert len(received) == 2 * len(STEPS)
        assert received == of_rank[definition]
        assert received != of_rank["none"]


@pytest.mark.parametrize("case", [*POLICIES, "zero1_node"])
def test_every_policy_gives_the_same_losses(seen, job, case):
    expected = metrics_losses(job / "none")
    assert len(expected) == TRAIN_STEPS
    assert metrics_losses(job / case) == pytest.approx(expected, abs=LOSS_TOLERANCE, rel=0)


def test_means_of_ranks_depend_on_the_policy(seen, job):
    runs = [metrics_losses(job / f"per_rank {policy}") for policy in ("none", "exchange_global")]
    assert np.abs(np.subtract(*runs)).max() > 100 * LOSS_TOLERANCE


def test_a_rank_that_cannot_read_is_named_by_the_others(seen):
    said = [of_rank["broken"] for of_rank in seen]
    assert said[3] == "shard: is broken; mend it"
    assert len(set(said[:3])) == 1
    assert "rank 3 could not read" in said[0]


def test_nodes_that_are_not_consecutive_ranks_are_refused_by_all(seen):
    said = {of_rank["nodes"] for of_rank in seen}
    assert len(said) == 1
    assert said.pop().startswith(
        "data.balance: 'exchange_local' needs 2 consecutive ranks per node"
    )


def all_cases(config_path, data, output, info):
    """Batches and errors; then whole runs, which leave directories of their own."""
    config = load_config(config_path, (*SIZES, "data.balance=exchange_global"))
    found = {
        "broken": error_of_a_broken_reader(config, data, info),
        "nodes": error_of_other_nodes(info),
    }
    for name, settings in BATCH_CASES.items():
        case = load_config(config_path, (*SIZES, "parallel.grad_accum_steps=2", *settings))
        found[name] = planned_batches(case, data, info)
        if case.data.balance.startswith("exchange_"):
            found[f"{name} received"] = exchanged_batches(case, data, info)
    for name, settings in TRAIN_CASES.items():
        case = load_config(config_path, (*SIZES, *settings, *SHORT))
        directory = RunDirectory(output / name, 0)
        train(case, info, CPU, directory, data, int(case.run.seed))
    return found


if __name__ == "__main__":
    places = [Path(each) for each in sys.argv[1:]]
    as_rank(lambda info: all_cases(*places, info), places[-1])

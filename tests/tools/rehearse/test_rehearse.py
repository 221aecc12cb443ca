"""`train --rehearse`: a rank of a large run as it would start, and what would go wrong."""

import math
import re
import sys
from types import SimpleNamespace

import pytest

from bert_tools.rehearse.rank import build, imitated_ranks, rank_info
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import find_config, load_config
from support import contents, metrics_records, refusal


def rehearsed(capsys, *words):
    """The lines of a rehearsal that finds nothing wrong, by their first word."""
    assert main(["train", *map(str, words)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition(" ")[0].rstrip(":"): line for line in lines}


def test_a_rank_of_a_thousand(capsys):
    said = rehearsed(capsys, "--config", "dgxa100_128x8x4x1", "--rehearse", 511)
    assert "rank 511 of 1,024, number 7 on node 63, global batch 4,096" in said["dgxa100_128x8x4x1"]
    tokens = [
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) tokens", said["step"])
    ]
    assert tokens[0] <= tokens[1] < 1.05 * tokens[0]  # real and padded
    assert "this rank writes nothing" in said["checkpoints"]
    assert "found nothing that stops rank 511, in " in said["found"]
    assert said["found"].endswith("(not checked: data, run directory, weights, network, GPU)")
    assert "files" not in said  # only rank 0 writes them


@pytest.mark.parametrize(
    ("name", "shards"), [("dgxa100_2x8x48x1", 1), ("open_muon_dgxa100_128x8x16x1", 8)]
)
def test_memory_of_all_shards_is_that_of_the_model(name, shards):
    config = load_config(find_config(name))
    state = []
    for rank in range(8, 8 + shards):  # of the second node
        info = rank_info(config, rank)
        with imitated_ranks(info):
            built = build(config, info)
            state.append(built.optimizer_bytes)
            assert math.isclose(built.weight_bytes, 2 * built.num_parameters, rel_tol=1e-3)
    # Exact weights and two moments in fp32. A shard also has its weights in bf16, to send them.
    of_a_parameter = 12 if shards == 1 else 14
    assert math.isclose(sum(state), of_a_parameter * config.model.num_parameters, rel_tol=1e-3)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A directory with a run of three steps in `run`."""
    data, config = tiny
    directory = tmp_path_factory.mktemp("trained")
    words = ["train", "--config", config, "--data", data, "--run-dir", directory / "run"]
    assert main([str(word) for word in words] + ["--set", "run.max_steps=3"]) == 3
    return directory


def test_the_first_steps_are_those_of_the_run(tiny, trained, tmp_path, capsys):
    data, config = tiny
    words = ["--config", config, "--data", data, "--run-dir", tmp_path / "run", "--rehearse", 0]
    said = rehearsed(capsys, *words)
    assert list(tmp_path.iterdir()) == []
    third = metrics_records(trained / "run")[2]
    tokens = 16 * third["tokens_per_s"] / third["samples_per_s"]  # of 16 sequences
    assert f" {tokens:,.0f} tokens" in said["step"]
    assert "result_0.txt" in said["files"] and "optimizer's state" in said["checkpoints"]


def test_the_disk_needs_space_for_as_many_checkpoints_as_are_written(
    tiny, tmp_path, capsys, monkeypatch
):
    data, config = tiny
    words = ["--config", config, "--data", data, "--run-dir", tmp_path / "run", "--rehearse", 0]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500_000))
    assert "checkpoints need up to" in refusal(capsys, "train", *words)  # three of 0.27 MB
    assert "found" in rehearsed(capsys, *words, "--set", "checkpoint.interval_steps=0")


FAULTS = {
    "--set parallel.local_batch_size=1000000": "training examples, but a global batch needs",
    "--init-checkpoint {run}/run_0/checkpoints --set model.hidden_size=64": (
        "model.hidden_size: is 64, but the weights in"
    ),
    "--set parallel.ranks_per_node=4 --rehearse 4": "--rehearse: 4 is not a rank of this config",
    "--config pretrain_gpu --set model.precision=fp32": "'captured' does not work on 'cuda' with",
    "--data nowhere": "so nowhere/train is not a prepared set",
    "--set data.loader=mpi_readers": "data.loader: needs ",
    "--run-dir {run}": "already has run 0",
    "--run-dir {run} --set checkpoint.interval_steps=never": "already has run 0",
    "--run-dir {run}/result_0.txt": "result_0.txt is not a directory",
    "--run-dir {run}/result_0.txt/new/run": "result_0.txt is not a directory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_one_line(fault, tiny, trained, capsys, monkeypatch):
    data, config = tiny
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    before = contents(trained)
    words = fault.format(run=trained / "run").split()
    given = ["--config", config, "--data", data, "--rehearse", 0, *words]
    assert FAULTS[fault] in refusal(capsys, "train", *given)
    assert contents(trained) == before


def test_a_batch_that_no_gpu_of_the_config_holds(capsys):
    """448 sequences of BERT-large need 114 GiB (logs/2026-11-22-memory), 256 need 72."""
    words = ["train", "--config", "h100_1x1x256x1", "--rehearse", 0]
    assert main([str(word) for word in words]) == 0
    wide = "parallel.local_batch_size=448"
    said = refusal(capsys, *words, "--set", wide, "--set", "mlperf.division=open")
    assert said.startswith("mlperf_bert: error: parallel.local_batch_size: a step of ")
    assert "but H100 has 80 GiB" in said

"""The same training on any number of ranks, by any launcher: real processes over gloo.

With dropout: it is keyed by sample, so that it does not depend on who computes which.
"""

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest

from forked_ranks import free_port, mpiexec_of, run_forked, run_ranks
from mlperf_bert.__main__ import main
from resume_cases import DROPOUT, MISSED
from support import (
    metrics_losses,
    metrics_records,
    prepare_small,
    run_cli,
    run_process,
    sets_of,
)

LOSS_TOLERANCE = 5e-6
STEPS = 20
# As in the shipped configs of 1,024 ranks: ranks get different numbers of sequences.
UNEQUAL = ("data.balance=presort_global", "data.counts_per_rank=unequal")
# Imported by every Python process started with this directory on PYTHONPATH.
SITE_CUSTOMIZE = """
import json, logging, os, sys, threading, time

def hook(event, arguments):
    if event != "open" or not isinstance(arguments[0], str) or hasattr(busy, "now"):
        return
    path = os.path.abspath(arguments[0])
    if not path.startswith(os.environ["TRACED_DATA"]):
        return
    busy.now = True
    try:
        with open(os.environ["TRACED_LOG"]) as log:
            started = "run_start" in log.read()
    except FileNotFoundError:
        started = False
    thread = threading.current_thread().name
    event = {"rank": os.environ.get("RANK", "0"), "path": path, "started": started}
    line = json.dumps({**event, "thread": thread})
    with open(os.environ["TRACE"], "a") as trace:
        trace.write(line + "\\n")
    del busy.now

busy = threading.local()  # the loader opens shards while the main thread opens other files
sys.addaudithook(hook)

if os.environ.get("RANK", "0") == "0":  # a slow disk: the other ranks have to wait for the line
    emit = logging.FileHandler.emit

    def emit_late(self, record):
        if "run_start" in record.getMessage():
            time.sleep(1)
        emit(self, record)

    logging.FileHandler.emit = emit_late
"""


def traced(data, run_dir):
    """Variables with which a run's processes write which files of `data` they open, and when.

    The audit hook sees every file that Python opens, memory maps included.
    """
    directory = run_dir.parent
    (directory / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return {
        "PYTHONPATH": os.pathsep.join([str(directory), *sys.path]),
        "TRACED_DATA": str(data),
        "TRACED_LOG": str(run_dir / "result_0.txt"),
        "TRACE": str(directory / "trace.jsonl"),
    }


def opened(run_dir):
    """Files opened before `run_start`, and (rank, name, opened by which thread) of those after."""
    lines = (run_dir.parent / "trace.jsonl").read_text().splitlines()
    events = [json.loads(line) | {"name": Path(json.loads(line)["path"]).name} for line in lines]
    before = {event["name"] for event in events if not event["started"]}
    after = [event for event in events if event["started"]]
    return before, {(event["rank"], event["name"], event["thread"]) for event in after}


def assert_shards_are_opened_after_run_start_only(run_dir, ranks):
    before, after = opened(run_dir)
    metadata = {"dataset.json", "lengths.u16", "masked_counts.u8", "order_by_length.u32"}
    assert before == {*metadata, "vocab.txt", "train.hdf5.json", "eval.hdf5.json"}
    shards = ("train.hdf5", "eval.hdf5")
    for rank in map(str, range(ranks)):
        assert {(rank, name) for name in shards} <= {each[:2] for each in after}
    # The first rank of the node compares them with their digests too.
    assert {each for each in after if each[2] == "contents"} == {
        ("0", name, "contents") for name in shards
    }


def sizes(ranks, batch, accumulation=1):
    values = {"ranks_per_node": ranks, "local_batch_size": batch, "grad_accum_steps": accumulation}
    return sets_of(*(f"parallel.{key}={value}" for key, value in values.items()))


def torchrun(ranks):
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", free_port(), "-m", "mlperf_bert"),
    ]


@pytest.fixture(scope="module")
def arguments(tiny_config, synthetic_data):
    places = ["--config", str(tiny_config), "--data", str(synthetic_data)]
    return ["train", *places, *sets_of(*DROPOUT)]


@pytest.fixture(scope="module")
def one_rank(arguments, tmp_path_factory):
    """A run that goes to its end and misses the target, which is out of reach."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert main([*arguments, "--run-dir", str(run_dir)]) == MISSED
    assert len(metrics_losses(run_dir)) == STEPS
    return run_dir


def assert_same_losses(run_dir, expected):
    assert metrics_losses(run_dir) == pytest.approx(
        metrics_losses(expected), abs=LOSS_TOLERANCE, rel=0
    )


@pytest.mark.parametrize(
    ("ranks", "batch", "settings"),
    [
        (2, 4, ("parallel.data_parallel=flat", *UNEQUAL)),
        pytest.param(4, 4, UNEQUAL, marks=pytest.mark.longest),
    ],
)
def test_captured_ranks_equal_one(ranks, batch, settings, arguments, one_rank, tmp_path):
    captured = sets_of("run.step_mode=captured", *settings)
    options = ["--run-dir", tmp_path / "run", *sizes(ranks, batch, 16 // batch // ranks)]
    statuses, printed = run_ranks("mlperf_bert", [*arguments, *options, *captured], ranks)
    assert statuses == [MISSED] * ranks, printed
    assert_same_losses(tmp_path / "run", one_rank)
    records = metrics_records(tmp_path / "run")
    assert sum(each["eager_steps"] for each in records) < STEPS / 2  # most are padded


@pytest.mark.longest
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_launchers_equal_one_rank(launcher, arguments, one_rank, tmp_path):
    command = torchrun(2) if launcher == "torchrun" else [*mpiexec_of(2), "-m", "mlperf_bert"]
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    done = run_process(*command, *options, MASTER_PORT=free_port())
    assert "target NOT reached after 320 samples" in done.stdout, done.stderr
    assert_same_losses(tmp_path / "run", one_rank)


def test_accumulation_equals_one_forward(arguments, one_rank, tmp_path):
    assert main([*arguments, "--run-dir", str(tmp_path / "run"), *sizes(1, 4, 4)]) == MISSED
    assert_same_losses(tmp_path / "run", one_rank)


def slurm_tasks(*words_of_ranks):
    """Statuses and output of the tasks of a step."""
    step = {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"},
        **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
        "MASTER_PORT": free_port(),
    }
    commands = [
        (words, {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank, words in enumerate(words_of_ranks)
    ]
    return run_forked("mlperf_bert", commands)


def test_slurm_variables_equal_one_rank(arguments, one_rank, tmp_path):
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    statuses, printed = slurm_tasks(options, options)
    assert statuses == [MISSED, MISSED], printed
    assert_same_losses(tmp_path / "run", one_rank)


def test_a_mistake_of_one_rank_alone_ends_all_and_is_said_once(arguments, synthetic_data, tmp_path):
    shutil.copytree(synthetic_data, tmp_path / "data")
    next((tmp_path / "data" / "train" / "shards").glob("*.hdf5")).unlink()
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    elsewhere = ["--data", tmp_path / "data"]  # of rank 1, as on another node
    statuses, printed = slurm_tasks(options, [*options, *elsewhere])
    assert statuses == [2, 2], printed
    # On a busy machine rank 0 may have said that it is still starting.
    (refusal,) = [line for line in printed.splitlines() if ": error: " in line]
    assert "train.hdf5" in refusal and "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("differing", ["data", "settings"])
def test_a_node_with_other_data_or_settings_is_refused(
    differing, arguments, synthetic_data, tmp_path
):
    other = ["--set", "optim.learning_rate=1e-3"]
    if differing == "data":
        shutil.copytree(synthetic_data, tmp_path / "data")
        train = tmp_path / "data" / "train"
        shutil.rmtree(train)
        how = {"max_seq_length": 32, "max_predictions": 5, "dupe_factor": 2, "seed": 1}
        text, vocabulary = synthetic_data / "train.txt", synthetic_data / "words.txt"
        prepare_small([text], vocabulary, train, **how)
        other = ["--data", tmp_path / "data"]
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8)]
    statuses, printed = slurm_tasks(options, [*options, *other])
    assert statuses == [2, 2], printed
    (refusal,) = [line for line in printed.splitlines() if ": error: " in line]
    host = re.escape(socket.gethostname())
    ranks = rf"on rank 1 \(host {host}\),? .*on rank 0 \(host {host}\); "
    what = {
        "data": rf"{synthetic_data}: the prepared sets {ranks}",
        "settings": rf"optim\.learning_rate: 0\.001 {ranks}",
    }[differing]
    assert re.search(what, refusal), refusal
    assert not (tmp_path / "run").exists()


def test_each_rank_may_have_drawn_a_seed_of_its_own(arguments, tmp_path):
    """As the copies of run_and_time.sh do that mpiexec starts: that of rank 0 counts."""
    options = [*arguments, "--run-dir", tmp_path / "run", *sizes(2, 8), "--set", "run.max_steps=1"]
    words = [[*options, "--set", f"run.seed={seed}"] for seed in (7, 8)]
    statuses, printed = slurm_tasks(*words)
    assert statuses == [MISSED, MISSED] and ", seed 7, " in printed


def test_accuracy_of_a_checkpoint_is_equal_on_any_number_of_ranks(one_rank, synthetic_data, capsys):
    checkpoints = one_rank / "run_0" / "checkpoints"
    state = json.loads((checkpoints / "step_00000020" / "state.json").read_text())
    options = ["evaluate", "--checkpoint", str(checkpoints), "--data", str(synthetic_data)]
    assert main([*options, "--json"]) == 0
    statuses, printed = run_ranks("mlperf_bert", [*options, "--json"], 4)
    assert statuses == [0] * 4, printed
    for shown in (capsys.readouterr().out, printed.splitlines()[-1]):
        result = json.loads(shown)
        assert result["mlm_accuracy"] == state["mlm_accuracy"]
        assert result["masked_tokens"] > 500


def test_ranks_start_by_themselves_without_a_launcher(
    arguments, one_rank, synthetic_data, tmp_path
):
    run_dir = tmp_path / "run"
    options = [*arguments, "--run-dir", run_dir, *sizes(2, 8)]
    done = run_cli(*options, **traced(synthetic_data, run_dir))
    assert done.returncode == MISSED
    assert done.stderr == ""  # nothing over the ranks' own words
    assert_same_losses(run_dir, one_rank)
    assert_shards_are_opened_after_run_start_only(run_dir, 2)

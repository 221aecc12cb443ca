"""`sbatch run_and_time.sh` on a real cluster of two nodes: the closed walk, signals, faults, logs.

Left out by ./run_tests.sh; `make test-real` installs SLURM where it is missing and runs some,
`make test-slow` the others.
"""

import json
import os
import random
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import cluster as slurm
from mlperf_bert.checkpoint.manifest import read_manifest
from support import (
    REPOSITORY,
    copy_checkout,
    mlperf_records,
    oldest_python,
    prepare_small,
    sets_of,
    write_program,
)
from tensorflow_cases import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    V2,
    VOCAB_SIZE,
    write_published,
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or ""),
]
SLURM_OPTIONS = "benchmarks/bert/implementations/pytorch/launch/slurm_options.py"
CPU_TINY = "benchmarks/bert/implementations/pytorch/mlperf_bert/configs/cpu_tiny.toml"
TWO_BY_TWO = ("parallel.nodes=2", "parallel.ranks_per_node=2", "parallel.local_batch_size=8")
TWO_NODES = ("parallel.nodes=2", "parallel.ranks_per_node=1", "parallel.local_batch_size=8")
ENDLESS = ("run.max_steps=1000000", "run.log_interval_steps=50", "eval.interval_samples=1000000")
LONG_STEPS = 1500
LONG = (f"run.max_steps={LONG_STEPS}", *ENDLESS[1:])
CLOSED = "dgxa100_2x8x48x1"
SMALL = (  # what the shipped config is made by on two nodes without a GPU
    *("run.device=cpu", "run.step_mode=eager", "model.precision=fp32", "run.max_steps=500"),
    *(f"model.vocab_size={VOCAB_SIZE}", f"model.hidden_size={HIDDEN}"),
    *(f"model.num_layers={LAYERS}", f"model.num_heads={HEADS}"),
    *(f"model.intermediate_size={INTERMEDIATE}", f"model.max_position_embeddings={POSITIONS}"),
    *("model.hidden_dropout=0", "model.attention_dropout=0"),
    *(f"data.max_seq_length={POSITIONS}", "data.max_predictions=3"),
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=16", "optim.learning_rate=2e-2"),
    *("schedule.decay_steps=500", "eval.interval_samples=1600", "mlperf.enforce_rules=false"),
)
STAGED = re.compile(r"^every node copied \S+ to \S+, in \d+ s$", re.MULTILINE)
FAULT_S = 60  # within which a job has to end


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    home = tmp_path_factory.mktemp("slurm")
    with slurm.started(home / "daemons", copy_checkout(home / "tree")) as running:
        yield running


def sets(*settings):
    return " ".join(sets_of(*settings))


def sbatch(config, *settings, options="", **environ):
    """The command of the README; settings go to both programs, as they would be typed."""
    given = " ".join(f"{name}={value}" for name, value in environ.items())
    slurm_options = f"$({SLURM_OPTIONS} {config} {sets(*settings)})"
    command = f"env {given} sbatch {slurm_options} {options} run_and_time.sh"
    return f"{command} -- {sets(*settings)}"


@pytest.mark.longest
def test_cpu_tiny_reaches_its_target_on_two_nodes(cluster):
    job = cluster.submit(sbatch(CPU_TINY, *TWO_BY_TWO, LOGDIR="runs/cpu_tiny", SEED=772688194))
    state = cluster.wait(job, 800)
    output = cluster.output(job)
    assert state["JobState"] == "COMPLETED", output
    assert "4 ranks with gloo over lo: all sums are exact" in output
    assert "4 ranks on cpu" in output
    assert "target reached" in output
    assert "checker, ruleset 5.0.0: " in output
    assert len(re.findall(r"^RESULT,bert,\d+,\d+,\w+,.+$", output, re.MULTILINE)) == 1
    log = cluster.tree / "runs/cpu_tiny/result_0.txt"
    assert [stop["metadata"]["status"] for stop in mlperf_records(log, "run_stop")] == ["success"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint of TensorFlow beside vocabulary and config, and data of its vocabulary.

    A sentence of the data says one of three words, again and again: the context-free baseline
    is right in 0.4 of all cases, and the model learns in seconds to look.
    """
    text = tmp_path_factory.mktemp("published") / "text"
    words = write_published(text)
    data = text.parent / "data"
    data.mkdir()
    for name, documents, rng in (("train", 1600, random.Random(1)), ("eval", 40, random.Random(2))):
        sentences = (" ".join(rng.choices(words[:3], k=1) * 6) for _ in range(documents * 6))
        lines = ("\n".join(next(sentences) for _ in range(6)) for _ in range(documents))
        (text / name).write_text("\n\n".join(lines) + "\n")
        settings = {"max_seq_length": POSITIONS, "max_predictions": 3, "dupe_factor": 2}
        prepare_small(
            [text / name], text / "vocab.txt", data / name, with_baseline=True, **settings
        )
    return text, data


@pytest.mark.real
def test_the_closed_walk_of_the_page_ends_with_an_accepted_log(cluster, published):
    """docs/guides/clusters.md's lines, on the shipped config made small; nobody asks for GPUs."""
    page = (REPOSITORY / "docs/guides/clusters.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## The closed division\n.*?```sh\n(.*?)```", page, re.DOTALL)
    places = {"TEXT": published[0], "DATA": published[1], "WEIGHTS": "runs/weights"}
    places["/local/scratch"] = cluster.local
    for name, place in places.items():
        block = re.sub(rf"(?<![\w/]){name}\b", str(place), block)
    convert, export, submit = block.strip().splitlines()
    done = cluster.run(convert)
    assert done.returncode == 0, done.stderr
    assert f"{SLURM_OPTIONS} {CLOSED})" in submit and "NEXP=10" in export
    export = export.replace("NEXP=10", "NETWORK_TEST=0 SEED=1 LOGDIR=runs/walk")
    submit = submit.replace(f"{CLOSED})", f"{CLOSED} {sets(*SMALL)})") + f" -- {sets(*SMALL)}"
    job = cluster.submit(f"{export}\n{submit}")
    state = cluster.wait(job, 200)
    output = cluster.output(job)
    assert state["JobState"] == "COMPLETED", output
    assert len(STAGED.findall(output)) == 1
    assert "checker, ruleset 5.0.0: " in output and "4 ranks on cpu" in output
    log = cluster.tree / "runs/walk/result_0.txt"
    assert mlperf_records(log, "submission_division")[0]["value"] == "closed"
    assert mlperf_records(log, "initial_weights")[0]["value"] == "checkpoint"
    assert read_manifest(cluster.tree / "runs/weights").origin["name"] == V2.name
    assert 0.72 <= mlperf_records(log, "eval_accuracy")[-1]["value"] < 1
    weak = mlperf_records(log, "eval_accuracy")[0]["value"]
    assert weak < 0.72, "it was learned, not there from the start"


PYXIS = """#!/usr/bin/env bash
# A srun that knows the options of containers, and runs the commands on the node itself.
[ "$*" != --help ] || exec echo "  --container-image=IMAGE"
echo "$*" >>"{asked}"
words=()
for word in "$@"; do
    case $word in --container-* | --no-container-mount-home) ;; *) words+=("$word") ;; esac
done
exec {srun} "${{words[@]}}"
"""


@pytest.mark.real
def test_a_container_needs_no_environment_on_the_login_node(cluster, tiny, tmp_path):
    """The first python3 on PATH is the oldest one here, and pyxis is a stand-in."""
    data, config = tiny
    asked = tmp_path / "asked"
    write_program(tmp_path / "srun", PYXIS.format(asked=asked, srun=shutil.which("srun")))
    (tmp_path / "python3").symlink_to(oldest_python())
    given = {"PATH": f"{tmp_path}:$PATH", "CONT": "/shared/image.sqsh", "NEXP": 2, "SHARP": 1}
    given |= {"DATADIR": data, "LOGDIR": "runs/pyxis"}
    environment = cluster.tree / ".venv"
    environment.rename(tmp_path / "venv")
    refused = cluster.run(sbatch("lost", *TWO_NODES))
    assert "unrecognized option '--not-submitted'" in refused.stderr and refused.returncode != 0
    settings = (*TWO_NODES, "run.max_steps=4", "eval.target_accuracy=none", "run.slurm_minutes=7")
    try:
        version = cluster.run(f"{tmp_path}/python3 --version").stdout.strip()
        export = " ".join(f"{name}={value}" for name, value in given.items())
        job = cluster.submit(f"export {export}\n{sbatch(config, *settings)}")
        state = cluster.wait(job, 120)
    finally:
        (tmp_path / "venv").rename(environment)
    output = cluster.output(job)
    print(f"options made by {version}\n{output}")
    assert state["JobState"] == "COMPLETED", output
    assert state["TimeLimit"] == "00:19:00" and state["Network"] == "sharp"
    assert output.startswith("tiny, 4 steps: train, check, train, check\n")
    assert output.count("checker, ruleset 5.0.0: ") == 2
    commands = [line for line in asked.read_text().splitlines() if " -m mlperf_" in line]
    image = "--container-image=/shared/image.sqsh --container-name=mlperf_bert_"
    assert len(commands) == 7 and all(image in line for line in commands), commands


@pytest.mark.real
@pytest.mark.skipif(not slurm.address(), reason="needs an address that is not a loopback one")
def test_a_slow_network_between_nodes_whose_own_names_are_loopback_addresses(cluster, tiny):
    """`127.0.1.1 name`, as in Ubuntu's /etc/hosts. What the network should have is made up."""
    data, config = tiny
    interface, here = slurm.address()
    settings = (*TWO_NODES, "run.max_steps=2", "parallel.network_gb_s=10000.0")
    places = {"DATADIR": data, "MASTER_ADDR": "", "GLOO_SOCKET_IFNAME": interface}
    ends = cluster.submit(sbatch(config, *settings, LOGDIR="runs/slow", **places))
    state = cluster.wait(ends, FAULT_S)
    output = cluster.output(ends)
    assert state["ExitCode"] == "2:0", output
    assert f"ranks meet at {here}, because n1 is a loopback address here" in output
    assert f"2 ranks with gloo over {interface}: all sums are exact" in output
    assert "error: network: the all-reduce reached 0.0% of the 10000 GB/s" in output
    assert not (cluster.tree / "runs/slow/result_0.txt").exists()
    places |= {"LOGDIR": "runs/warned", "NETWORK_TEST": "warn"}
    goes_on = cluster.submit(sbatch(config, *settings, **places))
    state = cluster.wait(goes_on, FAULT_S)
    output = cluster.output(goes_on)
    assert state["ExitCode"] == "3:0", output  # two steps do not reach the target
    assert "warning: network: the all-reduce reached" in output
    assert (cluster.tree / "runs/warned/result_0.txt").exists()


@pytest.mark.real
def test_a_node_that_cannot_stage_is_named(cluster, tiny):
    data, config = tiny
    (cluster.disk("n2") / "taken").write_text("a file")
    environ = {"DATADIR": data, "STAGEDIR": cluster.local / "taken", "NETWORK_TEST": 0}
    job = cluster.submit(sbatch(config, *TWO_NODES, LOGDIR="runs/unstaged", **environ))
    assert cluster.wait(job, FAULT_S)["ExitCode"] == "2:0"
    errors = [line for line in cluster.output(job).splitlines() if "error" in line]
    assert len(errors) == 1 and "STAGEDIR: n2: " in errors[0] and "Traceback" not in errors[0]
    assert (cluster.disk("n2") / "taken").read_text() == "a file"
    assert not list(cluster.tree.glob("runs/unstaged/result*"))


@pytest.mark.parametrize(
    ("scancel", "name", "ended"),
    [
        # What `sbatch --signal=B:USR1@60` sends to the batch shell ahead of the limit.
        pytest.param(
            "--batch --signal=USR1", "SIGUSR1", ("FAILED", "75:0"), marks=pytest.mark.real
        ),
        pytest.param("", "SIGTERM", ("CANCELLED",), marks=pytest.mark.longest),
    ],
)
def test_a_signal_ends_the_run_in_order(cluster, tiny, scancel, name, ended):
    data, config = tiny
    job = cluster.submit(sbatch(config, *TWO_BY_TWO, *ENDLESS, DATADIR=data, LOGDIR=f"runs/{name}"))
    cluster.wait_for_output(job, r"^step \d+/", 120)
    cluster.run(f"scancel {scancel} {job}")
    state = cluster.wait(job, slurm.KILL_WAIT_S + 40)
    assert (state["JobState"], state["ExitCode"])[: len(ended)] == ended, cluster.output(job)
    check_stopped(cluster, job, name, cluster.tree / f"runs/{name}")


def check_stopped(cluster, job, name, run_dir, log="result_0.txt"):
    output = cluster.output(job)
    assert re.search(rf"^received {name} and stopped after step \d+", output, re.MULTILINE), output
    assert "Traceback" not in output
    stops = mlperf_records(run_dir / log, "run_stop")
    assert [stop["metadata"]["status"] for stop in stops] == ["aborted"]
    assert (run_dir / "run_0/checkpoints/LATEST").exists()


@pytest.mark.real
def test_a_requeued_job_goes_on(cluster, tiny):
    """As after a preemption; nobody has said where its files are."""
    data, config = tiny
    stage = cluster.local / "requeued"
    environ = {"DATADIR": data, "STAGEDIR": stage}
    options = "--requeue --time=2:00:00"  # of the site, which come last
    job = cluster.submit(sbatch(config, *TWO_NODES, *LONG, options=options, **environ))
    cluster.wait_for_output(job, r"^step \d+/", 120)
    staged = cluster.disk("n2") / "requeued/train/shards/train.hdf5"
    inode = staged.stat().st_ino
    open_files = Path(f"/proc/{rank_of(job, 1)}/maps").read_text()
    assert str(stage / "train/shards/train.hdf5") in open_files and str(data) not in open_files
    assert cluster.run(f"scontrol requeue {job}").returncode == 0
    state = cluster.wait(job, 400)
    assert (state["Restarts"], state["TimeLimit"]) == ("1", "02:00:00")
    assert state["ExitCode"] == "3:0", cluster.output(job)
    run_dir = cluster.tree / f"runs/{job}-{config.stem}"
    check_stopped(cluster, job, "SIGTERM", run_dir, log="run_0/interrupted/result_0_0.txt")
    check_resumed(run_dir)
    assert staged.stat().st_ino == inode  # it was found, and not copied again
    assert len(STAGED.findall(cluster.output(job))) == 2


@pytest.mark.real
def test_a_run_whose_rank_is_killed_goes_on(cluster, tiny):
    data, config = tiny
    settings = (*TWO_NODES, *LONG, "checkpoint.interval_steps=50")
    run_dir = cluster.tree / "runs/killed"
    command = sbatch(config, *settings, DATADIR=data, LOGDIR=run_dir, RESUME="auto")
    job = cluster.submit(command)
    cluster.wait_for_output(job, rf"^step 150/{LONG_STEPS}", 120)
    os.kill(rank_of(job, 1), signal.SIGKILL)
    assert cluster.wait(job, FAULT_S)["JobState"] == "FAILED"
    output = cluster.output(job)
    assert re.search(r"rank 0 on n1, step \d+: another rank closed the connection", output), output
    again = cluster.submit(command)
    assert cluster.wait(again, 400)["ExitCode"] == "3:0", cluster.output(again)
    check_resumed(run_dir)


def rank_of(job, rank):
    """Process of a rank of a job's training."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            if b"mlperf_bert\0train" in (directory / "cmdline").read_bytes() and wanted <= set(
                (directory / "environ").read_bytes().split(b"\0")
            ):
                return int(directory.name)
    raise AssertionError(f"no rank {rank} of job {job}")


def check_resumed(run_dir):
    """It went on from a checkpoint, and all steps are there, once."""
    (resumed,) = mlperf_records(run_dir / "result_0.txt", "resumed")
    assert resumed["value"] is True
    assert 0 < resumed["metadata"]["step"] < LONG_STEPS
    records = (run_dir / "run_0/metrics.jsonl").read_text().splitlines()
    samples = [json.loads(record)["samples"] for record in records]
    assert samples == sorted(set(samples))
    assert json.loads(records[-1])["step"] == LONG_STEPS

"""run_and_time.sh in a SLURM job asks srun for the right thing: one that writes it down.

Containers are tested so only: pyxis is not on any machine of ours. A real SLURM is
in tests/slurm.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mlperf_bert.checkpoint.manifest import MANIFEST, MODEL, FileEntry, Manifest
from mlperf_bert.config.files import config_to_tables, load_config
from mlperf_bert.data.index import Manifest as Prepared
from support import (
    CONFIGS,
    REPOSITORY,
    contents,
    prepare_small,
    run_process,
    write_program,
    write_synthetic_text,
)

SRUN = """#!/usr/bin/env bash
[ "$*" != --help ] || { cat "$FAKE_HELP"; exit; }
asked=$*
printf '%s\\n' "${asked//$'\\n'/ }" >>"$ASKED"
while [[ ${1:-} == --* ]]; do shift; done
words=("$@")
while [ $# -gt 0 ] && [ "$1" != "$PYTHON" ]; do shift; done # a container's words
case "$*" in *" -m mlperf_bert train "*) ;; *" config "* | *" prepare "*) exec "$@" ;; esac
"""
DGX = CONFIGS / "dgxa100_2x8x48x1.toml"
LAUNCH = "benchmarks/bert/implementations/pytorch/launch"


@pytest.fixture(scope="module")
def large_data(tmp_path_factory):
    """Prepared sets with as many words and examples as DGX and the closed division need."""
    directory = tmp_path_factory.mktemp("large")
    vocabulary = directory / "words.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *(f"w{n}" for n in range(30_522 - 5))]))
    for seed, name in enumerate(("train", "eval")):
        write_synthetic_text(directory / f"{name}.txt", 150, seed)
        sizes = {"max_seq_length": 512, "max_predictions": 76, "dupe_factor": 50}
        picked = {"pick_eval": 10_000} if name == "eval" else {}
        prepare_small([directory / f"{name}.txt"], vocabulary, directory / name, **sizes, **picked)
    return directory


@pytest.fixture
def job(tmp_path, large_data):
    """Environment of the shell of a job on two nodes, with a srun that knows no pyxis."""
    weights = Manifest(  # all that is read of them before ranks are started
        step=0,
        samples=0,
        vocabulary_sha256=Prepared.load(large_data / "train").vocabulary_sha256,
        version="1",
        commit=None,
        config=config_to_tables(load_config(DGX)),
        files={MODEL: FileEntry(1, "0" * 64)},
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / MANIFEST).write_bytes(weights.to_json())
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "srun", SRUN)
    (tmp_path / "help").write_text("Usage: srun [OPTIONS...] executable\n")
    return {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "ASKED": str(tmp_path / "asked"),
        "FAKE_HELP": str(tmp_path / "help"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "PYTHON": sys.executable,
        "CONFIG": str(DGX),
        "DATADIR": str(large_data),
        "INIT_CHECKPOINT": str(tmp_path / "weights"),
        "LOGDIR": str(tmp_path / "logs"),
        "SEED": "5",
    }


def srun_that(job, asked, does):
    """Let srun do something where it is asked for that."""
    write_program(
        Path(job["ASKED"]).with_name("bin") / "srun",
        SRUN + f"case $asked in {asked}) {does} ;; esac\n",
    )


def run(job, *options):
    """The script's outcome, and what srun was asked."""
    done = run_process(REPOSITORY / "run_and_time.sh", *options, **job)
    asked = Path(job["ASKED"])
    return done, asked.read_text().splitlines() if asked.exists() else []


def test_one_task_a_gpu_on_every_node(job):
    environ = {**job, "CONFIG": DGX.stem, "NEXP": "2", "SRUN_OPTIONS": "--mpi=pmi2 --label"}
    done, asked = run({**environ, "TIMED_NEXP": "1"}, "--", "--set", "run.device=cpu")
    assert "warning: the job's time limit is for NEXP=1, but NEXP is 2; type 'export" in done.stderr
    network, caches, train = asked
    size = "--nodes=2 --ntasks=16 --ntasks-per-node=8"
    assert network.startswith(f"--kill-on-bad-exit=1 --cpu-bind=none --mpi=pmi2 --label {size}")
    words = f"{sys.executable} -P -m mlperf_bert network-test"
    assert network.endswith(f"{words} --config {DGX} --set run.device=cpu")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 sh -c sync" in caches
    assert size in train
    assert f"-m mlperf_bert train --config {DGX} --data {job['DATADIR']}" in train
    assert f"--init-checkpoint {job['INIT_CHECKPOINT']}" in train
    assert "--set run.seed=5" in train
    assert train.endswith("--cache-cleared --set run.device=cpu")  # this srun failed nothing
    hint = re.search(
        r"--go-on-by RESUME=auto .* sbatch (\$\(.*\)) \./run_and_time\.sh -- --set", train
    )
    assert hint and shlex.split(hint[1])[-3:] == [str(DGX), "--set", "run.device=cpu)"]
    typed = run_process("bash", "-c", f"echo {hint[1]}", **job)
    assert " --nodes=2 " in typed.stdout and "gpus" not in typed.stdout
    assert typed.stdout.endswith(",TIMED_NEXP=2\n")  # the script sees the variables of the hint


def test_pyxis_gets_image_and_mounts(job):
    Path(job["FAKE_HELP"]).write_text("  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n")
    _, asked = run({**job, "CONT": "docker://mlperf-bert", "MOUNTS": "/scratch"})
    mounts = [str(REPOSITORY), job["DATADIR"], job["LOGDIR"], job["INIT_CHECKPOINT"], "/scratch"]
    container = (
        "--container-image=docker://mlperf-bert --container-name=mlperf_bert_7 "
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)} "
        f"--container-workdir={REPOSITORY} --no-container-mount-home /usr/bin/env {sys.executable}"
    )
    settings = [line for line in asked if " config " in line and "--go-on-by" not in line]
    assert settings
    assert all(f"--nodes=1 --ntasks=1 {container}" in line for line in settings)
    train = next(line for line in asked if " train " in line)
    assert f"--ntasks-per-node=8 {container} -P -m mlperf_bert train" in train
    assert "--ntasks-per-node=1 enroot remove --force pyxis_mlperf_bert_7" in asked[-1]
    caches = next(line for line in asked if "drop_caches" in line)
    assert "container" not in caches  # a container may not drop them


def test_every_node_copies_the_data_before_the_clock_and_training_reads_the_copy(job, tmp_path):
    """Again too, and after an interruption; but never over anything else."""
    data, copy, notes = Path(job["DATADIR"]), tmp_path / "local" / "bert", tmp_path / "notes"
    srun_that(job, "*rsync*", '"${words[@]}"')
    copies = '#!/bin/sh\n[ "$1 $2" = "-aL --delete-after" ] && cp -RL "$4." "$5"\n'
    write_program(tmp_path / "bin" / "rsync", copies)  # what these options do
    for _ in range(2):
        done, asked = run({**job, "STAGEDIR": str(copy), "CACHE_CLEARED": "1"})
        *_, stage, caches, train = asked
        assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 bash -c " in stage
        assert f"every node copied {data} to {copy}, in " in done.stdout
        assert "drop_caches" in caches  # what was copied is in it
        assert f"--config {DGX} --data {copy} " in train
        copied = contents(copy)
        copied.pop(".copy_of")
        assert copied == contents(data)
        (copy / "train/index/dataset.json").unlink()
    other = tmp_path / "other"
    shutil.copytree(data, other)
    with (other / "eval/index/dataset.json").open("a") as manifest:
        manifest.write("\n")
    notes.mkdir()
    (notes / "of mine.txt").write_text("mine")
    Path(job["ASKED"]).unlink()
    kept = [contents(copy), contents(notes)]
    for given, place in ((other, copy), (data, notes), (data, notes / "of mine.txt")):
        done, asked = run({**job, "DATADIR": str(given), "STAGEDIR": str(place)})
        assert done.returncode == 2 and not [line for line in asked if " train " in line]
        (line,) = done.stderr.splitlines()
        assert line.startswith("run_and_time.sh: error: STAGEDIR: ")
        assert f": {place} has files that are not a copy of {given}" in line
        assert [contents(copy), contents(notes)] == kept
    (tmp_path / "link").symlink_to(data)
    done, _ = run({**job, "STAGEDIR": str(tmp_path / "link")})
    assert f"{tmp_path / 'link'} is DATADIR itself; unset STAGEDIR" in done.stderr


def test_data_that_break_the_closed_rules_are_refused_before_ranks_start(job, tmp_path):
    data = Path(job["DATADIR"])
    shutil.copytree(data / "train", tmp_path / "data" / "train")
    shutil.copytree(data / "train", tmp_path / "data" / "eval")
    done, asked = run({**job, "DATADIR": str(tmp_path / "data")})
    assert done.returncode == 2 and not [line for line in asked if " train " in line]
    assert re.search(r"eval has num_samples = \d+, but the closed division", done.stderr)


def test_the_interactive_step_of_several_nodes_starts_ranks_on_all_of_them(job):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
    _, asked = run({**job, **step})
    (train,) = [line for line in asked if " train " in line]
    assert "--overlap --nodes=2 --ntasks=16 --ntasks-per-node=8 " in train


def test_a_job_that_was_submitted_in_a_step_is_a_job(job, tmp_path):
    script = tmp_path / "slurm_script"  # as sbatch names its copy
    shutil.copy(REPOSITORY / "run_and_time.sh", script)
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    run_process(script, **job, **step)
    (train,) = [line for line in Path(job["ASKED"]).read_text().splitlines() if " train " in line]
    assert "--overlap" not in train


def test_a_container_outside_of_a_job_is_refused(job):
    done, asked = run({**job, "SLURM_JOB_ID": "", "CONT": "image.sqsh"})
    assert (done.returncode, asked) == (2, [])
    assert "CONT: only SLURM jobs start containers; unset CONT, or use bench" in done.stderr


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("CONT", "docker://x", "CONT: this SLURM has no pyxis"),
        ("SLURM_JOB_NUM_NODES", "1", f"{DGX.name}) ./run_and_time.sh"),
        ("CONFIG", "none.toml", "none.toml: No such file or directory"),
        ("DATADIR", "none", "DATADIR: no such directory 'none'"),
        ("DATADIR", ".", "train/index/dataset.json: no such file, so train is not a prepared set"),
        (
            "INIT_CHECKPOINT",
            "",
            "run.init_checkpoint: is not set, but the closed division requires",
        ),
        ("INIT_CHECKPOINT", "none", "INIT_CHECKPOINT: no such directory 'none'"),
        ("DATADIR", "", f"DATADIR: not set, but {DGX} needs prepared data; create it with"),
        ("STAGEDIR", "none", "STAGEDIR: 'none' is a relative path; set it to an absolute path"),
        ("PYTHON", "/none/python", "PYTHON: no such interpreter '/none/python' on this node; copy"),
        ("NETWORK_TEST", "no", "NETWORK_TEST: 'no' is not 1, 0 or warn; set it to one of these"),
        ("SHARP", "yes", "SHARP: 'yes' is neither 1 nor 0; set it to 1 or 0, or unset it"),
        ("RESUME", "none.such", "RESUME: no such directory 'none.such'; set it to none, auto, or"),
    ],
)
def test_what_cannot_work_is_one_line(setting, value, said, job):
    done, asked = run({**job, setting: value})
    assert (done.returncode, asked) == (2, [])
    (line,) = done.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("given", "drops", "may"),
    [
        ({}, False, True),
        ({"NEXP": "2"}, False, True),
        ({"CLEAR_CACHES": "1"}, True, True),
        ({"CLEAR_CACHES": "1"}, True, False),
    ],
)
def test_caches_are_dropped_on_request_in_the_open_division(job, given, drops, may):
    """The tests above use the closed division, where they are always dropped."""
    srun_that(job, "*drop_caches*", "exit 0" if may else "exit 1")
    done, asked = run({**job, "NETWORK_TEST": "0", **given}, "--", "--set", "mlperf.division=open")
    trainings = [line for line in asked if " train " in line]
    assert sum("drop_caches" in line for line in asked) == drops * len(trainings)
    were = drops and may
    assert trainings and all(("--cache-cleared" in line) == were for line in trainings)
    assert ("page cache dropped on 2 node(s), because CLEAR_CACHES=1" in done.stdout) == were
    said = "page cache not dropped, because this user may not" in done.stdout
    assert said == (not may)


@pytest.mark.parametrize("status", [3, 75])
def test_an_end_that_ranks_agreed_on_is_told_by_a_file(job, status):
    """srun would kill the ranks that are still leaving when the first left with anything but 0."""
    srun_that(job, '*"--status-file $LOGDIR/status_0"*', f'echo {status} >"$LOGDIR/status_0"')
    done, _ = run({**job, "NEXP": "1"})
    assert "RESULT" not in done.stdout
    assert done.returncode == (status if status == 75 else 1)  # 3: there is no log to be checked


def test_a_failed_network_stops_before_training(job):
    srun_that(job, "*network-test*", "exit 1")
    done, asked = run(job)
    assert done.returncode == 1
    assert "the all-reduce of the ranks failed, as shown above; fix the network" in done.stderr
    assert len(asked) == 1


@pytest.mark.parametrize(("given", "option"), [("1", ""), ("warn", " --warn"), ("0", None)])
def test_a_slow_network_is_an_error_a_warning_or_not_looked_at(job, given, option):
    _, asked = run({**job, "NETWORK_TEST": given})
    tests = [line for line in asked if "network-test" in line]
    assert len(tests) == (option is not None)
    assert all(line.endswith(f"--config {DGX}{option}") for line in tests)


def test_adapters_for_training_are_those_beside_a_gpu(tmp_path):
    """As on a DGX A100: a PCIe switch with two GPUs and two adapters, and adapters for storage."""
    devices, drivers = tmp_path / "devices", tmp_path / "bus/pci/drivers/nvidia"
    adapters = tmp_path / "class/infiniband"
    drivers.mkdir(parents=True)
    adapters.mkdir(parents=True)
    places = {
        "0000:07:00.0": "pci0000:00/0000:00:01.1/0000:01:00.0/0000:07:00.0",
        "mlx5_0": "pci0000:00/0000:00:01.1/0000:01:00.0/0000:0c:00.0",
        "mlx5_4": "pci0000:60/0000:60:03.1/0000:61:00.0",  # for storage
        "mlx5_9": "pci0000:00/0000:00:01.2/0000:0d:00.0",  # another root port
        "mlx5_10": "pci0000:00/0000:00:01.1/0000:01:00.0/0000:13:00.0",
        "mlx5_bond": "pci0000:90",  # as in a virtual machine
    }
    for name, place in places.items():
        (devices / place).mkdir(parents=True, exist_ok=True)
        if name.startswith("0000"):
            (drivers / name).symlink_to(devices / place)
            continue
        (adapters / name).mkdir()
        (adapters / name / "device").symlink_to(devices / place)
    (tmp_path / "infiniband").mkdir()
    for name in ("uverbs0", "uverbs1", "rdma_cm", "issm0"):
        (tmp_path / "infiniband" / name).touch()

    def infiniband(command, **environ):
        source = f". {REPOSITORY}/{LAUNCH}/infiniband.sh; {command}"
        return run_process("bash", "-euc", source, **environ).stdout

    assert infiniband(f"compute_adapters {tmp_path}").split() == ["mlx5_0,mlx5_10"]
    (drivers / "0000:07:00.0").unlink()
    assert infiniband(f"compute_adapters {tmp_path}").split() == []
    mounts = [f"{tmp_path}/infiniband/{name}" for name in ("uverbs0", "uverbs1", "rdma_cm")]
    expected = "".join(f",{path}:{path}" for path in mounts)
    assert infiniband(f"device_mounts {tmp_path}") == expected
    shown = "echo $NCCL_IB_HCA $NCCL_COLLNET_ENABLE $NCCL_GRAPH_REGISTER"
    assert infiniband(shown, NCCL_IB_HCA="mlx5_7", SHARP="1").split() == ["mlx5_7", "1", "1"]

"""run_and_time.sh goes on with runs that ended or were requeued: what it asks of training.

srun is one that writes down what it is asked, and does what a test says in place of training; the
config and the checker are not asked. Real ranks, a real SLURM: tests/slurm, tests/reliability.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from mlperf_bert.errors import FAULT
from support import CONFIGS, REPOSITORY, run_process

CONFIG = CONFIGS / "dgxa100_1x8x56x1.toml"
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == --* ]]; do shift; done
case "$*" in
*" train "*)
    echo "$*" >>"$ASKED"
    attempt=$(wc -l <"$ASKED")
    run=$LOGDIR/run_0 log=$LOGDIR/result_0.txt
    eval "$TRAINING"
    ;;
esac
"""
PYTHON = """#!/bin/sh
echo "$*" >>"${NOTES:-/dev/null}"
case "$*" in
*"config get "*) printf '%s\\n' none none open 1 8 False ${CONFIG_SEED:-random} ;;
*compliance_checker*) [ -z "${CHECKER:-}" ] || exec "$CHECKER" "$@" ;;
*" train "*)
    run=$LOGDIR/run_0 log=$LOGDIR/result_0.txt
    eval "$TRAINING"
    exit "${TRAINED:-0}"
    ;;
esac
"""
LOG = (
    """echo '{"key": "seed", "value": 42, "metadata": {}}' >$log; """
    """echo "{\\"key\\": \\"resumed\\", \\"value\\": %s, \\"metadata\\": {}}" >>$log; """
)


@pytest.fixture
def job(tmp_path):
    """Environment of the shell of a job in a tree that has this one's files."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("python", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "run_and_time.sh").write_bytes((REPOSITORY / "run_and_time.sh").read_bytes())
    (tree / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "ASKED": str(tmp_path / "asked"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "PYTHON": str(tmp_path / "bin/python"),
        "CONFIG": str(CONFIG),
        "DATADIR": str(tmp_path),
        "LOGDIR": str(tmp_path / "logs"),
        "TREE": str(tree),
        "SEED": "5",
        "NETWORK_TEST": "0",
        "CLEAR_CACHES": "0",
        "TRAINING": "true",
    }


@pytest.fixture
def run(job):
    """The script's outcome, and what training was asked, with more or other variables."""

    def start(**more):
        done = run_process("bash", f"{job['TREE']}/run_and_time.sh", **{**job, **more})
        asked = Path(job["ASKED"])
        return done, asked.read_text().splitlines() if asked.exists() else []

    return start


def test_a_resumed_run_has_no_result(run):
    done, _ = run(RESUME="auto", TRAINING=LOG % "true" + "mkdir -p $run")
    assert (
        "no RESULT for run 0, because it was interrupted and its time is incomplete\n"
        in done.stdout
    )
    assert "RESULT,bert" not in done.stdout


def test_an_interrupted_run_of_a_series_is_replaced_by_the_command_that_is_printed(run, job):
    training = "run=$LOGDIR/run_$((attempt - 1)) log=$LOGDIR/result_$((attempt - 1)).txt; "
    done, asked = run(NEXP="2", RESUME="auto", TRAINING=training + LOG % "true" + "mkdir -p $run")
    hints = re.findall(r"^to replace it in the series: (.*)$", done.stdout, re.M)
    assert (len(hints), len(asked)) == (2, 2)
    removed, again = hints[1].split(" && ")
    assert again.startswith(f"RESUME=auto LOGDIR={job['LOGDIR']} ")
    kept = {"run_0", "result_0.txt"}
    run_process("bash", "-c", removed, **job)
    assert {path.name for path in Path(job["LOGDIR"]).iterdir()} == kept
    inside = f"RESUME=auto LOGDIR=there {job['TREE']}/docker.sh"
    done, _ = run(NEXP="2", RESUME="auto", GO_ON_BY=inside, LOGDIR_OUTSIDE="there", TRAINING="true")
    assert f"rm -r there/run_0 there/result_0.txt && {inside}\n" in done.stdout


def test_each_run_has_a_seed_of_its_own(run):
    done, asked = run(NEXP="2", TRAINING="mkdir -p $LOGDIR/run_$((attempt - 1))")
    assert done.returncode == 0
    assert [line.split("run.seed=")[1].split()[0] for line in asked] == ["5", "6"]


def test_without_a_seed_the_runs_have_those_of_the_config(run, job):
    """If the config has none either, they are drawn. SEED comes first if both are set."""

    def seeds(name, **more):
        Path(job["ASKED"]).unlink(missing_ok=True)
        training = "mkdir -p $LOGDIR/run_$((attempt - 1))"
        _, asked = run(NEXP="2", TRAINING=training, LOGDIR=f"{job['LOGDIR']}_{name}", **more)
        return [int(line.split("run.seed=")[1].split()[0]) for line in asked]

    assert seeds("given", CONFIG_SEED="70") == [5, 6]
    del job["SEED"]
    assert seeds("config", CONFIG_SEED="70") == [70, 71]
    first, second = seeds("drawn")
    assert second not in (first, first + 1)


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ("--config cpu_tiny", "CONFIG"),
        ("--data=elsewhere", "DATADIR"),
        ("--run-dir elsewhere", "LOGDIR"),
        ("--run-index 5", "NEXP"),
        ("--set run.max_steps=3 --set run.seed=5", "SEED"),
        ("--set=run.seed=5", "SEED"),
    ],
)
def test_options_that_the_script_sets_itself(job, options, variable):
    command = ["bash", f"{job['TREE']}/run_and_time.sh", "--", *options.split()]
    done = run_process(*command, **job)
    assert done.returncode == 2 and not Path(job["ASKED"]).exists()
    assert " cannot follow --, " in done.stderr and f"; set {variable} before" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_new_run_starts_by_what_is_told_to_one_that_cannot_be_resumed(run, tmp_path):
    training = "mkdir -p $run; " + LOG % "false"
    _, (asked,) = run(RESUME="auto", TRAINING=training)
    (told,) = re.findall(r"--new-run-by (\S+=NEW \S+=\S+) ", asked)
    variables = dict(each.split("=") for each in told.split())
    variables["LOGDIR"] = str(tmp_path / "new")
    done, (_, again) = run(**{"RESUME": "auto", **variables}, TRAINING=training)
    assert done.returncode == 0 and "--resume" not in again
    assert f"--run-dir {tmp_path / 'new'} --run-index 0" in again


def test_a_requeued_job_finds_its_directory_and_goes_on(run, job):
    del job["LOGDIR"]
    directory = Path(job["TREE"]) / "runs/7-dgxa100_1x8x56x1"
    interrupted = "log=$run/interrupted/result_0_0.txt; " + LOG % "false"
    training = f"run={directory}/run_0; mkdir -p $run/interrupted; {interrupted} exit 75"
    _, (first,) = run(TRAINING=training)
    _, (_, second) = run(TRAINING="exit 75", SLURM_RESTART_COUNT="1")
    assert all(f"--run-dir {directory} --run-index 0" in asked for asked in (first, second))
    assert "--resume" not in first
    assert "--resume auto" in second
    assert "--set run.seed=42" in second


def test_a_checkpoint_is_gone_on_from_once(run, tmp_path):
    """After that the run has checkpoints of its own."""
    checkpoint = tmp_path / "step_00000120"
    checkpoint.mkdir()
    for requeued in ("0", "1", "1"):
        training = "[ $attempt = 1 ] || mkdir -p $run; exit 1"
        _, asked = run(RESUME=str(checkpoint), SLURM_RESTART_COUNT=requeued, TRAINING=training)
    assert [line.split("--resume ")[1].split()[0] for line in asked] == [
        *(str(checkpoint), str(checkpoint)),
        "auto",
    ]
    assert ["run.seed" in line for line in asked] == [False, False, True]
    done, _ = run(RESUME=str(checkpoint), NEXP="2")
    assert done.returncode == 2
    assert "NEXP: 2 runs cannot resume from one checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CLEAR_CACHES", "yes", "CLEAR_CACHES: 'yes' is neither 1 nor 0"),
        ("INIT_CHECKPOINT", "nowhere", "INIT_CHECKPOINT: no such directory 'nowhere'"),
        ("SEED", "-1", "SEED: '-1' is not a non-negative integer"),
        ("SLURM_JOB_NUM_NODES", "", "SLURM_JOB_NUM_NODES: not set although SLURM_JOB_ID is"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_made(run, job, variable, value, said):
    done, asked = run(**{variable: value})
    assert (done.returncode, asked) == (2, []) and said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path(job["LOGDIR"]).exists()


def test_a_pipe_in_place_of_a_log_is_refused(run, job):
    log = Path(job["LOGDIR"]) / "result_0.txt"
    log.parent.mkdir()
    os.mkfifo(log)
    done, asked = run()
    assert (done.returncode, asked) == (2, []) and f"{log}: not a regular file" in done.stderr


def test_a_run_that_had_ended_has_no_result_of_now(run, job):
    logs = Path(job["LOGDIR"])
    logs.mkdir()
    (logs / "result_0.txt").write_text('{"key": "seed", "value": 42, "metadata": {}}\n')
    done, _ = run(RESUME="auto")
    assert "no RESULT for run 0, because it had ended before this start\n" in done.stdout
    assert "RESULT,bert" not in done.stdout


def test_the_checkers_report_is_not_written_through_a_link(run, job, tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    training = LOG % "false" + f"mkdir -p $run; ln -s {target} $run/compliance.txt"
    assert run(TRAINING=training)[0].returncode == 0
    assert target.read_text() == "kept"
    assert not (Path(job["LOGDIR"]) / "run_0/compliance.txt").is_symlink()


@pytest.mark.parametrize("trained", ["0", "3"])
def test_a_log_that_the_checker_refuses_is_a_failure(run, job, trained):
    """Without SLURM; training is not asked, MLCommons' own checker is."""
    logs = Path(job["LOGDIR"])
    (logs / "run_0").mkdir(parents=True)
    (logs / "result_0.txt").write_text(
        ':::MLLOG {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", '
        '"key": "seed", "value": 5, "metadata": {"file": "a.py", "lineno": 1}}\n'
    )
    del job["SLURM_JOB_ID"]
    assert run(TRAINED=trained)[0].returncode == int(trained)
    done, _ = run(TRAINED=trained, CHECKER=sys.executable)
    assert done.returncode == FAULT
    assert "Required EXACTLY_ONE" in done.stderr and "accepted" not in done.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_the_ranks_of_mpiexec_the_first_speaks_and_checks(run, job, tmp_path, rank):
    del job["SLURM_JOB_ID"], job["SLURM_JOB_NUM_NODES"]
    ranks = {"SIZE": "2", "RANK": rank, "LOCAL_SIZE": "2", "LOCAL_RANK": rank}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in ranks.items()}
    training = "mkdir -p $run; " + LOG % "false"
    done, _ = run(TRAINING=training, NOTES=str(tmp_path / "notes"), **environ)
    asked = (tmp_path / "notes").read_text()
    assert done.returncode == 0 and "mlperf_bert train " in asked, done.stderr
    found = ["RESULT,bert,42," in done.stdout, "compliance_checker" in asked, done.stdout != ""]
    assert found == [rank == "0"] * 3


def test_a_status_is_told_by_the_file_of_this_run_alone(run, job):
    """A signal came before the first step: srun kills the other ranks then, and says that."""
    first = f"{job['LOGDIR']}_first"
    done, asked = run(LOGDIR=first, TRAINING="echo 75 >$LOGDIR/status_0; exit 137")
    assert (done.returncode, len(asked)) == (75, 1)
    for told in ("", "75 75", "none"):
        training = LOG % "false" + f"mkdir -p $run; echo '{told}' >$LOGDIR/status_0"
        done, _ = run(TRAINING=training)
        assert (done.returncode, done.stderr) == (0, "")
    (Path(job["LOGDIR"]) / "status_0").write_text("75\n")  # left by another launcher
    del job["SLURM_JOB_ID"]  # without one no file is asked for: training's own status counts
    assert run()[0].returncode == 0

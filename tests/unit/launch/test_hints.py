"""Each command that a run prints does its work, typed into the shell that started the run."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlperf_bert.errors import TARGET_MISSED
from resume_cases import run_train
from support import REPOSITORY, write_program

HINT = re.compile(r"^to [a-z ]+: (.+)$", re.MULTILINE)
PYTHON, RUN = shlex.quote(sys.executable), shlex.quote(f"{REPOSITORY}/run_and_time.sh")
TRAIN = f"{PYTHON} -m mlperf_bert train --config \"$CONFIG\" --data 'the data' --run-dir 'a run'"
SCRIPT = f"LOGDIR='a run' DATADIR='the data' PYTHON={PYTHON} {RUN} --"
TASKS = "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS"
# Busy with the text the first time.
STAND_IN = """#!/bin/sh
case "$*" in
*" prepare "*) [ -e "$0.busy" ] || { echo >"$0.busy"; exec sleep 20; } ;;
*" config get "*) echo embedded text open 1 1 ;;
*" train "*) echo "$*"; exit 75 ;;
*) echo 7 ;;
esac
"""
# Long enough to be stopped on the way, short enough to be gone on with to its end.
SETTINGS = {
    "run.max_steps": "150",
    "run.log_interval_steps": "5",
    "eval.interval_samples": "2400",
    "eval.target_accuracy": "none",
    "mlperf.submission_org": "'an org'",
}


def foreign_path():
    """The directories of PATH without that of our programs."""
    own = str(Path(sys.executable).parent)
    return ":".join(path for path in os.environ["PATH"].split(":") if path != own)


def shell(command, directory):
    """Begin a command in a shell that finds no program of ours by its short name."""
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, "PATH": foreign_path(), "CLEAR_CACHES": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def said(process, *statuses):
    output, _ = process.communicate(timeout=120)
    assert process.returncode in statuses, output
    return output


def interrupted(process, sign, status):
    """What has been said by a process that Ctrl-C ended once there was something in that file."""
    while not (sign.exists() and sign.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return said(process, status)


def type_all(output, directory):
    """Type every hint; by its command's name what that has said."""
    hints = HINT.findall(output)
    begun = [(hint, shell(hint, directory)) for hint in hints]
    return {hint: said(process, 0) for hint, process in begun}


@pytest.mark.parametrize(
    ("given", "launcher"),
    [
        ("", ""),
        (f"{TASKS}=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 ", "mpiexec -n 2 "),
        (f"{TASKS}=1 PMI_SIZE=4 PMI_RANK=0 ", "mpiexec -n 4 "),
        (f"{TASKS}=1 PMI_SIZE=2 PMI_RANK=0 MASTER_PORT=4000 ", "MASTER_PORT=4000 mpiexec -n 2 "),
        (f"{TASKS}=4 PMI_SIZE=4 PMI_RANK=0 ", "srun -n 4 "),
        (f"{TASKS}=1 PMI_SIZE=1 PMI_RANK=0 ", ""),
    ],
)
def test_after_ctrl_c_before_training(given, launcher, tmp_path):
    python = write_program(tmp_path / "python", STAND_IN)
    start = f"{given}LOGDIR='a run' PYTHON={shlex.quote(str(python))} {RUN}"
    process = shell(f"{start} -- --set a.b='c d'", tmp_path)
    stopped = interrupted(process, python.with_suffix(".busy"), 130)
    assert stopped.startswith("cpu_tiny, 3 steps: text, train, check\n")
    (going_on,) = HINT.findall(stopped)
    assert f" {launcher}{REPOSITORY}/run" in " ".join(shlex.split(going_on))
    trains = said(shell(going_on.replace(launcher, ""), tmp_path), 75)
    assert re.search(r" train .*--run-dir a run .*--resume auto .* --set a\.b=c d$", trains, re.M)


@pytest.mark.real
@pytest.mark.parametrize("start", [TRAIN, SCRIPT], ids=["train", "script"])
def test_after_ctrl_c_and_after_the_end(start, synthetic_data, tiny_config, tmp_path):
    (tmp_path / "the data").symlink_to(synthetic_data)
    sets = " ".join(f"--set {name}={value}" for name, value in SETTINGS.items())
    config = f"CONFIG={shlex.quote(str(tiny_config))}"
    command = f"export {config}; exec {start}" if start == TRAIN else f"{config} {start}"
    process = shell(f"{command} {sets}", tmp_path)
    stopped = interrupted(process, tmp_path / "a run/run_0/metrics.jsonl", 75)
    assert re.search(r"^stopped by SIG(INT|TERM) after [\d,]+ samples", stopped, re.MULTILINE)
    (_, going_on) = HINT.findall(stopped)
    ended = said(shell(going_on, tmp_path), 0)
    assert re.search(r"^150 steps, 2,400 samples, [\d.]+ s of training; accuracy 0", ended, re.M)
    assert "target" not in ended.replace("no target", "") and "RESULT," not in ended
    if start == SCRIPT:
        assert (
            "ruleset 5.0.0: a run/result_0.txt (no result, because the run had no target)\n"
            in ended
        )
    watched, reported, filled = type_all(ended, tmp_path).values()
    assert "finished, no target" in watched
    assert "finished, no target" in reported
    assert (tmp_path / "a run/run_0/report.html").is_file()
    assert re.search(r"^0\.\d{4}  \S+$", filled, re.MULTILINE)


def test_after_a_missed_target(synthetic_data, tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", foreign_path())
    assert run_train(tiny_config, synthetic_data, tmp_path / "a run") == TARGET_MISSED
    output = capsys.readouterr().out
    assert re.search(r"^target NOT reached after 320 samples, .*; accuracy 0\.\d+ of", output, re.M)
    watched, reported = type_all(output, tmp_path).values()
    assert "target missed" in watched and "run_0: target missed" in reported

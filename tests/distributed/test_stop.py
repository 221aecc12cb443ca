"""A signal to run_and_time.sh alone reaches the ranks, which end the run in order.

SIGTERM, SIGUSR1 and a container's: tests/slurm and tests/container.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import REPOSITORY


def test_the_shell_passes_ctrl_c_on(
    synthetic_data: Path, tiny_config: Path, tmp_path: Path
) -> None:
    endless = ("run.max_steps=1000000", "eval.interval_samples=100000000")
    two_ranks = ("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
    sets = [word for setting in (*endless, *two_ranks) for word in ("--set", setting)]
    settings = {"CONFIG": tiny_config, "DATADIR": synthetic_data, "LOGDIR": tmp_path / "run"}
    output = tmp_path / "output"
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["./run_and_time.sh", "--", *sets],
            cwd=REPOSITORY,
            env={
                **os.environ,
                **{name: str(value) for name, value in settings.items()},
                "PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "CLEAR_CACHES": "0",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            # A shell cannot trap what was ignored when it began, as under nohup.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        end_by_ctrl_c(shell, output)
    finally:
        shell.terminate()
    log = (tmp_path / "run/result_0.txt").read_text()
    assert '"status": "aborted"' in log.splitlines()[-1]
    assert (tmp_path / "run/run_0/checkpoints/LATEST").exists()


def end_by_ctrl_c(shell: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not re.search(r"^step \d+/", output.read_text(), re.MULTILINE):
        assert time.monotonic() < deadline, output.read_text()
        assert shell.poll() is None, output.read_text()
        time.sleep(0.1)
    shell.send_signal(signal.SIGINT)
    assert shell.wait(timeout=60) == 75, output.read_text()
    assert re.search(r"^SIGTERM received: stopped after step \d+", output.read_text(), re.MULTILINE)

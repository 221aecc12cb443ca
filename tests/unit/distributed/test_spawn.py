"""Which of the ranks of this machine failed first, and that none outlives the one that watches."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mlperf_bert.distributed import spawn


def failure(exit_status: int, at: int) -> ProcessFailure:
    found = ProcessFailure(local_rank=0, pid=7, exitcode=exit_status, error_file="")
    found.timestamp = at
    return found


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: failure(1, 11), 1: failure(2, 10)}, 1),
        ({0: failure(70, 10), 1: failure(-9, 10)}, 1),  # rank 0 only saw that 1 was gone
        ({0: failure(70, 10), 1: failure(70, 10)}, 0),
        ({0: failure(70, 10), 1: failure(-9, 41)}, 0),  # the agent's own SIGKILL
        ({0: failure(70, 10), 1: failure(-15, 10)}, 0),  # and its SIGTERM
        ({0: failure(-9, 10), 1: failure(70, 10)}, 0),
    ],
)
def test_who_failed_first(failures: dict[int, ProcessFailure], first: int) -> None:
    assert spawn._first(failures) == (first, failures[first])


@pytest.mark.parametrize(
    ("exit_status", "words"),
    [(-9, "was killed by SIGKILL"), (1, "ended with status 1")],
)
def test_the_first_cause_is_a_line(
    exit_status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spawn._say_first_cause(1, failure(exit_status, 0))
    assert capsys.readouterr().err == f"mlperf_bert: first cause: rank 1 (pid 7) {words}\n"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import time
from mlperf_bert.end_with_parent import end_with_parent
end_with_parent()
print("begun", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux's")
def test_a_rank_is_gone_with_the_agent_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        begun, child = parent.stdout.readline().split()
        assert begun == "begun"
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=20)
        assert _is_gone(Path("/proc", child))


def _is_gone(process: Path) -> bool:
    """Soon, or left for its new parent to be seen."""
    for _ in range(100):
        if not process.exists() or "State:\tZ" in (process / "status").read_text():
            return True
        time.sleep(0.05)
    return False

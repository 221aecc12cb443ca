"""A launcher killed by SIGKILL at any moment of the start leaves no rank behind.

Left out by ./run_tests.sh: `make test-real` has five kills, `make test-slow` twenty.
"""

import random
import sys
import time
from pathlib import Path

import pytest
from campaign import STARTS_WITHIN_S, Setup
from jobs import LEAVING_S, kill
from runs import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux's parents and children")
SEED = 20261123


def leaves_none(setup: Setup, root: Path, wait_s: float) -> str:
    """Kill the launcher so long after its first rank began; what the ranks were at then."""
    run = Run(root)
    with setup.start(run) as job:
        job.wait_until(lambda: len(job.processes()) > 1, STARTS_WITHIN_S)
        time.sleep(wait_s)
        phase = f"{len(job.processes()) - 1} ranks, step {run.last_step()}"
        kill(job.process.pid)
        job.process.wait()
        deadline = time.monotonic() + LEAVING_S
        while left := job.processes():
            assert time.monotonic() < deadline, f"left after {wait_s:.3f} s: {left.keys()}"
            time.sleep(0.05)
    return phase


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that is killed leaves the directory where its ranks met."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.real
def test_no_rank_is_left(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    setup = Setup(*tiny, ranks=2)
    for number, wait_s in enumerate((0, 0.002, 0.01, 0.05, 0.5)):
        leaves_none(setup, tmp_path / f"run-{number}", wait_s)


@pytest.mark.longest
def test_no_rank_is_left_after_twenty_kills(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    setup = Setup(*tiny, ranks=2)
    draw = random.Random(SEED)
    for number in range(20):
        wait_s = draw.choice((0.01, 0.1, 1, 10)) * draw.random()
        phase = leaves_none(setup, tmp_path / f"run-{number}", wait_s)
        print(f"killed {wait_s:.3f} s after the first rank began: {phase}; nothing left")

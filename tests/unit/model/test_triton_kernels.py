"""Triton's kernels, interpreted and compiled without a GPU, do what their references do."""

import importlib.util
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, run_process

JOB = Path(__file__).with_name("triton_jobs.py")
PLACES = ("tests", "tests/unit/model", "tools", "benchmarks/bert/implementations/pytorch")


@pytest.mark.parametrize("job", ["attention", "blocks", "dropout", "fp8", "updates", "compile"])
def test_triton_kernels(job: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: its kernels are not run here")
    environ = {
        "TRITON_INTERPRET": str(int(job != "compile")),
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(str(REPOSITORY / place) for place in PLACES),
    }
    done = run_process(sys.executable, JOB, job, **environ)
    assert done.returncode == 0, done.stderr

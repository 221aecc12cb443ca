"""Requirements of all GPU tests: a GPU, and a time limit, TEST_LIMIT_S of `tools/gpu_check.sh`.

A test that hangs in a kernel cannot be interrupted, so its process ends, with a traceback.
"""

import faulthandler
import os

import pytest
import torch

LIMIT_S = float(os.environ.get("TEST_LIMIT_S", "0"))
STDERR = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # pytest puts a file in its place while a test runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if not LIMIT_S:
        return (yield)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Before all other fixtures."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: nothing of tests/gpu is run here")


@pytest.fixture
def triton():
    """Builds of torch without CUDA have none."""
    pytest.importorskip("triton", reason="triton is not installed")

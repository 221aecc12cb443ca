"""Data sets and configs made once a test session, and how its failures are shown."""

import gc
import importlib
import pickle
import signal

import pytest
from filelock import FileLock

from forked_ranks import free_port
from support import REDUCED, TINY_CONFIG, copy_checkout, make_synthetic_data, run_shell

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, also by what tests start


def pytest_report_teststatus(report):
    """Name a failed test as it fails, and count apart from skips what only a GPU can run."""
    if report.failed:
        category, word = ("failed", "FAILED") if report.when == "call" else ("error", "ERROR")
        return category, f"\n{word} {report.nodeid}\n", word
    if report.skipped and "no CUDA device" in str(report.longrepr):
        return "not run for want of a GPU", "g", "NEEDS A GPU"
    return None


def pytest_collection_finish():
    """A run collects garbage as it ends: half of its time, where all of torch is searched."""
    importlib.import_module("hypothesis")  # which looks for the holders of what it is given
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory):
    """Prepared train/ and eval/ sets of made-up words."""
    return make_synthetic_data(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory):
    """A config of 20 steps that fits the synthetic data."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY_CONFIG, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(synthetic_data, tiny_config):
    """Both of them."""
    return synthetic_data, tiny_config


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory, worker_id):
    """One directory for all processes of this test session."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def checkout(shared_directory):
    """A copy of the repository to run the README's commands in, one for all processes."""
    target = shared_directory / "checkout"
    with FileLock(shared_directory / "checkout.lock"):
        return target if target.exists() else copy_checkout(target)


@pytest.fixture(scope="session")
def cpu_tiny_run(checkout, shared_directory):
    """`./run_and_time.sh` as it stands in the README, run once, to a reduced target.

    tests/slurm runs the same config to its own target.
    """
    kept = shared_directory / "cpu_tiny_run.pickle"
    with FileLock(shared_directory / "cpu_tiny_run.lock"):
        if not kept.exists():
            run = run_shell(f"./run_and_time.sh --{REDUCED}", checkout, timeout=900)
            kept.write_bytes(pickle.dumps(run))
        done = pickle.loads(kept.read_bytes())
    return done


@pytest.fixture
def port(monkeypatch):
    """A free port that MASTER_PORT names, and no launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    number = free_port()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", number)
    return int(number)

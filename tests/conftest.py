"""Data sets and configs made once a test session."""

import subprocess
from pathlib import Path

import pytest

from support import TINY_CONFIG, copy_checkout, make_synthetic_data, run_shell


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared train/ and eval/ sets of made-up words."""
    return make_synthetic_data(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of 20 steps that fits the synthetic data."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY_CONFIG, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to run the README's commands in."""
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def cpu_tiny_run(checkout: Path) -> subprocess.CompletedProcess[str]:
    """`./run_and_time.sh` as it stands in the README, run once to its full target (minutes)."""
    return run_shell("./run_and_time.sh", checkout, timeout=900)

"""Data sets and configs made once a test session."""

from pathlib import Path

import pytest
from support import TINY_CONFIG, make_synthetic_data


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

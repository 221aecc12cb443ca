"""The data and config of the jobs of these tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(synthetic_data: Path, tiny_config: Path) -> tuple[Path, Path]:
    """Data, and a config that fits them."""
    return synthetic_data, tiny_config

"""The good pair of sets, and copies of it."""

from pathlib import Path

import pytest

from verify_cases import copy_of, make_pair


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good pair; tests change copies."""
    return make_pair(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return copy_of(made, tmp_path)

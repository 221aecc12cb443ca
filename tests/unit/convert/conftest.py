"""Vocabulary and held-out set that small models of these tests belong to."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def words(synthetic_data: Path) -> Path:
    """The vocabulary of the synthetic data: 69 words, so that 3 rows pad the embedding."""
    return synthetic_data / "eval" / "vocab.txt"

"""The data and config of the jobs of these tests."""

import pytest


@pytest.fixture(scope="session")
def tiny(synthetic_data, tiny_config):
    """Data, and a config that fits them."""
    return synthetic_data, tiny_config

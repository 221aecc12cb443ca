"""Vocabulary and held-out set that small models of these tests belong to."""

import pytest
from huggingface_cases import save_theirs


@pytest.fixture(scope="session")
def words(synthetic_data):
    """The vocabulary of the synthetic data: 69 words, so that 3 rows pad the embedding."""
    return synthetic_data / "eval" / "vocab.txt"


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A saved BertForPreTraining, which tests must not change."""
    folder = tmp_path_factory.mktemp("plain") / "bert"
    save_theirs(folder, "BertForPreTraining")
    return folder


@pytest.fixture(scope="session")
def modern(tmp_path_factory):
    """A saved ModernBertForMaskedLM, which tests must not change."""
    folder = tmp_path_factory.mktemp("modern") / "theirs"
    save_theirs(folder, "ModernBertForMaskedLM")
    return folder

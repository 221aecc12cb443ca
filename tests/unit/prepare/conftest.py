"""Small texts and what is made of them: one call that prepares them, files of others, a pair."""

import pytest

from import_cases import NAMES, SMALL, VOCAB, make_foreign, make_from_text
from support import prepare_small
from verify_cases import copy_of, make_pair


@pytest.fixture
def prepare(tmp_path):
    """`prepare_text` as of `from_text`; keyword arguments change its settings."""

    def call(paths, **changes):
        vocab, out = changes.pop("vocab", VOCAB), changes.pop("out", tmp_path / "set")
        return prepare_small(paths, vocab, out, **{**SMALL, "dupe_factor": 5, **changes})

    return call


@pytest.fixture(scope="session")
def from_text(tmp_path_factory):
    """A set that `prepare --text` made of two texts."""
    return make_from_text(tmp_path_factory.mktemp("from_text"))


@pytest.fixture(scope="session")
def texts(from_text):
    """Both, of several documents each."""
    return [from_text.parent / f"{name}.txt" for name in NAMES]


@pytest.fixture(scope="session")
def foreign(from_text, tmp_path_factory):
    """Ending -> the examples of both shards of `from_text` as files of that kind."""
    return make_foreign(from_text, tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The good pair; tests change copies."""
    return make_pair(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def pair(made, tmp_path):
    """A copy to spoil."""
    return copy_of(made, tmp_path)

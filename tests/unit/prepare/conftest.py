"""Small texts and what is made of them: one call that prepares them, files of others, a pair."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from import_cases import make_foreign, make_from_text
from mlperf_bert.data.index import Manifest
from support import prepare_small
from verify_cases import copy_of, make_pair

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Two text files of several documents each."""
    documents = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8").split("\n\n")
    paths = [tmp_path / "part-00000.txt", tmp_path / "part-00001.txt"]
    for number, path in enumerate(paths):
        path.write_text("\n\n".join(documents[number::2]), encoding="utf-8")
    return paths


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., Manifest]:
    """`prepare_text` with small settings; keyword arguments change them."""

    def call(paths: list[Path], **changes: Any) -> Manifest:
        options = {"max_seq_length": 64, "max_predictions": 10, "dupe_factor": 3}
        vocab = changes.pop("vocab", GOLDEN / "own_vocab.txt")
        out = changes.pop("out", tmp_path / "set")
        return prepare_small(paths, vocab, out, **{**options, **changes})

    return call


@pytest.fixture(scope="session")
def from_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that `prepare --text` made of two texts."""
    return make_from_text(tmp_path_factory.mktemp("from_text"))


@pytest.fixture(scope="session")
def foreign(from_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Ending -> the examples of both shards of `from_text` as files of that kind."""
    return make_foreign(from_text, tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good pair; tests change copies."""
    return make_pair(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return copy_of(made, tmp_path)

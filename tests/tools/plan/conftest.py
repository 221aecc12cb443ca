"""A length histogram and a working directory for every test of `mlperf_bert plan`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def histogram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few thousand samples in all four strata of 512 tokens."""
    path = tmp_path_factory.mktemp("histogram") / "lengths.csv"
    rows = [f"{length},{20 + length % 7}" for length in range(8, 513, 4)]
    path.write_text("\n".join(["length,count", *rows]), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path

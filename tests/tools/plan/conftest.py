"""Questions to `mlperf_bert plan`, each in a directory of its own."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlperf_bert.__main__ import main


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The output of a question, or its one error line; text is split as a shell does, no path."""

    def of(*words: object, status: int = 0) -> str:
        asked = ["plan"]
        for each in words:
            asked += [str(each)] if isinstance(each, Path) else shlex.split(str(each))
        assert main(asked) == status
        said = capsys.readouterr()
        if status:
            assert said.out == "" and said.err.count("\n") == 1
        return said.err if status else said.out

    return of


@pytest.fixture
def asked(told: Callable[..., str]) -> Callable[..., Any]:
    """The facts of a question's --json."""

    def of(*words: object) -> Any:
        found = json.loads(told(*words, "--json"))
        assert found["schema_version"] == 1
        return found

    return of

"""Questions to `mlperf_bert plan`, each in a directory of its own."""

import json
import shlex
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.errors import typed


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(capsys):
    """The output of a question, or its one error line; text is split as a shell does, no path.

    A command in the output begins with `mlperf_bert`, as it does if the shell finds this program.
    """

    def of(*words, status=0):
        asked = ["plan"]
        for each in words:
            asked += [str(each)] if isinstance(each, Path) else shlex.split(str(each))
        assert main(asked) == status
        said = capsys.readouterr()
        if status:
            assert said.out == "" and said.err.count("\n") == 1
        return said.err if status else said.out.replace(typed(), "mlperf_bert")

    return of


@pytest.fixture
def asked(told):
    """The facts of a question's --json."""

    def of(*words):
        found = json.loads(told(*words, "--json"))
        assert found["schema_version"] == 1
        return found

    return of

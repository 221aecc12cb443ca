"""`report` and `watch` as a user meets them."""

import pytest

from mlperf_bert.__main__ import main


@pytest.fixture
def told(capsys):
    """The output of a command, or its one error line."""

    def of(*words, status=0):
        assert main([str(word) for word in words]) == status
        said = capsys.readouterr()
        if status == 2:
            assert said.out == "" and said.err.count("\n") == 1 and said.err[:-1].isprintable()
        return said.err if status == 2 else said.out

    return of

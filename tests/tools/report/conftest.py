"""`report` and `watch` as a user meets them."""

from collections.abc import Callable

import pytest

from mlperf_bert.__main__ import main


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The output of a command, or its one error line."""

    def of(*words: object, status: int = 0) -> str:
        assert main([str(word) for word in words]) == status
        said = capsys.readouterr()
        if status == 2:
            assert said.out == "" and said.err.count("\n") == 1 and said.err[:-1].isprintable()
        return said.err if status == 2 else said.out

    return of

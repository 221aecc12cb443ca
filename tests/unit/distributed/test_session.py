"""A rank's time in the process group: nothing that holds the group outlives it."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from mlperf_bert.distributed import session
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import DataError, UserError

ALONE = RankInfo(0, 1, 0, 1, 0, "single")


class Wrapped:
    """As DistributedDataParallel, it is part of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


def returns(wrapped: Wrapped) -> int:
    assert wrapped.itself is wrapped
    return 0


def raises(wrapped: Wrapped) -> int:
    assert wrapped.itself is wrapped
    raise DataError("a", "b", "c")


def raises_for_another(wrapped: Wrapped) -> int:
    try:
        return raises(wrapped)
    except UserError:
        raise DataError("d", "e", "f") from None


@pytest.fixture
def without_luck() -> Iterator[None]:
    """The collector does not come by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_luck")
@pytest.mark.parametrize("end", [returns, raises, raises_for_another])
def test_what_a_run_built_is_gone_before_the_group(
    end: Callable[[Wrapped], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[Wrapped]] = []
    alive: list[bool] = []
    monkeypatch.setattr(session, "shutdown", lambda: alive.append(built[0]() is not None))

    def run(info: RankInfo, device: torch.device) -> int:
        wrapped = Wrapped()
        built.append(weakref.ref(wrapped))
        return end(wrapped)

    if end is returns:
        assert session.in_session(run, "cpu", "refuse", ALONE) == 0
    else:
        with pytest.raises(DataError):
            session.in_session(run, "cpu", "refuse", ALONE)
    assert alive == [False]

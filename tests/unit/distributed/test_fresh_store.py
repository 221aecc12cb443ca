"""Ranks that torchrun restarted meet those who are there now, whatever the store still holds."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mlperf_bert.common.errors import LostRanksError
from mlperf_bert.distributed.fresh_store import fresh_store

PATIENCE = timedelta(seconds=20)


def meet(store: dist.Store, order: list[int], address: str) -> dict[int, str]:
    """What each rank, started in this order, reads of an address that rank 0 sets."""
    found: dict[int, str] = {}
    lock = threading.Lock()

    def be(rank: int) -> None:
        fresh = fresh_store(store, rank, len(order), PATIENCE)
        if rank == 0:
            fresh.set("address", address)
        with lock:
            found[rank] = fresh.get("address").decode()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_attempt_has_a_store_of_its_own(order: list[int]) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for attempt in range(3):
        found = meet(store, order, f"attempt {attempt}")
        assert found == dict.fromkeys(order, f"attempt {attempt}")


def test_a_rank_of_an_attempt_that_failed_early_does_not_confuse_the_next() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(LostRanksError, match="not all met"):
        fresh_store(store, 0, 3, timedelta(seconds=0.2))  # its question stays behind
    assert meet(store, [1, 2, 0], "here") == dict.fromkeys((1, 2, 0), "here")

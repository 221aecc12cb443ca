"""A store of their own for the ranks of one attempt, where torchrun may restart them.

torchrun gives restarted ranks the store of those before (torch 2.13), with addresses of processes
that are gone: who reads one before its new owner has replaced it cannot connect. Nothing in a
rank's environment tells attempts apart on all nodes alike, so rank 0 asks who is there now.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from mlperf_bert.common.errors import LostRanksError

POLL_S = 0.05
_QUESTION = "mlperf_bert/who is there"


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """`store` with a prefix that all ranks have agreed on just now; each of them calls it.

    Rank 0 asks under a name that nobody has used. Whoever sees the question answers it with a name
    of its own, and has met the others when that is called. One that has seen a question of an
    earlier attempt is not called, and goes on looking for the next. Raises LostRanksError where not
    all have met in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    if rank == 0:
        store.set(_QUESTION, own)
        answers = [f"{own}/{other}" for other in range(1, world_size)]
        while answers and not store.check(answers):
            _wait(rank, deadline)
        for answer in answers:
            store.set(f"{own}/met/{store.get(answer).decode()}", "")
        return PrefixStore(own, store)
    while True:
        if store.check([_QUESTION]):
            name = store.get(_QUESTION).decode()
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/met/{own}"]):
                return PrefixStore(name, store)
        _wait(rank, deadline)


def _wait(rank: int, deadline: float) -> None:
    if time.monotonic() > deadline:
        problem = "the ranks have not all met in time"
        remedy = "look for one that did not start, or raise run.hang_timeout_s"
        raise LostRanksError(f"rank {rank}", problem, remedy)
    time.sleep(POLL_S)

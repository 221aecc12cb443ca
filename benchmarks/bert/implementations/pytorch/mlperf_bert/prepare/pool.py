"""Jobs done by worker processes, or by this one where a second would be of no use."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from mlperf_bert.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")


def finished(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, *, died: str
) -> Iterator[tuple[Job, Result]]:
    """Each job with `function(job)`, in the order in which they end; no result is kept.

    Raises what `function` raises, and DataError with the problem `died` when a worker dies.
    """
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, function(job)
        return
    # spawn: a forked child would inherit the locks of whatever threads the caller runs.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        futures = {pool.submit(function, job): job for job in jobs}
        try:
            for future in as_completed(list(futures)):
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise DataError("workers", died, "use fewer and run again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

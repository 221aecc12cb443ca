"""Jobs done by worker processes, or by this one if a second process would not help."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TextIO, TypeVar

from mlperf_bert.errors import DataError
from mlperf_bert.run.console import count_bytes

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_with_progress(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int,
    *,
    sizes: Sequence[int],
    words: tuple[str, str],
    quiet: bool,
    stream: TextIO | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Yield each job with `function(job)`, in the order in which they end; no result is kept.

    Shows lines of its progress unless `quiet`: `sizes` are the jobs' bytes; `words` and `stream`
    are those of `count_bytes`. Raises the errors of `function`, and DataError when a worker dies.
    Ctrl-C reaches only this process, which then ends the workers: jobs must tolerate that.
    """
    advance = count_bytes(len(jobs), sum(sizes), words=words, stream=stream)
    if workers == 1 or len(jobs) <= 1:
        for job, size in zip(jobs, sizes, strict=True):
            yield job, function(job)
            if not quiet:
                advance(size)
        return
    # spawn: a forked child would inherit locks of the caller's threads.
    context = multiprocessing.get_context("spawn")
    with _holding_back(signal.SIGHUP):
        resource_tracker.ensure_running()  # started later, it would not hold Ctrl-C back
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        try:
            with _holding_back(signal.SIGINT, signal.SIGHUP):  # what was held comes at its end
                pairs = zip(jobs, sizes, strict=True)
                futures = {pool.submit(function, job): (job, size) for job, size in pairs}
            for future in as_completed(list(futures)):
                job, size = futures.pop(future)
                yield job, future.result()
                if not quiet:
                    advance(size)
        except BrokenProcessPool:
            problem = "a worker process died, most often for want of memory"
            raise DataError("workers", problem, "use fewer and run again") from None
        except (KeyboardInterrupt, GeneratorExit):
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _holding_back(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this process, and for good in processes that are started meanwhile.

    Otherwise each of them would print a traceback on Ctrl-C. The end of the terminal (SIGHUP) would
    kill them, and this process would report that as a fault.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

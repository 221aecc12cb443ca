"""Run jobs in worker processes, or in this process if more processes would not help."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

from mlperf_bert.errors import DataError
from mlperf_bert.run.console import ProgressLines

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_with_progress(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int,
    *,
    sizes: Sequence[int],
    activity: str,
    quiet: bool,
    stderr: bool = False,
) -> Iterator[tuple[Job, Result]]:
    """Yield each job with the result of `function(job)`, in the order in which the jobs finish.

    The function prints its progress, which begins with `activity`, to stdout or to stderr, unless
    `quiet` is True. `sizes` are the sizes of the jobs in bytes. Results are not kept after they are
    yielded.

    Ctrl-C reaches only this process, which then ends the workers, so a job can be interrupted at
    any time. Raises the errors of `function`, and DataError if a worker dies.
    """
    lines = ProgressLines(stderr=stderr, speaks=not quiet)
    advance = lines.counter(activity, "kB", sum(sizes) / 1e3)
    advance(0)
    if workers == 1 or len(jobs) <= 1:
        for job, size in zip(jobs, sizes, strict=True):
            yield job, function(job)
            advance(size / 1e3)
        return
    # Workers are spawned, because a forked child would inherit locks of the caller's threads.
    context = multiprocessing.get_context("spawn")
    with _blocked(signal.SIGHUP):
        resource_tracker.ensure_running()  # If started later, it would not block Ctrl-C.
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        try:
            with _blocked(signal.SIGINT, signal.SIGHUP):  # They arrive when the block ends.
                pairs = zip(jobs, sizes, strict=True)
                futures = {pool.submit(function, job): (job, size) for job, size in pairs}
            for future in as_completed(list(futures)):
                job, size = futures.pop(future)
                yield job, future.result()
                advance(size / 1e3)
        except BrokenProcessPool:
            problem = "a worker process died, probably because there was not enough memory"
            raise DataError("workers", problem, "run the command with fewer workers") from None
        except (KeyboardInterrupt, GeneratorExit):
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this process during the with block, and always in processes started there.

    Otherwise each worker would print a traceback at Ctrl-C. If the terminal is closed (SIGHUP), the
    signal would kill the worker, and this process would report that as an error.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

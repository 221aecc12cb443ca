"""Jobs done by worker processes, or by this one where a second would be of no use."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TextIO, TypeVar

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.file_progress import progress_of

Job = TypeVar("Job")
Result = TypeVar("Result")

WORKER_DIED = "a worker process died, most often for want of memory"


def finished_in_sight(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int,
    *,
    sizes: Sequence[int],
    label: Callable[[Job], str],
    words: tuple[str, str],
    quiet: bool,
    died: str = WORKER_DIED,
    stream: TextIO | None = None,
) -> Iterator[tuple[Job, Result]]:
    """As `finished`, with a display of the progress.

    `sizes` are the jobs' bytes, `label` is what the display calls one; `words` and `stream` are as
    `progress_of` takes them.
    """
    size_of = {id(job): size for job, size in zip(jobs, sizes, strict=True)}
    total = sum(sizes)
    with progress_of(len(jobs), total, quiet=quiet, words=words, stream=stream) as advance:
        for job, result in finished(function, jobs, workers, died=died):
            yield job, result
            advance(label(job), size_of[id(job)])


def finished_files(
    function: Callable[[Path], Result],
    paths: Sequence[Path],
    workers: int,
    words: tuple[str, str],
    *,
    quiet: bool,
) -> Iterator[tuple[Path, Result]]:
    """As `finished_in_sight`, for files that are there."""
    return finished_in_sight(
        function,
        paths,
        workers,
        sizes=[path.stat().st_size for path in paths],
        label=lambda path: path.name,
        words=words,
        quiet=quiet,
    )


def finished(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, *, died: str
) -> Iterator[tuple[Job, Result]]:
    """Each job with `function(job)`, in the order in which they end; no result is kept.

    Raises what `function` raises, and DataError with the problem `died` when a worker dies. Ctrl-C
    reaches this process alone, which then ends the workers: their jobs must bear that.
    """
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, function(job)
        return
    # spawn: a forked child would inherit the locks of whatever threads the caller runs.
    context = multiprocessing.get_context("spawn")
    with _holding_back(signal.SIGHUP):
        resource_tracker.ensure_running()  # which, started later, would let Ctrl-C through again
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        others = set(multiprocessing.active_children())
        with _holding_back(signal.SIGINT, signal.SIGHUP):
            futures = {pool.submit(function, job): job for job in jobs}
        workers_now = [each for each in multiprocessing.active_children() if each not in others]
        try:
            for future in as_completed(list(futures)):
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise DataError("workers", died, "use fewer and run again") from None
        except (KeyboardInterrupt, GeneratorExit):
            for worker in workers_now:
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _holding_back(*numbers: signal.Signals) -> Iterator[None]:
    """Hold signals back, here and, for as long as they live, from processes started here.

    Of Ctrl-C each of them would else say where it was, one that has just started as well; of the
    terminal's end (SIGHUP) they would die, and this process take that for a fault.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

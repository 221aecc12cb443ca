"""Capture a function of static tensors and replay it on CUDA, or call it on other devices."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


def finish_queued_work(device: torch.device) -> None:
    """Wait until the device has finished all queued work.

    A time measured after this call then includes that work.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Replay(Generic[Result]):
    """A function that is captured in a CUDA graph and replayed, or called on other devices.

    The constructor captures the function, and each call replays the graph. A captured function must
    not synchronize the host with the device, copy from the host or use a shape that depends on
    data. The function reads its inputs at the addresses of the capture, so callers must overwrite
    the inputs in place between calls. The next call overwrites the result.
    """

    def __init__(
        self,
        function: Callable[[], Result],
        device: torch.device,
        *,
        warm_up_calls: int = 1,
        stream: torch.cuda.Stream | None = None,
        pool: Any = None,
    ) -> None:
        """Capture the function if the device is a CUDA device. Otherwise, do not call it yet.

        Args:
            function: the function to capture. When it is called, `stream` is the current stream.
            device: device of all tensors that the function uses.
            warm_up_calls: number of ordinary calls before the capture, in which torch compiles and
                chooses kernels.
            stream: stream for the warm-up calls and the capture, or None for a new one. Build
                objects that require the capturing stream, such as DistributedDataParallel, on this
                stream.
            pool: memory pool for the graph's tensors, from torch.cuda.graph_pool_handle(), or None
                for a new one. Graphs that are captured on the same `stream` and never run at the
                same time can share a pool.

        If the function fails, the constructor raises the function's error instead of the error of
        the interrupted capture.
        """
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._capture(warm_up_calls, stream, pool)

    def __call__(self) -> Result:
        """Run the function once, and return its result.

        A captured function runs on the current stream, and the host does not wait for it.
        """
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def close(self) -> None:
        """Wait for all queued work, then free the graph and its memory. Call it only once.

        If the graph contains collective operations, call this method before their process group is
        destroyed.
        """
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            del self._result
            self._graph.reset()

    def _capture(self, warm_up_calls: int, stream: torch.cuda.Stream, pool: Any) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(warm_up_calls):
                self._function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # frees memory of unused cycles, which torch 2.11 no longer does
        with torch.cuda.stream(stream), _no_collection(), _capture_into(graph, stream, pool):
            self._result = self._function()
        self._graph = graph
        self._graph.replay()  # the first replay also uploads the graph to the device


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collection, which could free a graph and thereby break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _capture_into(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any
) -> Iterator[None]:
    """Capture like torch.cuda.graph, but raise the error of the with block if it fails.

    torch.cuda.graph would raise the error of the interrupted capture.
    """
    # Thread-local mode lets other threads, like the loader's, make CUDA calls during the capture.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    capture.__enter__()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            capture.__exit__(*sys.exc_info())
        raise
    capture.__exit__(None, None, None)

"""Capture a function of static tensors once and replay it on CUDA, or call it on other devices."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


def finish_queued_work(device: torch.device) -> None:
    """Wait for the device, so that a time measured after this call includes all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Replay(Generic[Result]):
    """Calls a function. On CUDA the constructor captures it, and each call replays the graph.

    A captured function must not contain a host sync, a copy from the host or a shape that depends
    on data. It reads its inputs at the addresses that they had during the capture, so callers
    overwrite them in place between calls. The next call overwrites the result.
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
        """Capture the function on a CUDA device. On other devices it is not called yet.

        Args:
            function: the function to capture. `stream` is current when it is called.
            device: device of all its tensors.
            warm_up_calls: real calls before the capture, in which kernels are compiled and chosen.
            stream: stream for these calls and the capture, or None for a new one. Objects that must
                be built on the capturing stream, like DistributedDataParallel, need to be built on
                this stream.
            pool: memory pool for the graph's tensors, from torch.cuda.graph_pool_handle(), or None
                for a new one. Graphs that are captured on the same `stream` and never run at the
                same time can share a pool.

        If the function fails, raises its own error instead of that of the interrupted capture.
        """
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._capture(warm_up_calls, stream, pool)

    def __call__(self) -> Result:
        """Run the function once, on the current stream if captured. The host does not wait."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def close(self) -> None:
        """Wait for all queued work, and free the graph and its memory. Call it only once.

        Call it before destroying the process group of captured collectives.
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
    """Disable garbage collection, because it could free a graph, which breaks a capture."""
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
    """Capture like torch.cuda.graph, but raise the body's error instead of the capture's."""
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

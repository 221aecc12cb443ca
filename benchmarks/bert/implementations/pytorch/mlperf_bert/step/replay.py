"""A function of static tensors: captured once and replayed, or simply called."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


def finish_queued_work(device: torch.device) -> None:
    """Wait for the device, so that a clock read after this call counts all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Replay(Generic[Result]):
    """A callable `function`; on CUDA it is captured at construction, and a call replays the graph.

    A captured function has no host sync, no copy from the host and no shape that depends on data.
    It reads its inputs at the addresses they had at construction, so callers overwrite them in
    place between calls. The next call overwrites the result.
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
        """Capture on a CUDA device; elsewhere the function is not called yet.

        Args:
            function: called with its own stream as the device's current one in warm-up and capture.
            device: device of all its tensors.
            warm_up_calls: real calls before the capture, in which kernels are compiled and chosen.
            stream: stream of these and the capture; a new one if None. Objects that must be built
                on the capturing stream, like DistributedDataParallel, are built on it.
            pool: memory of the graph's own tensors, from torch.cuda.graph_pool_handle(), shared
                with other graphs captured on the same `stream` that never run at the same time; a
                new one if None.

        Raises the function's own error, not that of the capture which it broke.
        """
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._capture(warm_up_calls, stream, pool)

    def __call__(self) -> Result:
        """Run once; a graph runs on the current stream. The host does not wait."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def close(self) -> None:
        """Free the graph and its memory once all queued work has run; call it once.

        Call it before the process group of captured collectives is destroyed.
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
        gc.collect()  # torch 2.11 no longer does: dead cycles must free their memory
        with torch.cuda.stream(stream), _no_collection(), _capture_into(graph, stream, pool):
            self._result = self._function()
        self._graph = graph
        self._graph.replay()  # the first one also sends the graph to the device


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch Python's garbage collection off: it might free a graph, which a capture forbids."""
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
    """torch.cuda.graph, but without the error about an invalid capture that it adds to others."""
    # Other threads, like the loader's, continue CUDA calls that a capture must not see.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    capture.__enter__()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            capture.__exit__(*sys.exc_info())
        raise
    capture.__exit__(None, None, None)

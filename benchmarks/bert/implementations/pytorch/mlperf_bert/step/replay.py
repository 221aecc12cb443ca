"""A function of tensors that stay where they are: captured once and replayed, or simply called."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


def finish_queued_work(device: torch.device) -> None:
    """Wait for the device, so that a clock read next to this means what it says."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Replay(Generic[Result]):
    """Calls `function`; on CUDA it is captured at construction, and a call replays the graph.

    A captured function has no host sync, no copy from the host and no shape that depends on data.
    It reads its inputs where they lay at construction, so these are overwritten in place between
    calls; its result is overwritten by the next call.
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
        """Capture where `device` is a CUDA device; elsewhere the function is not called yet.

        Args:
            function: what to run; the device's current stream is its own in warm-up and capture.
            device: of all its tensors.
            warm_up_calls: real calls before the capture, in which kernels are compiled and chosen.
            stream: for these and the capture; a new one if None. What has to be built on the
                capturing stream, as DistributedDataParallel, is built on this one.
            pool: memory of the graph's own tensors, by torch.cuda.graph_pool_handle(), shared with
                other graphs that are captured on the same `stream` and never run at the same time;
                a new one if None.

        Raises what the function raises, not what the end of a capture that it broke off says then.
        """
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._capture(warm_up_calls, stream, pool)

    def __call__(self) -> Result:
        """Run once, on the current stream where it is a graph; the host does not wait."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def close(self) -> None:
        """Give the graph and its memory back, when all that was queued has run; call it once.

        To be done before the process group that captured collectives belong to is destroyed.
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
        gc.collect()  # torch 2.11 no longer does: the graph's memory is then that of no dead cycle
        with torch.cuda.stream(stream), _no_collection(), _capture_into(graph, stream, pool):
            self._result = self._function()
        self._graph = graph
        self._graph.replay()  # the first one also sends the graph to the device


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collection, which might free another graph: a capture forbids it."""
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
    """torch.cuda.graph, which after an error inside raises its own: that the capture is invalid."""
    # Other threads, as the loader's, go on with CUDA calls that a capture must not see.
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    capture.__enter__()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            capture.__exit__(*sys.exc_info())
        raise
    capture.__exit__(None, None, None)

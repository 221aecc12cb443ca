"""Independent pieces of work side by side on a GPU; one after the other elsewhere."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

NUM_STREAMS = 4  # at most


def on_side_streams(
    work: Callable[[int], Tensor], count: int, device: torch.device
) -> list[Tensor]:
    """`work(0)` .. `work(count - 1)`, on CUDA dealt to side streams in turn.

    The side streams begin after what the current stream holds, and the current stream goes on
    after all of them; autograd runs each piece's backward on its own stream, with waits where the
    streams meet. All of that can be captured. What `work` reads must have been made on the current
    stream and must be held by the caller until this returns. A tensor of a side stream may be freed
    at any time: its memory goes back to that stream, whose next work waits for the current one.
    """
    if device.type != "cuda" or count == 1:
        return [work(number) for number in range(count)]
    current = torch.cuda.current_stream(device)
    streams = _side_streams(device)[:count]
    results = []
    for stream in streams:
        stream.wait_stream(current)
    for number in range(count):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(work(number))
    for stream in streams:
        current.wait_stream(stream)
    return results


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Always the same ones: every stream keeps the memory that was freed on it to itself."""
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]  # type: ignore[no-untyped-call]

"""A replayed function on CUDA, here a stand-in: warmed up, captured, replayed."""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from mlperf_bert.step.replay import Replay


@pytest.fixture
def events(monkeypatch):
    """The calls of the part of torch.cuda that a replay uses, in order."""
    found = []

    def note(event):
        return lambda *_: found.append(event)

    for name, value in (
        ("Stream", lambda: Stream("new", found)),
        ("CUDAGraph", lambda: SimpleNamespace(replay=note("replay"), reset=note("reset"))),
        ("stream", on_stream),
        ("graph", Capture),
        ("device", nullcontext),
        ("current_stream", lambda: Stream("current", found)),
        ("synchronize", note("synchronize")),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gc, "collect", note("collect"))  # a capture begins without dead cycles
    return found


class Stream:
    def __init__(self, name, events):
        self.name = name
        self.events = events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@contextmanager
def on_stream(stream):
    stream.events.append(f"on {stream.name}")
    try:
        yield
    finally:
        stream.events.append(f"off {stream.name}")


class Capture:
    """As torch.cuda.graph: after an error its own end fails, and it keeps the stream."""

    def __init__(self, _, *, stream, **options):
        self.events = stream.events
        self.options = options
        self.stream = on_stream(stream)

    def __enter__(self):
        self.stream.__enter__()
        self.events.append(f"capture {self.options}")

    def __exit__(self, kind, *error):
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.events.append("captured")
        self.stream.__exit__(kind, *error)


def test_on_cuda_it_is_warmed_up_captured_and_replayed(events):
    """No garbage is collected in a capture: freeing what lies on the device would fail there."""
    result = torch.tensor(3.0)

    def function():
        events.append("function" if gc.isenabled() else "without gc")
        return result

    replay = Replay(function, torch.device("cuda"), warm_up_calls=2, pool=(0, 1))
    assert events == [
        *("new waits for current", "on new", "function", "function", "off new"),
        *("current waits for new", "collect", "on new", "on new"),
        "capture {'pool': (0, 1), 'capture_error_mode': 'thread_local'}",
        *("without gc", "captured", "off new", "off new", "replay"),
    ]
    assert gc.isenabled()
    events.clear()
    assert replay() is replay() is result
    replay.close()
    assert events == ["replay", "replay", "synchronize", "reset"]


def test_an_error_inside_a_capture_is_the_one_that_is_raised(events):
    def function():
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise torch.OutOfMemoryError("no memory") from cause

    with pytest.raises(torch.OutOfMemoryError, match="no memory") as raised:
        Replay(function, torch.device("cuda"), warm_up_calls=0)
    assert isinstance(raised.value.__cause__, KeyError)
    assert events[-1] == "off new"  # what it left open is closed: no work goes there
    assert gc.isenabled()

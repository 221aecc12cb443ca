"""A replayed function: called off CUDA; on it (here a stand-in) warmed up, captured, replayed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mlperf_bert.replay import Replay


def test_without_cuda_every_call_runs_the_function() -> None:
    static = torch.tensor([1.0])
    calls = []

    def double() -> torch.Tensor:
        calls.append(1)
        return 2 * static

    replay = Replay(double, torch.device("cpu"), warm_up_calls=3)
    assert not calls
    assert replay().item() == 2
    static.fill_(5)
    assert replay().item() == 10
    replay.close()
    assert len(calls) == 2


class StandIn:
    """Of torch.cuda, as far as a replay uses it; `events` says what was done in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events = self.events

        class Stream:
            def __init__(self, name: str = "new") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                events.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                events.append("replay")

            def reset(self) -> None:
                events.append("reset")

        @contextmanager
        def stream(entered: Stream) -> Iterator[None]:
            events.append(f"on {entered.name}")
            yield

        @contextmanager
        def graph(_: Graph, **options: Any) -> Iterator[None]:
            assert options.pop("stream").name == "new"
            events.append(f"capture {options}")
            yield
            events.append("captured")

        @contextmanager
        def device(_: torch.device) -> Iterator[None]:
            yield

        for name, value in (
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("stream", stream),
            ("graph", graph),
            ("device", device),
            ("current_stream", lambda: Stream("current")),
            ("synchronize", lambda _: events.append("synchronize")),
        ):
            monkeypatch.setattr(torch.cuda, name, value)


def test_on_cuda_it_is_warmed_up_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandIn()
    cuda.install(monkeypatch)
    result = torch.tensor(3.0)

    def function() -> torch.Tensor:
        cuda.events.append("function")
        return result

    replay = Replay(function, torch.device("cuda"), warm_up_calls=2, pool=(0, 1))
    assert cuda.events == [
        *("new waits for current", "on new", "function", "function", "current waits for new"),
        "capture {'pool': (0, 1), 'capture_error_mode': 'thread_local'}",
        *("function", "captured", "replay"),
    ]
    cuda.events.clear()
    assert replay() is replay() is result
    replay.close()
    assert cuda.events == ["replay", "replay", "synchronize", "reset"]

"""What ran from when to when, as torch's profiler saw it: kernels on CUDA, operators on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One kernel, or one call of an operator; microseconds since the trace began.

    `self_us` leaves out what an operator called. `lane` is a stream or a thread.
    """

    name: str
    start_us: float
    end_us: float
    self_us: float
    lane: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """All spans of one name."""

    name: str
    calls: int
    self_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Time in which nothing ran on any lane, between the first span and the last."""

    total_us: float
    count: int
    longest_us: float
    span_us: float  # from the first start to the last end

    @property
    def share(self) -> float:
        """Of the whole stretch."""
        return self.total_us / self.span_us


def record_spans(run: Callable[[], None], device: torch.device) -> list[Span]:
    """Spans of everything that `run` does on `device`, in the order of their start."""
    is_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    if is_cuda:
        torch.cuda.synchronize(device)
    with profile(activities=[activity]) as recorded:
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    spans = [
        _span(event, is_cuda)
        for event in recorded.events() or ()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(spans, key=lambda span: span.start_us)


def largest(spans: Sequence[Span], count: int) -> list[Row]:
    """The `count` names with the most time of their own, the largest first."""
    of_name: dict[str, list[float]] = {}
    for span in spans:
        of_name.setdefault(span.name, []).append(span.self_us)
    rows = [Row(name=name, calls=len(us), self_us=sum(us)) for name, us in of_name.items()]
    return sorted(rows, key=lambda row: -row.self_us)[:count]


def gaps(spans: Sequence[Span]) -> Gaps:
    """Where no span was open; `spans` in the order of their start, at least one."""
    lengths = []
    end = spans[0].end_us
    for span in spans:
        if span.start_us > end:
            lengths.append(span.start_us - end)
        end = max(end, span.end_us)
    return Gaps(
        total_us=sum(lengths),
        count=len(lengths),
        longest_us=max(lengths, default=0.0),
        span_us=end - spans[0].start_us,
    )


def _span(event: FunctionEvent, is_cuda: bool) -> Span:
    start, end = event.time_range.start, event.time_range.end
    return Span(
        name=event.name,
        start_us=start,
        end_us=end,
        self_us=end - start if is_cuda else event.self_cpu_time_total,
        lane=(event.device_resource_id if is_cuda else event.thread) or 0,
    )

"""The stopwatch of stragglers on a GPU."""

import torch
from torch import nn

from mlperf_bert.run.stragglers import WINDOW_STEPS, DeviceStopwatch

LONG, SHORT = 50_000_000, 500_000  # cycles: some 25 ms, and a hundredth of them


class Step:
    """A backward whose gradient comes after so many cycles on the device."""

    def __init__(self, stopwatch: DeviceStopwatch, cycles: int) -> None:
        self._weight = nn.Parameter(torch.ones(8, device="cuda"))
        self._weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: stopwatch.lap()
        )
        self._cycles = cycles

    def __call__(self) -> torch.Tensor:
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        loss = self._weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def test_eager_steps_are_each_measured() -> None:
    stopwatch = DeviceStopwatch()
    steps = Step(stopwatch, SHORT), Step(stopwatch, LONG)
    for number in range(WINDOW_STEPS + 4):
        stopwatch.begin()
        steps[number % 2]()
    seconds = stopwatch.read()
    assert len(seconds) == WINDOW_STEPS
    assert min(seconds) > 0 and min(seconds[1::2]) > 5 * max(seconds[2::2])
    assert stopwatch.read() == []

"""The rate of matrix products on this machine: what MFU is a share of, measured on the spot.

Clocks fall under a long load, so a short burst and a long run are measured. The products are those
of the model's feed-forward halves, with as many rows as a batch has tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import COMPUTED_IN

BURST_SECONDS = 0.2
LONG_SECONDS = 3.0
CHUNK_SECONDS = 0.02  # between two looks at the clock
ROW_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """TFLOP/s of products in `dtype`; None, with a reason, where there are no such products."""

    dtype: str
    burst_tflops: float | None
    long_tflops: float | None
    reason: str | None

    def facts(self) -> dict[str, Any]:
        """As the JSON objects of `bench` have it."""
        return {
            "peak_dtype": self.dtype,
            "peak_burst_tflops": self.burst_tflops,
            "peak_long_tflops": self.long_tflops,
            "peak_reason": self.reason,
        }


def measure_peak(
    model: ModelSection, num_tokens: int, device: torch.device, long_seconds: float
) -> Peak:
    """Products of [num_tokens, hidden] with feed-forward matrices, in a burst and a long run.

    `long_seconds`: LONG_SECONDS, or less where the number does not matter.
    """
    dtype = torch.float8_e4m3fn if model.precision == "fp8" else COMPUTED_IN[model.precision]
    name = str(dtype).removeprefix("torch.")
    rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    try:
        products = _products(rows, model.hidden_size, model.intermediate_size, dtype, device)
        products()
        _wait(device)
        burst = _rate(products, device, min(BURST_SECONDS, long_seconds))
        long = _rate(products, device, long_seconds)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        return Peak(dtype=name, burst_tflops=None, long_tflops=None, reason=reason)
    # Two products a call, of 2 operations a multiply-add.
    tera = 2 * 2 * rows * model.hidden_size * model.intermediate_size / 1e12
    return Peak(dtype=name, burst_tflops=tera * burst, long_tflops=tera * long, reason=None)


def _products(
    rows: int, hidden: int, wide: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """A function that does both products of a feed-forward half."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    pairs = (
        (random(rows, hidden), random(wide, hidden)),
        (random(rows, wide), random(hidden, wide)),
    )
    if dtype != torch.float8_e4m3fn:

        def plain() -> None:
            for x, weight in pairs:
                F.linear(x, weight)

        return plain
    one = torch.ones((), device=device)

    def scaled() -> None:
        for x, weight in pairs:
            torch._scaled_mm(
                x,
                weight.t(),
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

    return scaled


def _rate(run: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Calls a second, over at least `seconds`."""
    calls = 1
    while (taken := _seconds_of(run, calls, device)) < min(CHUNK_SECONDS, seconds):
        calls = max(2 * calls, int(calls * CHUNK_SECONDS / taken))
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        _seconds_of(run, calls, device)
        done += calls
    return done / elapsed


def _seconds_of(run: Callable[[], None], calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What a run uses: processor time as a share, NVML's samples, floating-point operations."""

import os
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bert_tools.squad.measures import (
    core_wait_seconds,
    measured_usage,
    sampled_by_nvml,
    squad_flops,
)
from mlperf_bert.config.sections import ModelSection

CPU = torch.device("cpu")


def clock(*readings: float) -> Callable[[], float]:
    """Gives these readings one after the other."""
    following: Iterator[float] = iter(readings)
    return lambda: next(following)


@pytest.mark.parametrize(
    ("threads", "cpu_seconds", "share"), [(1, 6.0, 0.6), (2, 6.0, 0.3), (1, 10.5, 1.0)]
)
def test_utilisation_of_a_cpu_is_of_the_threads_that_compute(
    monkeypatch: pytest.MonkeyPatch, threads: int, cpu_seconds: float, share: float
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("time.perf_counter", clock(100.0, 110.0))
    monkeypatch.setattr("time.process_time", clock(5.0, 5.0 + cpu_seconds))
    with measured_usage(CPU) as usage:
        pass
    assert usage["cpu_seconds"] == pytest.approx(cpu_seconds)
    assert usage["utilisation"] == pytest.approx(share)
    assert usage["means"] == "process CPU time over wall time"
    assert usage["peak_memory_bytes"] > 2**20
    assert usage["cpus"] and set(usage["cpus"]) <= set(range(os.cpu_count() or 1))


def test_waiting_for_a_core_is_summed_over_threads(tmp_path: Path) -> None:
    for number, waited in ((1, 1_500_000_000), (2, 500_000_000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(f"99 {waited} 7\n")
    (tmp_path / "3").mkdir()  # a thread that has just ended
    assert core_wait_seconds(tmp_path) == 2.0
    assert core_wait_seconds(tmp_path / "nowhere") is None


def test_nvml_is_asked_again_and_again() -> None:
    answers = [20, 40, 90]
    all_given = threading.Event()

    def rates(_handle: object) -> types.SimpleNamespace:
        if len(answers) == 1:
            all_given.set()
        return types.SimpleNamespace(gpu=answers.pop(0))

    nvml = types.SimpleNamespace(nvmlDeviceGetUtilizationRates=rates)
    samples: list[float] = []
    with sampled_by_nvml(nvml, "handle", samples, interval_s=0.001):
        assert all_given.wait(30)
    assert samples == [0.2, 0.4, 0.9]  # a fourth question finds no answer, which ends the thread


def test_nvml_that_does_not_tell_is_none() -> None:
    def refuse(_handle: object) -> None:
        raise RuntimeError("not supported")

    samples: list[float] = []
    nvml = types.SimpleNamespace(nvmlDeviceGetUtilizationRates=refuse)
    with sampled_by_nvml(nvml, "handle", samples):
        pass
    assert samples == []


def test_flops_by_hand() -> None:
    # D = 8, F = 32, 2 layers, one window of 10 tokens. Multiply-adds of a layer: products with
    # weights 10 * (4 * 64 + 2 * 8 * 32) = 7,680; scores and weighting 2 * 10 * 10 * 8 = 1,600.
    # Two layers 18,560; span head 10 * 8 * 2 = 160. Twice that, and three passes: 112,320.
    model = ModelSection(
        vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=32
    )
    assert squad_flops(model, [10]) == 112_320
    assert squad_flops(model, [10, 10, 10]) == 3 * 112_320

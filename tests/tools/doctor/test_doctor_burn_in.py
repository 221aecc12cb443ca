"""The burn-in: findings, published rates, what is trained, ranks, and a short real one."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_tools.doctor import burn_in
from bert_tools.doctor.burn_in import judge, outliers, progress_line, published_rate
from bert_tools.doctor.cli import parse_duration
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import has_bert_large_sizes, is_bert_large
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.network_test.findings import Finding, Options
from support import CONFIGS

GIB = 2**30
RATES = {  # best published sequences/s of what torch calls so
    "NVIDIA GB200": 1685.8,
    "NVIDIA B200": 1538.6,
    "NVIDIA H200": 1091.8,
    "NVIDIA H200 NVL": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA H100 PCIe": 654.4,
    "NVIDIA H100 80GB HBM3": 1139.4,
    "NVIDIA A100-SXM4-80GB": 320.8,
    "NVIDIA A100-SXM4-40GB": 289.2,
    "NVIDIA A100 80GB PCIe": 266.3,
    "NVIDIA A100-PCIE-40GB": 205.5,
    "NVIDIA A30": 120.3,
    "Tesla V100-SXM3-32GB": 67.6,
    "Tesla V100-SXM2-16GB": 47.5,
    "NVIDIA L40S": 142.1,
    "NVIDIA L40": 128.6,
    "NVIDIA L4": 53.5,
    "NVIDIA RTX A5000": 82.9,
    "NVIDIA RTX A5000 Laptop GPU": None,
    "NVIDIA RTX A3000": None,
    "NVIDIA GeForce RTX 4090": 47.6,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "AMD Instinct MI300X": 75.3,
    "AMD Radeon RX 7900 XTX": 33.5,
    "CPU": None,
}


def device(number: int, **changes: Any) -> dict[str, Any]:
    """A healthy H200's result."""
    result: dict[str, Any] = {
        "rank": number,
        "host": "n1",
        "error": None,
        "device": f"cuda:{number}",
        "device_name": "NVIDIA H200",
        "samples_per_s": 1000.0,
        "first_samples_per_s": 1001.0,
        "last_samples_per_s": 999.0,
        "compared_s": 60.0,
        "seconds": 600.0,
        "steps": 1300,
        "non_finite_steps": 0,
        "loss": 7.5,
        "hottest_celsius": 60 + number,
        "throttled_by": [],
        "has_bert_large_sizes": True,
        "max_seq_length": 512,
        "optimizer": "lamb",
        "local_batch_size": 448,
        "step_mode": "captured",
        "num_layers": 24,
        "hidden_size": 1024,
        "precision": "bf16",
    }
    return result | changes


def judged(*changes: dict[str, Any]) -> dict[str, Finding]:
    devices = [device(number, **change) for number, change in enumerate(changes)]
    return {finding.name: finding for finding in judge(devices, [])}


def test_healthy_devices_are_good_and_held_against_the_published_rate() -> None:
    found = judged({}, {}, {}, {})
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "median 1,000.0 sequences/s of 4 x NVIDIA H200" in found["burn_in.rate"].found
    assert "at most 63 C (rank 3 (cuda:3 on n1))" in found["burn_in.heat"].found
    published = found["burn_in.published"].found
    assert published.startswith("0.92 of the best published 1,091.8")
    assert "LAMB at a global batch of 768" in published


def test_an_outlier_is_named_below_one_factor_and_fails_below_the_other() -> None:
    for rate, status in ((999.0, "ok"), (951.0, "ok"), (949.0, "warn"), (899.0, "fail")):
        finding = outliers({"cuda:0 on n1": 1000.0, "cuda:1 on n1": 1000.0, "cuda:2 on n2": rate})
        assert finding.status == status
        assert ("cuda:2 on n2" in finding.found) == (status != "ok")
        assert "cuda:0" not in finding.found
        assert outliers({"cpu on n1": rate}).status == "ok"  # one has nobody to be held against


def test_ranks_of_one_host_that_are_shown_a_device_each_are_told_apart() -> None:
    same = {"device": "cuda:0"}
    found = judged(same, same, {**same, "samples_per_s": 800.0})["burn_in.outliers"]
    assert found.status == "fail"
    assert found.found.startswith("rank 2 (cuda:0 on n1) has 0.800 of the median")


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"last_samples_per_s": 900.0}, "burn_in.drop", "warn"),
        ({"non_finite_steps": 2}, "burn_in.losses", "fail"),
        ({"loss": None}, "burn_in.losses", "fail"),
        ({"throttled_by": ["hardware thermal slowdown"]}, "burn_in.heat", "warn"),
        ({"error": "CUDA error: uncorrectable ECC"}, "burn_in.errors", "fail"),
    ],
)
def test_the_device_that_is_not_well_is_named(
    change: dict[str, Any], name: str, status: str
) -> None:
    finding = judged({}, change, {})[name]
    assert finding.status == status
    assert "cuda:1 on n1" in finding.found
    assert "cuda:0" not in finding.found
    assert finding.remedy
    missing, *_ = judge([device(0)], [1])
    assert (missing.status, missing.found) == ("fail", "nothing came from rank 1")


def test_only_what_is_published_is_compared() -> None:
    found = judged({"has_bert_large_sizes": False})["burn_in.published"]
    assert found.found == "nothing is published for this model"
    unknown = judged({"device_name": "NVIDIA T400"})["burn_in.published"]
    assert unknown.found == "NVIDIA T400 is not in our table of published results"
    for rate, status in ((100.0, "warn"), (400.0, "ok")):
        a100 = {"device_name": "NVIDIA A100-SXM4-80GB", "samples_per_s": rate}
        assert judged(a100)["burn_in.published"].status == status


def test_durations() -> None:
    for text, seconds in (("10m", 600), ("90s", 90), ("1h", 3600), ("45", 45), ("0.5s", 0.5)):
        assert parse_duration("--burn-in", text) == seconds
    for text in ("", "10x", "-5", "0", "1e3", "9999h", "m"):
        with pytest.raises(ConfigError, match="--burn-in"):
            parse_duration("--burn-in", text)


def test_what_does_not_fit_is_tried_smaller(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        load_config(tiny_config, [f"parallel.local_batch_size={size}"]) for size in (4, 2, 1)
    ]
    trace = burn_in.Trace()

    def train(config: Any, *_: Any) -> burn_in.Trace:
        if config.parallel.local_batch_size > 2:
            raise torch.OutOfMemoryError("full")
        return trace

    monkeypatch.setattr(burn_in, "candidates", lambda *_: iter(configs))
    monkeypatch.setattr(burn_in, "_built_and_trained", train)
    found = burn_in.train_what_runs(None, torch.device("cpu"), 1.0, lambda trace: None)
    assert found == (configs[1], trace)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        monkeypatch.setattr(burn_in, "candidates", lambda *_: iter(configs[:1]))
        burn_in.train_what_runs(None, torch.device("cpu"), 1.0, lambda trace: None)


class FakeRun:
    """Steps that take as long as they are told, on a clock of their own."""

    def __init__(self, step_s: list[float], losses: list[float]) -> None:
        self.device = torch.device("cpu")
        self.updates = [None, None]
        self.host_updates = [(SimpleNamespace(lengths=[1] * 8),)] * 2
        self.now = 0.0
        self._step_s: Iterator[float] = iter(step_s)
        self._losses: Iterator[float] = iter(losses)

    def __call__(self, number: int) -> torch.Tensor:
        self.now += next(self._step_s)
        return torch.tensor(next(self._losses))


def test_rates_of_beginning_and_end_and_losses_that_are_no_numbers() -> None:
    # Two steps of warm-up, then 1 s a step, later 2 s a step.
    run: Any = FakeRun([1.0] * 32 + [2.0] * 40, [1.0] * 5 + [float("nan")] * 3 + [1.0] * 64)
    trace = burn_in.train_for(run, 60.0, lambda trace: None, clock=lambda: run.now)
    assert trace.non_finite_steps == 3
    assert sum(trace.seconds) == pytest.approx(60, abs=4)
    first, last, part = trace.ends(longest_s=10.0)
    assert part == 10.0
    assert first == pytest.approx(8.0)
    assert last == pytest.approx(4.0)


def test_progress_names_the_slowest_of_several() -> None:
    assert progress_line(15.0, 90.0, {0: 10.0}) == (
        "burn-in: 1:15 left, 1 device, 10.0 sequences/s"
    )
    line = progress_line(15.0, 90.0, {0: 10.0, 1: 10.0, 2: 8.0})
    assert line.endswith("3 devices, 28.0 sequences/s, slowest rank 2 with 0.80 of the median")


def test_a_short_burn_in_on_the_cpu(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        status = main(["doctor", "--burn-in", "1s", "--config", str(tiny_config), "--json"])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in result["checks"]}
    assert status == 0, result
    assert result["schema_version"] == 1
    assert "nothing is published" in found["burn_in.published"]["found"]
    (one,) = result["burn_in"]["devices"]
    assert one["samples_per_s"] > 0
    assert one["steps"] >= 2
    assert one["non_finite_steps"] == 0
    assert (one["device"], one["local_batch_size"]) == ("cpu", 16)


def as_rank(number: int, shown: list[Finding], *, local: int = 0, timeout_s: float = 20.0) -> int:
    """The status of `burn_in` on one of two ranks; `shown` gets what it shows."""
    info = RankInfo(number, 2, local, 1 + local, number - local, "slurm")
    options = Options(device="cpu", timeout_s=timeout_s)
    return burn_in.burn_in(info, 1.0, options, lambda findings, more: shown.extend(findings))


@pytest.mark.parametrize(("error", "status"), [(None, 0), ("Xid 79", 1)])
def test_all_ranks_end_with_one_status(
    error: str | None, status: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(info: RankInfo, *_: Any) -> dict[str, Any]:
        return device(info.rank, error=error if info.rank else None)

    monkeypatch.setattr(burn_in, "_of_this_device", result)
    shown: list[list[Finding]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(as_rank, range(2), shown)) == [status, status]
    assert shown[1] == []
    errors = [finding.found for finding in shown[0] if finding.status == "fail"]
    assert errors == ([f"rank 1 (cuda:1 on n1): {error}"] if error else [])


def test_a_rank_without_rank_zero_fails_and_one_of_a_node_says_so(port: int) -> None:
    for local, lines in ((0, 1), (1, 0)):
        shown: list[Finding] = []
        assert as_rank(1, shown, local=local, timeout_s=0.2) == 1
        assert len(shown) == lines
        assert all("cannot reach rank 0" in finding.found for finding in shown)


def test_a_device_that_cannot_train_fails(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand so on")

    monkeypatch.setattr(burn_in, "_built_and_trained", broken)
    assert main(["doctor", "--burn-in", "1s", "--config", str(tiny_config)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fail  burn_in.errors")
    assert "CUDA error: an illegal memory access" in lines[0]


def test_a_gpu_tries_captured_then_eager_then_half_the_batch_that_should_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gib, batch in ((139, 448), (79, 240), (39, 96), (15, 16), (11, 3), (4, 1)):
        assert burn_in.batch_for(gib * GIB) == batch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    tried = list(burn_in.candidates(None, torch.device("cuda", 0), 11 * GIB))
    rows = [(config.parallel.local_batch_size, config.run.step_mode) for config in tried]
    assert rows == [(3, "captured"), (3, "eager"), (1, "captured"), (1, "eager")]
    assert {config.model.precision for config in tried} == {"fp16"}
    assert all(has_bert_large_sizes(config.model) for config in tried)


def test_a_cpu_trains_a_small_model() -> None:
    (config,) = burn_in.candidates(None, torch.device("cpu"), 0)
    assert (config.model.num_layers, config.model.hidden_size) == (4, 256)
    assert (config.model.precision, config.run.step_mode) == ("fp32", "eager")
    assert not has_bert_large_sizes(config.model)


def test_every_config_can_be_trained_as_one_rank_of_it() -> None:
    for path in CONFIGS.glob("*.toml"):
        given = load_config(path)
        (config,) = burn_in.candidates(given, torch.device("cuda", 0), 0)
        assert config.parallel.world_size == 1
        assert config.parallel.local_batch_size == given.parallel.local_batch_size
        assert config.model == given.model


def test_accelerators_are_known_by_the_names_that_torch_gives() -> None:
    for name, rate in RATES.items():
        row = published_rate(name)
        assert (row and float(row["train_only"] or row["end_to_end"])) == rate, name


def test_dropout_changes_the_model_but_not_what_its_steps_cost(tiny_config: Path) -> None:
    large, without_dropout = ModelSection(), ModelSection(hidden_dropout=0.0)
    assert is_bert_large(large) and has_bert_large_sizes(large)
    assert not is_bert_large(without_dropout) and has_bert_large_sizes(without_dropout)
    assert not has_bert_large_sizes(load_config(tiny_config).model)

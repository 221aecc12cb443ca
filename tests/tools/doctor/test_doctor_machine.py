"""GPUs, processors, limits and caches: from given facts to findings."""

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tools.doctor import gpus, host
from bert_tools.doctor.gpus import GpuFacts
from bert_tools.doctor.host import Limits
from mlperf_bert.common.machine import Gpu, Machine, Nic, NumaNode
from mlperf_bert.config.files import load_config

A100 = GpuFacts(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30, capability=(8, 0))
FACTS = gpus.Facts(
    torch="2.13.0", cuda="13.0", driver="580.65", driver_gpus=8, gpus=tuple([A100] * 8)
)
DGX = Machine(
    cpu_model="AMD EPYC 7742",
    sockets=2,
    cores_per_socket=64,
    logical_cpus=256,
    cpu_mhz=2250.0,
    caches="L3 16 MiB",
    memory_bytes=2**41,
    numa_nodes=tuple(NumaNode(n, tuple(range(32 * n, 32 * n + 32))) for n in range(8)),
    cores=(),
    gpus=tuple(Gpu("NVIDIA A100-SXM4-80GB", f"0000:{n:02x}:00.0", n) for n in range(8)),
    driver="580.65",
    nics=(Nic("mlx5_0", "infiniband", 200.0, 3), Nic("eth0", "ethernet", None, None)),
    os="Ubuntu",
    kernel="6.8",
)
ALL_CPUS = frozenset(range(256))
LIMITS = Limits(
    shared_memory_bytes=2**35, open_files=2**20, locked_memory_bytes=None, has_infiniband=True
)


def by_name(findings: list[host.Finding]) -> dict[str, host.Finding]:
    return {finding.name: finding for finding in findings}


def test_equal_gpus_are_one_good_line_with_what_nvml_tells() -> None:
    (finding,) = gpus.judge(FACTS, None, wants_cuda=True)
    assert finding.status == "ok"
    assert "8 x NVIDIA A100-SXM4-80GB 80 GiB, driver 580.65" in finding.found
    gpu = replace(A100, ecc=True, clock_mhz=1200, most_clock_mhz=1410)
    (finding,) = gpus.judge(replace(FACTS, gpus=(gpu, gpu)), None, wants_cuda=False)
    assert "ECC on for 2 of 2" in finding.found
    assert "1200-1200 MHz now, at most 1410" in finding.found


@pytest.mark.parametrize(
    ("driver_gpus", "cuda", "wants_cuda", "status", "words"),
    [
        (0, None, False, "warn", "trains on the CPU"),
        (0, None, True, "fail", "config asks for 'cuda'"),
        (8, None, False, "fail", "the driver lists 8 GPUs"),
        (8, "13.0", False, "fail", "can use none"),
    ],
)
def test_without_a_gpu(
    driver_gpus: int, cuda: str | None, wants_cuda: bool, status: str, words: str
) -> None:
    facts = replace(FACTS, gpus=(), driver_gpus=driver_gpus, cuda=cuda)
    (finding,) = gpus.judge(facts, None, wants_cuda=wants_cuda)
    assert finding.status == status
    assert words in finding.found
    assert finding.remedy


def test_different_old_and_faulty_gpus_are_named() -> None:
    old = replace(A100, name="Tesla P100", capability=(6, 0))
    faulty = replace(A100, uncorrected_errors=3)
    facts = replace(FACTS, gpus=(A100, old, faulty))
    found = by_name(gpus.judge(facts, None, wants_cuda=False))
    assert found["gpus"].status == "warn"
    assert found["gpus.1"].status == "fail"
    assert "capability 6.0" in found["gpus.1"].found
    assert found["gpus.2"].status == "fail"
    assert "3 uncorrected" in found["gpus.2"].found


def test_a_config_of_more_ranks_than_gpus_fails(tiny_config: Path) -> None:
    auto = ['run.device="auto"', "parallel.ranks_per_node=8"]
    facts = replace(FACTS, gpus=(A100,) * 4)
    config = load_config(tiny_config, auto)
    found = by_name(gpus.judge(facts, config, wants_cuda=False))
    assert found["gpus.ranks"].status == "fail"
    assert "4 for 8 ranks" in found["gpus.ranks"].found
    for change in ('parallel.share_gpu="allow"', 'run.device="cpu"'):
        config = load_config(tiny_config, [*auto, change])
        assert "gpus.ranks" not in by_name(gpus.judge(facts, config, wants_cuda=False))


def test_throttling_by_heat_is_told_apart_from_the_power_cap() -> None:
    assert gpus.throttle_words(0x04) == ()
    assert gpus.throttle_words(0x44) == ("hardware thermal slowdown",)


def fake_nvml() -> types.ModuleType:
    """The functions of pynvml that are used, of a GPU without ECC."""

    def not_supported(*_: object) -> None:
        raise RuntimeError("Not Supported")

    nvml = types.ModuleType("pynvml")
    answers: dict[str, Any] = {
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetEccMode": not_supported,
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1200,
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 1410,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 71,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x44,
    }
    for name, answer in answers.items():
        setattr(nvml, name, answer)
    return nvml


def test_nvml_adds_what_this_gpu_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    about = types.SimpleNamespace(
        name="NVIDIA A100", total_memory=80 * 2**30, major=8, minor=0, uuid="12-34"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus._read_gpu(0).clock_mhz is None
    assert gpus.heat(0) == (None, ())
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    gpu = gpus._read_gpu(0)
    assert (gpu.ecc, gpu.clock_mhz, gpu.most_clock_mhz) == (None, 1200, 1410)
    assert gpus.heat(0) == (71, ("hardware thermal slowdown",))


def test_the_machine_in_words() -> None:
    found = by_name(host.judge_machine(DGX, ALL_CPUS, None))
    assert "2 x 64 cores, 256 threads, 2048 GiB" in found["machine.cpu"].found
    assert "8 nodes" in found["machine.numa"].found
    assert "3: CPUs 96-127" in found["machine.numa"].found
    assert "GPU 5 near 5" in found["machine.numa"].found
    assert found["machine.nics"].found == (
        "mlx5_0 (infiniband, 200 Gbit/s, node 3), eth0 (ethernet, rate unknown)"
    )
    assert {finding.status for finding in found.values()} == {"ok"}


def test_gpus_of_unknown_place_and_too_few_cpus_are_warned_of(tiny_config: Path) -> None:
    gpu = replace(DGX.gpus[0], numa_node=None)
    config = load_config(tiny_config, ["parallel.ranks_per_node=8"])
    machine = replace(DGX, gpus=(gpu,) * 8)
    found = by_name(host.judge_machine(machine, frozenset(range(4)), config))
    assert found["machine.numa"].status == "warn"
    assert "unknown" in found["machine.numa"].found
    assert found["machine.cpu"].status == "warn"
    assert "4 threads for 8 ranks" in found["machine.cpu"].found


def test_the_binding_that_would_be_used() -> None:
    assert host.judge_binding(["CPUs 0-15", "CPUs 16-31"]).found == (
        "rank 0 CPUs 0-15, rank 1 CPUs 16-31"
    )
    assert "not bound: one NUMA node" in host.judge_binding(["one NUMA node"] * 2).found


@pytest.mark.parametrize(
    ("change", "name", "status", "remedy"),
    [
        ({"shared_memory_bytes": 2**26}, "limits.shared_memory", "warn", "--ipc=host"),
        ({"shared_memory_bytes": None}, "limits.shared_memory", "ok", ""),
        ({"open_files": 1024}, "limits.open_files", "warn", "ulimit -n"),
        ({"open_files": None}, "limits.open_files", "ok", ""),
        ({"locked_memory_bytes": 2**16}, "limits.locked_memory", "fail", "ulimit -l"),
    ],
)
def test_small_limits_say_how_to_raise_them(
    change: dict[str, Any], name: str, status: str, remedy: str
) -> None:
    assert {finding.status for finding in host.judge_limits(LIMITS)} == {"ok"}
    found = by_name(host.judge_limits(replace(LIMITS, **change)))
    assert found[name].status == status
    assert remedy in found[name].remedy
    without = replace(LIMITS, **change, has_infiniband=False)
    assert "limits.locked_memory" not in by_name(host.judge_limits(without))


@pytest.mark.parametrize(
    ("direct", "by_sudo", "status"),
    [(True, False, "ok"), (False, True, "ok"), (False, False, "warn")],
)
def test_whether_caches_may_be_dropped(direct: bool, by_sudo: bool, status: str) -> None:
    assert host.judge_caches(direct=direct, by_sudo=by_sudo).status == status

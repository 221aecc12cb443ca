"""The local checks, from given facts, and from real files, to findings."""

import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tools.doctor import gpus, host, packages, storage
from bert_tools.doctor.gpus import GpuFacts
from bert_tools.doctor.storage import ReadRate
from mlperf_bert.common.machine import Gpu, Machine, Nic, NumaNode
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.network_test.findings import Options, examined
from support import REPOSITORY

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
RATE = ReadRate(
    where=Path("/data"), source="shards", file_system="ext4", bytes_read=2**28, seconds=0.5
)
MOUNTS = """overlay / overlay rw 0 0
server:/x /data\\040sets nfs4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
"""
TORCH = packages.NEEDED[0]
ALL_CPUS = frozenset(range(256))
LIMITS: dict[str, Any] = {
    "shared_memory_bytes": 2**35,
    "open_files": 2**20,
    "has_gpus": True,
    "locked_memory_bytes": None,
    "has_infiniband": True,
}


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


def test_without_a_gpu() -> None:
    for driver_gpus, cuda, wants_cuda, status, words in (
        (0, None, False, "info", "trains on the CPU"),
        (0, None, True, "fail", "config asks for 'cuda'"),
        (8, None, False, "fail", "the driver lists 8 GPUs"),
        (8, "13.0", False, "fail", "can use none"),
    ):
        facts = replace(FACTS, gpus=(), driver_gpus=driver_gpus, cuda=cuda)
        (finding,) = gpus.judge(facts, None, wants_cuda=wants_cuda)
        assert finding.status == status and words in finding.found and finding.remedy


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


def test_small_limits_say_how_to_raise_them() -> None:
    assert {finding.status for finding in host.judge_limits(**LIMITS)} == {"ok"}
    rows: tuple[tuple[dict[str, Any], str, str, str], ...] = (
        ({"shared_memory_bytes": 2**26}, "limits.shared_memory", "warn", "--ipc=host"),
        ({"shared_memory_bytes": None}, "limits.shared_memory", "ok", ""),
        ({"shared_memory_bytes": 2**26, "has_gpus": False}, "limits.shared_memory", "ok", ""),
        ({"open_files": 1024}, "limits.open_files", "warn", "ulimit -n"),
        ({"open_files": 1024, "has_gpus": False}, "limits.open_files", "info", "ulimit -n"),
        ({"open_files": None}, "limits.open_files", "ok", ""),
        ({"locked_memory_bytes": 2**16}, "limits.locked_memory", "fail", "ulimit -l"),
    )
    for change, name, status, remedy in rows:
        found = by_name(host.judge_limits(**LIMITS | change))
        assert found[name].status == status and remedy in found[name].remedy
        without = LIMITS | change | {"has_infiniband": False}
        assert "limits.locked_memory" not in by_name(host.judge_limits(**without))


def test_whether_caches_may_be_dropped() -> None:
    for direct, by_sudo in ((True, False), (False, True), (False, False)):
        for is_closed, lacks in ((False, "info"), (True, "warn")):
            finding = host.judge_caches(direct=direct, by_sudo=by_sudo, is_closed=is_closed)
            assert finding.status == ("ok" if direct or by_sudo else lacks)


def test_a_fast_disk_is_good_and_a_slow_one_is_staged() -> None:
    assert storage.judge_read(RATE).status == "ok"
    slow = storage.judge_read(replace(RATE, seconds=20.0))
    assert slow.status == "warn"
    assert "13 MB/s from /data (ext4" in slow.found
    assert "stage-data" in slow.remedy
    assert storage.judge_read(None).status == "warn"
    memory = storage.judge_read(replace(RATE, file_system="tmpfs", seconds=20.0))
    assert memory.status == "ok" and "is memory" in memory.found


def test_free_space_and_the_file_system_of_the_longest_mount_point() -> None:
    for free, status in ((2**20, "fail"), (5 * 2**30, "warn"), (2**40, "ok")):
        assert storage.judge_free(Path("/runs"), free).status == status
    for path, kind in (("/data sets/train", "nfs4"), ("/dev/shm", "tmpfs"), ("/home", "overlay")):
        assert storage.file_system_of(Path(path), MOUNTS) == kind


def test_reading_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_OWN_BYTES", 2**22)
    rate = storage.measure_read(tmp_path)
    assert rate is not None
    assert rate.bytes_read == 2**22
    assert rate.source == "a file of its own"
    assert list(tmp_path.iterdir()) == []


def test_large_shards_are_read_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ENOUGH_BYTES", 1000)
    shard = tmp_path / "train/shards/part.hdf5"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"x" * 5000)
    rate = storage.measure_read(tmp_path)
    assert rate is not None
    assert (rate.source, rate.bytes_read) == ("shards", 5000)
    assert storage.measure_read(tmp_path / "nothing") is None


def test_data_are_verified_and_held_against_the_config(
    synthetic_data: Path, tiny_config: Path
) -> None:
    (without,) = storage.check_data(Options())
    assert without.status == "info"
    (verified,) = storage.check_data(Options(data=synthetic_data))
    assert verified.status == "ok"
    (fits,) = storage.check_data(Options(data=synthetic_data, config=load_config(tiny_config)))
    assert fits.status == "ok"
    assert "fits the config" in fits.found
    short = load_config(tiny_config, ["data.max_seq_length=16"])
    (too_long,) = examined(
        "data", lambda: storage.check_data(Options(data=synthetic_data, config=short)), 60
    )
    assert too_long.status == "fail"
    assert "data.max_seq_length" in too_long.found


def test_damaged_data_fail_with_the_first_problem(tmp_path: Path) -> None:
    (tmp_path / "the data" / "train").mkdir(parents=True)
    (finding,) = storage.check_data(Options(data=tmp_path / "the data"))
    assert finding.status == "fail"
    assert "problems, the first: " in finding.found
    assert f"mlperf_bert verify '{tmp_path / 'the data'}'" in finding.remedy


def test_what_is_needed_is_there_in_a_version_that_was_tried() -> None:
    for version, status, remedy in (
        ("2.11.0+cu130", "ok", ""),
        ("2.10.1", "warn", "torch>=2.11,<2.14; run in the checkout: tools/venv.sh"),
        ("2.14.0", "warn", "torch>=2.11,<2.14"),
        (None, "fail", "run in the checkout: tools/venv.sh"),
    ):
        finding = packages.judge(TORCH, version)
        assert finding.status == status
        assert bool(finding.remedy) == bool(remedy) and remedy in finding.remedy


def test_what_training_can_do_without_says_what_its_lack_costs() -> None:
    apex = packages.judge(packages.OPTIONAL[0], None)
    assert apex.status == "warn"
    assert "optim.implementation 'apex'" in apex.found
    assert apex.remedy == "if you need it: an image that has NVIDIA's apex"
    assert packages.judge_mpi(None, "mpi4py not found").status == "warn"
    assert packages.judge_mpi("MPICH", "").status == "ok"
    assert packages.judge_mpi(None, "mpi4py not found", is_needed=False).status == "info"
    assert packages.judge(packages.OPTIONAL[0], None, is_needed=False).status == "info"
    rulesets = {("4.1.0", "5.0.0"): "ok", ("4.1.0",): "fail", None: "warn"}
    assert {each: packages.judge_ruleset(each).status for each in rulesets} == rulesets


def test_optional_packages_are_shown_where_they_are_needed_or_asked_for(tiny_config: Path) -> None:
    names = {package.name for package in packages.OPTIONAL} | {"mpi"}
    assert packages.needed_here(None, has_gpus=True) == {"triton", "pynvml"}
    config = load_config(tiny_config, ["data.loader=mpi_readers"])
    for options, shown in (
        (Options(), set()),
        (Options(config=config), {"mpi"}),
        (Options(all_packages=True), names),
    ):
        found = {each.name.removeprefix("packages.") for each in packages.check(options)}
        assert found & names == shown


def test_what_is_needed_is_what_pyproject_requires() -> None:
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    listed = {
        package.name + ">=" + ".".join(map(str, package.lowest)) for package in packages.NEEDED
    }
    assert listed == {text.partition(",")[0] for text in required["project"]["dependencies"]}


def test_a_package_that_is_not_there_has_no_version() -> None:
    nothing = packages.Package("no-such", "no_such.part", "nothing")
    assert packages.installed_version(nothing) is None
    assert packages.installed_version(TORCH)

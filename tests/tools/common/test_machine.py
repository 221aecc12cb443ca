"""Facts read of a machine: one with eight GPUs, a laptop, and empty or false trees."""

import platform
from pathlib import Path

import machine_trees
from bert_tools.common.machine import (
    Gpu,
    Machine,
    Nic,
    parse_cpu_list,
    read_machine,
)
from mlperf_bert.machine import memory_bytes, usable_cpus

NOTHING = Machine("", 0, 0, 0, None, "", 0, (), (), None, (), "", "")


def test_a_dgx_a100(tmp_path: Path) -> None:
    machine = read_machine(machine_trees.dgx_a100(tmp_path))
    assert machine.cpu_model == "AMD EPYC 7742 64-Core Processor"
    assert (machine.sockets, machine.cores_per_socket, machine.logical_cpus) == (2, 64, 256)
    assert machine.caches == "L1d 32 KiB, L1i 32 KiB, L2 512 KiB"
    assert machine.memory_bytes == 2113545604 * 1024
    assert machine.cores[1] == (1, 129)
    assert len(machine.gpus) == 8
    assert machine.gpus[1] == Gpu("NVIDIA A100-SXM4-80GB", "0000:0f:00.0")
    assert machine.driver == "535.104.05"
    assert (machine.os, machine.kernel) == ("Ubuntu 20.04.6 LTS", "5.4.0-144-generic")
    assert [nic.name for nic in machine.nics] == [*(f"mlx5_{n}" for n in range(10)), "enp226s0"]
    assert machine.nics[2] == Nic("mlx5_2", "infiniband", 200.0)
    assert machine.nics[-1] == Nic("enp226s0", "ethernet", 1.0)


def test_a_laptop(tmp_path: Path) -> None:
    machine = read_machine(machine_trees.laptop(tmp_path))
    assert (machine.sockets, machine.cores_per_socket, machine.logical_cpus) == (1, 4, 8)
    assert machine.cpu_mhz == 1900.0
    assert machine.nics == (Nic("wlan0", "ethernet", None),)
    assert (machine.gpus, machine.driver) == ((), None)


def test_an_open_driver_and_a_port_for_ethernet(tmp_path: Path) -> None:
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
        "570.86.15  Release Build",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)",
    }
    machine = read_machine(machine_trees.write_files(tmp_path, files))
    assert machine.driver == "570.86.15"
    assert machine.nics == (Nic("mlx5_0", "ethernet", 100.0),)


def test_no_files(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert read_machine(root) == NOTHING


def test_odd_files_raise_nothing(tmp_path: Path) -> None:
    machine_trees.laptop(tmp_path)
    cpus = tmp_path / "sys/devices/system/cpu"
    machine_trees.write_files(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: a lot",
            "etc/os-release": "PRETTY_NAME='odd \x1b[31mname'",
            "sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "0-7",
            "proc/driver/nvidia/gpus/..gpu/information": "Model: NVIDIA\nBus Location: ../../x",
            "sys/class/infiniband": "a file, not a directory",
            "sys/class/net/\N{SUPERSCRIPT TWO}9/speed": "9" * 40,
        },
    )
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name : \xff\xfe\x00chip\n" + b"x" * 2**20)
    (cpus / "cpu0/topology/physical_package_id").unlink()
    (cpus / "cpu0/topology/physical_package_id").mkdir()
    (cpus / "cpu0/cache").symlink_to("cache")
    machine = read_machine(tmp_path)
    assert machine.memory_bytes == 0
    assert machine.cpu_model.endswith("chip")
    assert machine.os == "odd [31mname"
    assert sorted(cpu for core in machine.cores for cpu in core) == list(range(8))
    assert machine.gpus == (Gpu("NVIDIA", "../../x"),)


def test_cpu_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpu_list("0-3,8\n") == (0, 1, 2, 3, 8)
    assert parse_cpu_list("2,0-1,1") == (0, 1, 2)
    for wrong in ("", "0-", "-1", "3-1", "0x3"):
        assert parse_cpu_list(wrong) == ()
    assert len(parse_cpu_list("0-999999")) < 100_000


def test_this_machine_has_a_processor_and_a_system() -> None:
    machine = read_machine()
    assert machine.logical_cpus >= len(machine.cores) >= 1
    assert machine.cpu_model and machine.os and machine.kernel == platform.release()
    assert 1 <= len(usable_cpus()) <= machine.logical_cpus
    assert memory_bytes() > 0

"""Facts read of a machine: one with eight GPUs, a laptop, and empty or false trees."""

from collections.abc import Mapping
from pathlib import Path

from bert_tools.common.machine import Machine, read_machine
from mlperf_bert.machine import memory_bytes, usable_cpus

CPUS = "sys/devices/system/cpu"


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write each text at its path below `root`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n", encoding="utf-8")
    return root


def processors(sockets: int, cores_per_socket: int) -> dict[str, str]:
    """CPUs numbered as Linux does: the first threads of all cores, then the second ones."""
    cores = sockets * cores_per_socket
    files = {f"{CPUS}/online": f"0-{2 * cores - 1}"}
    for cpu in range(2 * cores):
        core = cpu % cores
        files[f"{CPUS}/cpu{cpu}/topology/physical_package_id"] = str(core // cores_per_socket)
        files[f"{CPUS}/cpu{cpu}/topology/thread_siblings_list"] = f"{core},{core + cores}"
    return files


def test_a_machine_with_gpus(tmp_path: Path) -> None:
    files = processors(2, 64)
    files["proc/cpuinfo"] = "processor\t: 0\nmodel name\t: AMD EPYC 7742 64-Core Processor"
    files["proc/meminfo"] = "MemTotal:       2113545604 kB\nMemFree:        1 kB"
    for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd"):
        files[f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information"] = "Model: NVIDIA A100"
    expected = Machine("AMD EPYC 7742 64-Core Processor", 2, 64, 2113545604 * 1024, 8)
    assert read_machine(write_files(tmp_path, files)) == expected


def test_a_laptop_with_a_processor_switched_off(tmp_path: Path) -> None:
    files = processors(1, 4)
    files[f"{CPUS}/cpu8/online"] = "0"
    files["proc/cpuinfo"] = "model name\t: Some Laptop CPU"
    files["proc/meminfo"] = "MemTotal: 16000000 kB"
    machine = read_machine(write_files(tmp_path, files))
    assert machine == Machine("Some Laptop CPU", 1, 4, 16_384_000_000, 0)


def test_no_files(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert read_machine(root) == Machine("", 0, 0, 0, 0)


def test_odd_files_raise_nothing(tmp_path: Path) -> None:
    files = {**processors(1, 4), "proc/meminfo": "MemTotal: a lot", "proc/driver/nvidia/gpus": ""}
    write_files(tmp_path, files)
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name : \xff\xfe\x00chip\n" + b"x" * 2**20)
    (tmp_path / CPUS / "cpu0/topology/physical_package_id").unlink()
    (tmp_path / CPUS / "cpu0/topology/physical_package_id").mkdir()
    machine = read_machine(tmp_path)
    assert (machine.memory_bytes, machine.num_gpus) == (0, 0)
    assert machine.cpu_model.endswith("chip")


def test_this_machine_has_a_processor() -> None:
    assert read_machine().cpu_model
    assert len(usable_cpus()) >= 1
    assert memory_bytes() > 0

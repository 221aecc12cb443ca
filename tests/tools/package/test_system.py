"""`mlperf_bert system` on a machine whose programs and devices are stand-ins."""

import json
import platform
import shutil

import pytest
import torch

from bert_tools.package import system
from bert_tools.package.own_checks import unknown_fields
from mlperf_bert.__main__ import main
from support import REPOSITORY

ONE_GPU, EIGHT_GPUS, NO_GPU = "h200_n1x1_pytorch", "h100_n8_pytorch", "cpu_2core_pytorch"
PROGRAMS = {
    "lscpu": """\
Architecture:          x86_64
CPU(s):                224
Model name:            Intel(R) Xeon(R) Platinum 8480C
  Core(s) per socket:  56
  Socket(s):           2
  CPU max MHz:         3800.0000
L1d cache:             5.3 MiB (112 instances)
L3 cache:              210 MiB (2 instances)
""",
    "lsblk": """\
zram0                0 0 disk
nvme0n1  1920383410176 0 disk
nvme1n1  1920383410176 0 disk
sda     16000900661248 1 disk
sr0         1073741312 1 rom
""",
    "nvidia-smi": "NVIDIA H200, 143771 MiB, 1980 MHz, 5, 16, 580.95.05\n",
}
MEASURED = {
    "host_processors_per_node": "2",
    "host_processor_model_name": "Intel(R) Xeon(R) Platinum 8480C",
    "host_processor_core_count": "56",
    "host_processor_vcpu_count": "224",
    "host_processor_frequency": "3.8 GHz (maximum)",
    "host_processor_caches": "L1d 5.3 MiB (112 instances), L3 210 MiB (2 instances)",
    "host_storage_type": "NVMe SSD, HDD",
    "host_storage_capacity": "2x 1.92 TB NVMe SSD, 1x 16 TB HDD",
    "host_networking": "2x InfiniBand 400 Gb/sec (4X NDR)",
    "accelerator_frequency": "1.98 GHz (maximum)",
    "accelerator_host_interconnect": "PCIe 5.0 x16",
    "framework": f"PyTorch {torch.__version__}",
    "operating_system": platform.freedesktop_os_release()["PRETTY_NAME"],
    "sw_notes": "none",
}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A repository with descriptions on a machine with one GPU, two InfiniBand ports, three disks.

    torch sees no GPU.
    """
    shutil.copytree(REPOSITORY / "systems", tmp_path / "systems")
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        program.chmod(0o755)
    for card in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "sys" / "infiniband" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(system, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def described(root, name):
    return json.loads((root / "systems" / f"{name}.json").read_text())


def test_what_is_unknown_is_measured_and_the_rest_is_kept(machine, capsys):
    before = described(machine, ONE_GPU)
    assert main(["system", ONE_GPU]) == 0
    no_cuda, *changes, last = capsys.readouterr().out.splitlines()
    assert no_cuda.startswith("other_software_stack: not changed, because torch finds no GPU")
    after = described(machine, ONE_GPU)
    assert {field: after[field] for field in MEASURED} == MEASURED
    changed = [field for field in before if before[field] != after[field]]
    assert changes == [f"{field}: {before[field]} -> {after[field]}" for field in changed]
    assert set(changed) == {*MEASURED, "host_memory_capacity"}  # of the real machine
    unknown = unknown_fields(after)
    assert last == f"still unknown: {', '.join(unknown)}"
    assert {"cooling", "host_memory_configuration", "accelerator_on-chip_memories"} < set(unknown)
    assert main(["system", ONE_GPU]) == 0
    assert capsys.readouterr().out == f"{no_cuda}\n{last}\n"


def test_another_gpu_than_the_described_one_is_said(machine, capsys):
    program = machine / "bin" / "nvidia-smi"
    program.write_text(program.read_text().replace("H200", "A100"))
    assert main(["system", ONE_GPU]) == 0
    assert "but this machine has NVIDIA A100\n" in capsys.readouterr().out
    assert "H200" in described(machine, ONE_GPU)["accelerator_model_name"]


def test_known_values_stay_without_programs_and_software_is_replaced(machine, capsys):
    shutil.rmtree(machine / "bin")
    before = described(machine, NO_GPU)
    assert main(["system", NO_GPU]) == 0
    after = described(machine, NO_GPU)
    assert after["framework"] == MEASURED["framework"]
    kept = before.keys() - {"framework", "other_software_stack", "operating_system"}
    assert {field: after[field] for field in kept} == {field: before[field] for field in kept}
    assert capsys.readouterr().out.endswith("still unknown: nothing\n")


def test_a_value_that_nvidia_smi_does_not_know_stays_unknown(machine, capsys):
    program = machine / "bin" / "nvidia-smi"
    program.write_text(program.read_text().replace("1980 MHz, 5", "[N/A], [N/A]"))
    assert main(["system", ONE_GPU]) == 0
    unknown = unknown_fields(described(machine, ONE_GPU))
    assert {"accelerator_frequency", "accelerator_host_interconnect"} < set(unknown)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (EIGHT_GPUS, "has 8 accelerators per node, but nvidia-smi lists 1; run the command on"),
        ("lost", "systems/lost.json: cannot be read (No such file or directory); correct it"),
    ],
)
def test_another_machine_is_refused_in_one_line(name, problem, machine, capsys):
    before = {path: path.read_bytes() for path in (machine / "systems").iterdir()}
    assert main(["system", name]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in (machine / "systems").iterdir()} == before

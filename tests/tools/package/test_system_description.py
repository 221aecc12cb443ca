"""Descriptions of machines that are not here, what is wrong with a description, and the command."""

import json
from pathlib import Path

import pytest

import machine_trees
from bert_tools.common.machine import read_machine
from bert_tools.package.system_description import (
    FIELDS,
    STATUSES,
    Software,
    check_description,
    default_name,
    describe,
    unknown_fields,
)
from mlperf_bert.__main__ import main

SOFTWARE = Software(
    framework="PyTorch 2.13.0",
    stack={"CUDA": "13.0", "NCCL": "", "Python": "3.12.1"},
    gpus=["NVIDIA A100-SXM4-80GB"] * 8,
    gpu_memory_bytes=80 * 2**30,
)
NO_GPU = Software(framework="PyTorch 2.13.0", stack={})


def good() -> dict[str, object]:
    machine = read_machine(Path("/nowhere"))
    return {**describe(machine, NO_GPU, name="box", submitter="Acme", nodes=2)}


def test_a_dgx_a100(tmp_path: Path) -> None:
    machine = read_machine(machine_trees.dgx_a100(tmp_path))
    found = describe(machine, SOFTWARE, name="a", submitter="Acme", nodes=4)
    assert tuple(found) == FIELDS
    assert check_description(found) == []
    expected = {
        "number_of_nodes": "4",
        "host_processors_per_node": "2",
        "host_processor_core_count": "64",
        "host_memory_capacity": "2016 GiB",
        "host_networking": "10x InfiniBand 200 Gbit/s, 1x Ethernet 1 Gbit/s",
        "accelerators_per_node": "8",
        "accelerator_model_name": "NVIDIA A100-SXM4-80GB",
        "accelerator_memory_capacity": "80 GiB",
        "other_software_stack": "CUDA 13.0, Python 3.12.1",
        "operating_system": "Ubuntu 20.04.6 LTS",
    }
    assert {field: found[field] for field in expected} == expected
    unknown = unknown_fields(found)
    assert "cooling" in unknown and "accelerator_interconnect" in unknown
    assert "hw_notes" not in unknown
    assert default_name(machine, SOFTWARE, 4) == "8x_a100-sxm4-80gb_n4_pytorch"


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    machine = read_machine(machine_trees.laptop(tmp_path))
    found = describe(machine, NO_GPU, name="laptop", submitter="Acme", nodes=1)
    assert check_description(found) == []
    assert found["accelerators_per_node"] == "0"
    assert not any(field.startswith("accelerator") for field in unknown_fields(found))
    assert default_name(machine, NO_GPU, 1) == "cpu_4core_pytorch"


def test_a_machine_that_tells_nothing_is_still_described() -> None:
    assert check_description(good()) == []


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("number_of_nodes", 8, "every value must be a string"),
        ("number_of_nodes", "0", "not a whole number of at least 1"),
        ("accelerators_per_node", "eight", "not a whole number"),
        ("accelerators_per_node", "\N{ARABIC-INDIC DIGIT EIGHT}", "not a whole number"),
        ("other_software_stack", {"cuda": "13"}, "every value must be a string"),
        ("status", "onprem", STATUSES[0]),
        ("division", "Closed", "'closed', 'open'"),
        ("submitter", " ", "empty"),
        ("framework", "", "empty"),
    ],
)
def test_a_wrong_value(field: str, value: object, problem: str) -> None:
    (found,) = check_description({**good(), field: value})
    assert found.startswith(field)
    assert problem in found


def test_missing_fields_and_more_fields() -> None:
    for field in FIELDS:
        rest = {name: value for name, value in good().items() if name != field}
        assert check_description(rest) == [f"{field} is missing"]
    assert check_description({**good(), "system_type": 7}) == []


def test_describe_writes_what_check_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mybox_n2_pytorch.json"
    assert main(["system", "describe", "--nodes", "2", "--out", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "please fill in" in said.err
    found = json.loads(path.read_text())
    assert (found["system_name"], found["number_of_nodes"]) == ("mybox_n2_pytorch", "2")
    assert found["submitter"] == "unnamed"
    assert main(["system", "check", str(path)]) == 0
    assert main(["system", "describe", "--submitter", "Acme"]) == 0
    assert json.loads(capsys.readouterr().out)["submitter"] == "Acme"


def test_check_prints_one_line_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "wrong": {**good(), "status": "onprem", "division": "both"},
        "list": [],
        "fine": good(),
    }
    for name, contents in texts.items():
        (tmp_path / name).write_text(json.dumps(contents))
    (tmp_path / "broken").write_text("{")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    names = ("wrong", "list", "broken", "binary", "fine", "missing")
    assert main(["system", "check", *(str(tmp_path / name) for name in names)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [Path(line.split(": ")[2]).name for line in lines] == [
        *("wrong", "wrong", "list", "broken", "binary", "missing")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "--nodes", "0"),
        ("describe", "--out", "/nowhere/at/all.json"),
        ("describe", "--out", __file__),
        ("check", "x.json"),
    ],
)
def test_mistakes(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["system", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("mlperf_bert: error: ")

"""What is wrong with a system's description."""

import json
from pathlib import Path

import pytest

from bert_tools.package.system_description import (
    STATUSES,
    check_description,
    read_description,
)

GOOD = {
    "cooling": "",
    "other_software_stack": "",
    "submitter": "Acme",
    "division": "open",
    "status": STATUSES[-1],
    "system_name": "box",
    "number_of_nodes": "2",
    "host_processors_per_node": "1",
    "accelerators_per_node": "0",
    "framework": "PyTorch 2.13.0",
}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert check_description(GOOD) == []


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
    (found,) = check_description({**GOOD, field: value})
    assert found.startswith(field)
    assert problem in found


def test_missing_fields_and_more_fields() -> None:
    for field in GOOD.keys() - {"cooling", "other_software_stack"}:  # for MLCommons' checker
        rest = {name: value for name, value in GOOD.items() if name != field}
        assert check_description(rest) == [f"{field} is missing"]
    assert check_description({**GOOD, "system_type": "7"}) == []


def test_what_is_no_description_is_one_problem(tmp_path: Path) -> None:
    for name, contents in (("list", b"[]"), ("broken", b"{"), ("binary", b"\xff\xfe")):
        (tmp_path / name).write_bytes(contents)
        (problem,) = read_description(tmp_path / name, name)[1]
        assert str(problem).startswith(f"{name}: cannot be read (")
    (problem,) = read_description(tmp_path / "missing", "missing")[1]
    assert "No such file" in str(problem)
    (tmp_path / "wrong").write_text(json.dumps({**GOOD, "status": "onprem", "division": "both"}))
    assert len(read_description(tmp_path / "wrong", "wrong")[1]) == 2

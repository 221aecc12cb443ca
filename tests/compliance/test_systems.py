"""The descriptions in systems/: accepted by our check and MLCommons', one for every config."""

import json
import re

import pytest
from mlperf_logging.system_desc_checker.system_desc_checker import check_system_desc

from bert_tools.package.own_checks import check_description
from mlperf_bert.config.files import load_config
from submissions import system_fields
from support import CONFIGS, REPOSITORY

SYSTEMS = sorted((REPOSITORY / "systems").glob("*.json"))
FOR_ANY_MACHINE = {
    *("cpu_tiny", "encoder_cpu_tiny", "modern_tiny_cpu", "pretrain_cpu", "pretrain_gpu"),
}  # to try
SIZED = re.compile(r"(?:\w+_)?([a-z0-9]+)_(\d+)x(\d+)x\d+x\d+")  # the rule of systems/README.md


def described(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_description(path):
    description = described(path)
    assert check_description(description) == []
    assert tuple(description) == system_fields()
    assert description["system_name"] == path.stem
    number = re.search(r"_n(\d+)_", path.stem)
    assert description["number_of_nodes"] == (number[1] if number else "1")
    for ruleset in ("2.0.0", "4.1.0", "5.0.0"):
        assert check_system_desc(str(path), "training", ruleset)[0]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_has_its_system(path):
    match = SIZED.fullmatch(path.stem)
    if match is None:
        assert path.stem in FOR_ANY_MACHINE
        return
    in_part = REPOSITORY / "systems" / f"{match[1]}_n{match[2]}x{match[3]}_pytorch.json"
    whole = in_part.with_name(f"{match[1]}_n{match[2]}_pytorch.json")
    system = described(in_part if in_part.exists() else whole)
    assert load_config(path).parallel.ranks_per_node == int(system["accelerators_per_node"])

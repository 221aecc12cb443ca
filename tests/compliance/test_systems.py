"""The descriptions in systems/: accepted by our check and MLCommons', one for every config."""

import json
import re
import tomllib

import pytest
from mlperf_logging.system_desc_checker.system_desc_checker import check_system_desc

from bert_tools.package.own_checks import UNKNOWN, check_description
from mlperf_bert.config.files import load_config
from submissions import system_fields
from support import CONFIGS, REPOSITORY

SYSTEMS = sorted((REPOSITORY / "systems").glob("*.json"))
FOR_ANY_MACHINE = {
    *("cpu_tiny", "encoder_cpu_tiny", "bert_cpu_tiny", "pretrain_cpu", "pretrain_gpu"),
}  # to try
SIZED = re.compile(r"(?:\w+_)?([a-z0-9]+)_(\d+)x(\d+)x\d+x\d+")  # the rule of systems/README.md
# What a submitter decides, what the name of a system says, and what `mlperf_bert system` measures.
OWN = {"submitter", "division", "status", "system_name", "number_of_nodes", "hw_notes"}
SOFTWARE = {"framework", "other_software_stack", "operating_system", "sw_notes"}
SOURCES = tomllib.loads((REPOSITORY / "systems" / "sources.toml").read_text(encoding="utf-8"))


def described(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_description(path):
    description = described(path)
    assert check_description(description) == []
    assert tuple(description) == system_fields()
    assert [field for field, value in description.items() if not value.strip()] == []
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


@pytest.mark.parametrize("family", sorted(SOURCES.keys() - {"pages"}))
def test_the_nodes_of_a_family_differ_only_in_their_number(family):
    whole = [described(path) for path in SYSTEMS if re.match(rf"{family}_n\d+_", path.stem)]
    unmeasured = [each for each in whole if UNKNOWN in each["operating_system"]]
    differ = ("system_name", "number_of_nodes", "host_networking_topology")
    common = [each | dict.fromkeys(differ, "") for each in unmeasured]
    assert whole and all(each == common[0] for each in common)


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_every_value_of_the_hardware_is_supported_by_a_page_or_was_measured(path):
    description = described(path)
    if UNKNOWN not in description["operating_system"]:
        return  # measured
    family = SOURCES[path.stem.partition("_")[0]]
    assert family.keys() <= set(system_fields())
    for field in description.keys() - OWN - SOFTWARE:
        value = description[field]
        if UNKNOWN not in value and not value.startswith("none ("):
            assert family[field] and set(family[field]) <= SOURCES["pages"].keys(), field
    assert all(UNKNOWN in description[field] for field in SOFTWARE)
    assert all(page.startswith("https://") for page in SOURCES["pages"].values())

"""The checks, from given facts to findings."""

import tomllib
from pathlib import Path

import pytest

from bert_tools.doctor import checks
from mlperf_bert.config.files import load_config
from support import REPOSITORY

A100: checks.Gpu = ("NVIDIA A100-SXM4-80GB", 80 * 2**30)
TORCH = checks.NEEDED[0]
BUILT_FOR = "torch 2.13.0, CUDA 13.0"


def test_equal_gpus_are_one_good_line() -> None:
    (finding,) = checks.judge_gpus([A100] * 8, 8, BUILT_FOR, None)
    assert finding.status == "ok"
    assert finding.found == "8 x NVIDIA A100-SXM4-80GB 80 GiB, torch 2.13.0, CUDA 13.0"


def test_without_a_gpu(tiny_config: Path) -> None:
    wants_cuda = load_config(tiny_config, ['run.device="cuda"'])
    for of_driver, config, status, words in (
        (0, None, "ok", "trains on the CPU"),
        (0, wants_cuda, "fail", "config asks for 'cuda'"),
        (8, None, "fail", "the driver lists 8 GPUs"),
    ):
        (finding,) = checks.judge_gpus([], of_driver, BUILT_FOR, config)
        assert finding.status == status and words in finding.found
        assert bool(finding.remedy) == (status != "ok")


def test_different_gpus_are_named() -> None:
    other = ("Tesla V100", 16 * 2**30)
    (finding,) = checks.judge_gpus([A100, other], 2, BUILT_FOR, None)
    assert finding.status == "warn" and "Tesla V100" in finding.found


def test_a_config_of_more_ranks_than_gpus_fails(tiny_config: Path) -> None:
    auto = ['run.device="auto"', "parallel.ranks_per_node=8"]
    _, finding = checks.judge_gpus([A100] * 4, 4, BUILT_FOR, load_config(tiny_config, auto))
    assert finding.status == "fail" and "4 for 8 ranks" in finding.found
    for change in ('parallel.share_gpu="allow"', 'run.device="cpu"'):
        config = load_config(tiny_config, [*auto, change])
        assert len(checks.judge_gpus([A100] * 4, 4, BUILT_FOR, config)) == 1


def test_too_few_processors_for_the_ranks_are_warned_of() -> None:
    for usable, status in ((8, "ok"), (7, "warn")):
        finding = checks.judge_processors(usable, ranks=8)
        assert finding.status == status
        assert f"may use {usable} threads" in finding.found
        assert finding.found.startswith(checks.cpu_model())


def test_free_space() -> None:
    for free, status in ((2**20, "fail"), (5 * 2**30, "warn"), (2**40, "ok")):
        assert checks.judge_free(Path("/runs"), free).status == status


@pytest.mark.parametrize(
    ("version", "status", "remedy"),
    [
        ("2.11.0+cu130", "ok", ""),
        ("2.10.1", "warn", "torch>=2.11,<2.14; run in the checkout: tools/venv.sh"),
        ("2.14.0", "warn", "torch>=2.11,<2.14"),
        (None, "fail", "run in the checkout: tools/venv.sh"),
    ],
)
def test_what_is_needed_is_there_in_a_version_that_was_tried(
    version: str | None, status: str, remedy: str
) -> None:
    finding = checks.judge(TORCH, version)
    assert finding.status == status
    assert bool(finding.remedy) == bool(remedy) and remedy in finding.remedy


def test_what_training_can_do_without_says_what_its_lack_costs() -> None:
    apex = checks.judge(checks.OPTIONAL[0], None)
    assert apex.status == "warn"
    assert "optim.implementation 'apex'" in apex.found
    assert apex.remedy == "if you need it: an image that has NVIDIA's apex"


def test_optional_packages_are_shown_where_they_are_needed(tiny_config: Path) -> None:
    assert checks.needed_here(None, has_gpus=True) == {"triton"}
    config = load_config(tiny_config, ["data.loader=mpi_readers"])
    for given, shown in ((None, set()), (config, {"mpi4py"})):
        found = {each.name.removeprefix("packages.") for each in checks.check_packages(given)}
        assert found & {package.name for package in checks.OPTIONAL} == shown


def test_what_is_needed_is_what_pyproject_requires() -> None:
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    listed = {package.name + ">=" + ".".join(map(str, package.lowest)) for package in checks.NEEDED}
    assert listed == {text.partition(",")[0] for text in required["project"]["dependencies"]}


def test_a_package_that_is_not_there_has_no_version() -> None:
    nothing = checks.Package("no-such", "no_such.part", "nothing")
    assert checks.installed_version(nothing) is None
    assert checks.installed_version(TORCH)


def test_a_line_has_status_name_what_was_found_and_the_remedy() -> None:
    line = checks.fail("disk", "two\nlines", "make room").line()
    assert line.split() == ["fail", "disk", "two", "lines;", "make", "room"]

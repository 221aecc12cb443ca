"""`mlperf_bert doctor`: checks from given facts to findings, and the command on this machine."""

import sys
import tomllib
from pathlib import Path

import pytest

from bert_tools.doctor import cli
from bert_tools.doctor.cli import fail, ok
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed import spawn
from support import REPOSITORY, refusal

A100 = ("NVIDIA A100-SXM4-80GB", 80 * 2**30)
TORCH = cli.NEEDED[0]
BUILT_FOR = "torch 2.13.0, CUDA 13.0"


def test_gpus_and_what_a_config_asks_of_them(tiny_config):
    (finding,) = cli.judge_gpus([A100] * 8, 8, BUILT_FOR, None)
    assert finding.status == "ok"
    assert finding.found == "8 x NVIDIA A100-SXM4-80GB 80 GiB, torch 2.13.0, CUDA 13.0"
    (finding,) = cli.judge_gpus([A100, ("Tesla V100", 16 * 2**30)], 2, BUILT_FOR, None)
    assert finding.status == "warn" and "Tesla V100" in finding.found
    for of_driver, device, status, words in (
        (0, None, "ok", "training runs on the CPU"),
        (0, "cuda", "fail", "config needs 'cuda'"),
        (8, None, "fail", "the driver lists 8 GPUs"),
    ):
        config = load_config(tiny_config, [f'run.device="{device}"']) if device else None
        (finding,) = cli.judge_gpus([], of_driver, BUILT_FOR, config)
        assert finding.status == status and words in finding.found
        assert bool(finding.remedy) == (status != "ok")
    auto = ['run.device="auto"', "parallel.ranks_per_node=8"]
    _, finding = cli.judge_gpus([A100] * 4, 4, BUILT_FOR, load_config(tiny_config, auto))
    assert finding.status == "fail" and "4 GPUs, but the config has 8 ranks" in finding.found
    for change in ('parallel.share_gpu="allow"', 'run.device="cpu"'):
        config = load_config(tiny_config, [*auto, change])
        assert len(cli.judge_gpus([A100] * 4, 4, BUILT_FOR, config)) == 1


def test_the_machine_is_its_processors_and_its_gpus():
    (gpus,) = cli.judge_gpus([], 0, BUILT_FOR, None)
    processors = cli.judge_processors(1, 1)
    assert [each.name for each in cli.check_machine(None)] == [processors.name, gpus.name]


def test_processors_and_free_space():
    for usable, status in ((8, "ok"), (7, "warn")):
        finding = cli.judge_processors(usable, ranks=8)
        assert finding.status == status
        assert f"{usable} usable threads" in finding.found
        assert finding.found.startswith(cli.cpu_model())
    for free, status in ((2**20, "fail"), (5 * 2**30, "warn"), (2**40, "ok")):
        assert cli.judge_free(Path("/runs"), free).status == status


def test_packages_are_there_where_they_are_needed(tiny_config):
    for version, status, found in (
        ("2.11.0+cu130", "ok", "2.11.0+cu130"),
        (None, "fail", "not installed, but needed for training"),
    ):
        finding = cli.judge(TORCH, version)
        assert (finding.status, finding.found) == (status, found)
        remedy = "" if status == "ok" else "run tools/venv.sh in the checkout"
        assert finding.remedy == remedy
    assert cli.installed_version(cli.Package("no-such", "no_such.part", "nothing")) is None
    apex = cli.judge(cli.OPTIONAL[0], None)
    assert apex.status == "warn" and "optim.implementation 'apex'" in apex.found
    assert apex.remedy == "use a container image with NVIDIA's apex"
    assert cli.needed_here(None, has_gpus=True) == {"triton"}
    config = load_config(tiny_config, ["data.loader=mpi_readers"])
    for given, shown in ((None, set()), (config, {"mpi4py"})):
        found = {each.name.removeprefix("packages.") for each in cli.check_packages(given)}
        assert found & {package.name for package in cli.OPTIONAL} == shown


def test_what_is_needed_is_what_pyproject_requires():
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    listed = {package.name for package in cli.NEEDED}
    assert listed == {text.partition(">=")[0] for text in required["project"]["dependencies"]}


@pytest.mark.longest
def test_the_whole_of_it_with_two_ranks(tiny_config, capfd):
    status = main(["doctor", "--config", str(tiny_config), "--set", "run.device=cpu"])
    *found, summed = capfd.readouterr().out.splitlines()
    assert {line.split()[1].split(".")[0] for line in found} == {"machine", "disk", "packages"}
    assert status == int(any(line.startswith("fail") for line in found))
    assert summed.startswith("all-reduce: 2 ranks with gloo over ")


def test_the_ranks_of_the_config_are_started(tiny_config, monkeypatch, capsys):
    started = []

    def start(words, ranks):
        started.append((words, ranks))
        return 9

    monkeypatch.setattr(spawn, "run_on_ranks", start)
    monkeypatch.setattr(cli, "CHECKS", {"all-reduce": cli.check_all_reduce})
    settings = ("--set", "parallel.ranks_per_node=4", "--set", "run.device=cpu")
    assert main(["doctor", "--config", str(tiny_config), *settings]) == 1
    ((words, ranks),) = started
    assert ranks == 4
    assert {"network-test", "run.device=cpu", "parallel.ranks_per_node=4"} <= set(words)
    assert "fail  all-reduce" in (line := capsys.readouterr().out) and "status 9" in line


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    def broken(config):
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(cli.CHECKS, "disk", broken)
    monkeypatch.setitem(cli.CHECKS, "all-reduce", lambda config: [])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for name, problem in (("disk", "Input/output error"), ("machine", "ModuleNotFoundError")):
        (failed,) = [line for line in lines if line.startswith(f"fail  {name} ")]
        assert problem in failed
    assert any("packages.numpy" in line for line in lines)


def test_the_exit_status_is_for_schedulers(monkeypatch, capsys):
    assert "--set: needs --config" in refusal(capsys, "doctor", "--set", "run.seed=1")
    for finding, status in ((ok("machine", "8"), 0), (fail("machine", "0\n1", "x"), 1)):
        monkeypatch.setattr(cli, "CHECKS", {"machine": lambda _, found=finding: [found]})
        assert main(["doctor"]) == status
        assert capsys.readouterr().out == finding.line() + "\n"
    assert finding.line().split() == ["fail", "machine", "0", "1;", "x"]

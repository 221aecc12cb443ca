"""`mlperf_bert doctor` as a command: the whole of it on this machine, its options and statuses."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bert_tools.doctor import checks, cli
from bert_tools.doctor.checks import fail, ok
from mlperf_bert.__main__ import main
from mlperf_bert.distributed import spawn


def test_the_whole_of_it_with_two_ranks(
    tiny_config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", "--config", str(tiny_config), "--set", "run.device=cpu"])
    *found, summed = capfd.readouterr().out.splitlines()
    assert {line.split()[1].split(".")[0] for line in found} == {"machine", "disk", "packages"}
    assert status == int(any(line.startswith("fail") for line in found))
    assert summed.startswith("all-reduce: 2 ranks over gloo: sums exactly right, ")


def test_the_ranks_of_the_config_are_started(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], int]] = []

    def start(words: list[str], ranks: int) -> int:
        started.append((words, ranks))
        return 9

    monkeypatch.setattr(spawn, "run_on_ranks", start)
    monkeypatch.setattr(cli, "CHECKS", {"all-reduce": "check_all_reduce"})
    settings = ("--set", "parallel.ranks_per_node=4", "--set", "run.device=cpu")
    assert main(["doctor", "--config", str(tiny_config), *settings]) == 1
    ((words, ranks),) = started
    assert ranks == 4
    assert {"network-test", "run.device=cpu", "parallel.ranks_per_node=4"} <= set(words)
    assert "fail  all-reduce" in (line := capsys.readouterr().out) and "status 9" in line


def test_a_check_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: Any) -> list[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checks, "check_disk", broken)
    monkeypatch.setattr(checks, "check_all_reduce", lambda config: [])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith("fail  disk ")]
    assert "Input/output error" in failed
    assert any("packages.torch" in line for line in lines)


def test_the_exit_status_is_for_schedulers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHECKS", {"machine": "check_machine"})
    for finding, status in ((ok("machine", "8"), 0), (fail("machine", "0", "x"), 1)):
        monkeypatch.setattr(checks, "check_machine", lambda _, found=finding: [found])
        assert main(["doctor"]) == status
        assert capsys.readouterr().out == finding.line() + "\n"


def test_a_wrong_option_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        "--set run.seed=1": "--set: is given without --config",
        "--config missing.toml": "missing.toml: No such file",
    }.items():
        assert main(["doctor", *arguments.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_without_torch_the_other_checks_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(checks, "check_all_reduce", lambda config: [])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail  machine") and "ModuleNotFoundError" in line for line in lines)
    assert any("packages.numpy" in line for line in lines)

"""`mlperf_bert doctor` as a command: the whole of it on this machine, its options and statuses."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bert_tools.doctor import cli, host, packages, storage
from mlperf_bert.__main__ import main
from mlperf_bert.distributed.network_test.findings import fail, ok

NAMES = {"gpus", "machine", "disk", "limits", "packages", "data", "caches", "network"}


@pytest.fixture(scope="module")
def whole(synthetic_data: Path, tiny_config: Path) -> dict[str, Any]:
    """The JSON object of a doctor on this machine, with two ranks that it starts itself."""
    options = ["--json", "--device", "cpu", "--config", tiny_config, "--data", synthetic_data]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setattr(storage, "_OWN_BYTES", 2**22)
        status = main(["doctor", *map(str, options)])
    result: dict[str, Any] = json.loads(output.getvalue())
    failed = [check for check in result["checks"] if check["status"] == "fail"]
    assert (status, bool(failed)) in {(0, False), (1, True)}
    return result


def test_all_checks_are_made_and_every_finding_has_its_four_parts(whole: dict[str, Any]) -> None:
    assert {check["name"].split(".")[0] for check in whole["checks"]} == NAMES == set(cli.NAMES)
    assert whole["schema_version"] == 1
    for check in whole["checks"]:
        assert set(check) == {"status", "name", "found", "remedy"}
        assert check["status"] in {"ok", "info", "warn", "fail"}
        assert bool(check["remedy"]) == (check["status"] != "ok")


def test_a_fresh_machine_without_a_gpu_has_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that may be missing is there: caches may not be dropped, few files may be open."""
    monkeypatch.setattr(host, "DROP_CACHES", Path("/nonexistent"))
    monkeypatch.setattr(host, "_sudo_may_drop", lambda: False)
    monkeypatch.setattr(host, "_soft_limit", lambda _: 1024)
    monkeypatch.setattr(
        packages, "installed_version", lambda package: None if package.source else ""
    )
    assert main(["doctor", "--only", "gpus,machine,limits,packages,data,caches"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "info"}
    infos = [line.split()[1] for line in lines if line.startswith("info ")]
    assert infos == ["gpus", "limits.open_files", "data", "caches"]


def test_two_real_ranks_reach_each_other(whole: dict[str, Any]) -> None:
    found = {check["name"]: check for check in whole["checks"]}
    for part in ("ranks", "versions", "allreduce", "bandwidth", "latency", "clocks"):
        assert found[f"network.{part}"]["status"] == "ok", found[f"network.{part}"]
    assert "all 2 ranks came" in found["network.ranks"]["found"]
    assert "gloo: sums exactly right" in found["network.allreduce"]["found"]


def test_a_check_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: Any) -> list[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "check_disk", broken)
    assert main(["doctor", "--only", "caches,disk,limits"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fail  disk ")
    assert "Input/output error" in lines[0]
    assert any("limits.open_files" in line for line in lines)
    assert any("caches" in line for line in lines)


def test_ranks_that_end_before_they_report_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlperf_bert.distributed.spawn.run_on_ranks", lambda *_, **__: 9)
    assert main(["doctor", "--only", "network", "--device", "cpu"]) == 1
    assert "2 ranks ended with status 9" in capsys.readouterr().out


def test_the_exit_status_is_for_schedulers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for finding, status in ((ok("gpus", "8"), 0), (fail("gpus", "0", "x"), 1)):
        monkeypatch.setattr("bert_tools.doctor.gpus.check", lambda _, found=finding: [found])
        assert main(["doctor", "--only", "gpus"]) == status
        assert capsys.readouterr().out == finding.line() + "\n"


def test_a_wrong_option_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        "--only gpu": "--only: has no check 'gpu'",
        "--timeout 0": "--timeout: is 0",
        "--timeout nan": "--timeout: is nan",
        "--burn-in soon": "--burn-in: is 'soon'",
        "--burn-in 1m --only gpus": "--only: is given beside --burn-in",
        "--burn-in 1m --data d": "--data: is given beside --burn-in",
        "--set run.seed=1": "--set: is given without --config",
        "--config missing.toml": "missing.toml: No such file",
    }.items():
        assert main(["doctor", *arguments.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_without_torch_the_local_checks_are_made_and_a_burn_in_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_rank_info", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--only", "gpus,limits,network"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail  gpus") and "ModuleNotFoundError" in line for line in lines)
    assert any("limits.open_files" in line for line in lines)
    assert any(line.startswith("fail  network") for line in lines)
    monkeypatch.setitem(sys.modules, "bert_tools.doctor.burn_in", None)
    monkeypatch.delattr("bert_tools.doctor.burn_in", raising=False)
    assert main(["doctor", "--burn-in", "1s"]) == 1
    assert capsys.readouterr().out.startswith("fail  burn_in")

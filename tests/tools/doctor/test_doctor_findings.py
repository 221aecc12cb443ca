"""Findings: lines, JSON, statuses, checks that raise or hang, and those of many hosts as one."""

import threading

import pytest

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.network_test.findings import (
    Finding,
    as_json,
    examined,
    exit_status,
    fail,
    from_json,
    merged,
    ok,
    warn,
)

GOOD = ok("disk.read", "900 MB/s")
SLOW = warn("disk.read", "9 MB/s", "copy the data")
BROKEN = fail("gpus", "none", "use others")


def test_a_line_has_status_name_what_was_found_and_the_remedy() -> None:
    assert GOOD.line().split() == ["ok", "disk.read", "900", "MB/s"]
    assert SLOW.line().endswith("9 MB/s; copy the data")
    assert len(fail("gpus", "two\nlines", "mend\nthem").line().splitlines()) == 1


def test_json_comes_back_as_it_was() -> None:
    result = as_json([GOOD, SLOW])
    assert result["schema_version"] == 1
    assert result["checks"][1] == {
        "status": "warn",
        "name": "disk.read",
        "found": "9 MB/s",
        "remedy": "copy the data",
    }
    assert from_json(result["checks"]) == [GOOD, SLOW]


@pytest.mark.parametrize(
    ("findings", "status"), [([], 0), ([GOOD, SLOW], 0), ([GOOD, BROKEN, SLOW], 1)]
)
def test_only_a_failure_refuses(findings: list[Finding], status: int) -> None:
    assert exit_status(findings) == status


def test_a_check_that_raises_fails_with_its_reason() -> None:
    def raises() -> list[Finding]:
        raise ZeroDivisionError("by zero\nand more")

    (finding,) = examined("disk", raises, 10)
    assert finding.status == "fail"
    assert finding.name == "disk"
    assert finding.found == "ZeroDivisionError: by zero"


def test_a_users_mistake_keeps_its_remedy() -> None:
    def raises() -> list[Finding]:
        raise ConfigError("run.device", "is 'cuda'", "use 'cpu'")

    assert examined("gpus", raises, 10) == [fail("gpus", "run.device: is 'cuda'", "use 'cpu'")]


def test_a_check_that_hangs_is_left_behind() -> None:
    let_go = threading.Event()

    def hangs() -> list[Finding]:
        let_go.wait(60)
        return [GOOD]

    (finding,) = examined("disk", hangs, 0.05)
    let_go.set()
    assert finding.status == "fail"
    assert "0.05 s" in finding.found
    assert "--timeout" in finding.remedy


def test_hosts_that_agree_are_one_line_and_the_others_are_named() -> None:
    lines = merged({"n1": [GOOD], "n2": [SLOW], "n3": [ok("disk.read", "800 MB/s")], "n4": [SLOW]})
    assert lines == [
        ok("disk.read", "2 hosts, n1: 900 MB/s"),
        warn("disk.read", "n2, n4: 9 MB/s", "copy the data"),
    ]

"""The network test: findings, judgement of given numbers, and ranks that come late, or never."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.network_test import all_ranks
from mlperf_bert.distributed.network_test import findings as network_findings
from mlperf_bert.distributed.network_test.all_ranks import ring_pairs
from mlperf_bert.distributed.network_test.findings import (
    Finding,
    Options,
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
HERE: dict[int, dict[str, Any]] = {
    rank: {
        "host": f"n{rank // 2}",
        "node": rank // 2,
        "versions": "torch 2.13",
        "error": None,
        "shares_gpu": False,
    }
    for rank in range(4)
}
PAIRS = {(0, 1): 9e10, (1, 2): 1e10, (2, 3): 9e10, (3, 0): 1e10}


def measured(**changes: Any) -> dict[int, dict[str, Any]]:
    """Measurements of four healthy ranks on two nodes, changed on rank 3."""
    result: dict[int, dict[str, Any]] = {}
    for rank in range(4):
        result[rank] = {
            "sum_is_right": True,
            "connected_s": 0.5,
            "clock": [[100.0 + n, 100.001 + n] for n in range(5)],
            "latency_s": 5e-5,
            "large": {"seconds": 1e-3, "is_right": True},
            "pairs": {
                str(b if rank == a else a): rate for (a, b), rate in PAIRS.items() if rank in (a, b)
            },
        }
    result[3] |= changes
    return result


def judged(backend: str = "nccl", **changes: Any) -> dict[str, Finding]:
    findings = network_findings.judge(measured(**changes), HERE, backend)
    worst: dict[str, Finding] = {}
    for finding in findings:
        if finding.name not in worst or finding.status != "ok":
            worst[finding.name] = finding
    return worst


def test_a_healthy_network_is_good() -> None:
    found = judged()
    assert {finding.status for finding in found.values()} == {"ok"}
    # 2 x 3/4 x 64 MiB in a millisecond
    assert "100.66 GB/s bus bandwidth" in found["network.bandwidth"].found
    assert "50 us" in found["network.latency"].found


CLOCK_AHEAD = [[103.0 + n, 103.001 + n] for n in range(5)]
SLOW_ROUNDS = [[100.5 + n, 104.0 + n] for n in range(5)]  # the clock may well be right
SLOW_ALL_REDUCE = {"large": {"seconds": 0.1, "is_right": True}}


@pytest.mark.parametrize(
    ("backend", "changes", "name", "status", "words"),
    [
        ("nccl", {"sum_is_right": False}, "allreduce", "fail", ["rank 3 (n1)"]),
        (
            *("nccl", {"large": {"seconds": 1e-3, "is_right": False}}, "allreduce", "fail"),
            ["rank 3 (n1)"],
        ),
        ("nccl", SLOW_ALL_REDUCE, "bandwidth", "warn", ["below 5"]),
        ("gloo", SLOW_ALL_REDUCE, "bandwidth", "ok", []),
        ("nccl", {"latency_s": 5e-3}, "latency", "warn", ["above 1,000"]),
        ("gloo", {"latency_s": 5e-3}, "latency", "ok", []),
        # Links between nodes are nine times slower than those within, and that is as it should be.
        (
            *("nccl", {"pairs": {"2": 9e10, "0": 1e9}}, "neighbours", "warn"),
            ["rank 0 (n0) with rank 3 (n1) 0.18 of it"],
        ),
        ("nccl", {"clock": CLOCK_AHEAD}, "clocks", "warn", ["rank 3 (n1)", "+3.0 s"]),
        ("nccl", {"clock": SLOW_ROUNDS}, "clocks", "ok", []),
    ],
)
def test_numbers_that_are_not_right_name_the_rank(
    backend: str, changes: dict[str, Any], name: str, status: str, words: list[str]
) -> None:
    finding = judged(backend, **changes)[f"network.{name}"]
    assert finding.status == status
    assert all(word in finding.found for word in words)
    assert "rank 1" not in finding.found and "rank 2" not in finding.found


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 9])
def test_every_link_of_the_ring_has_its_turn(world_size: int) -> None:
    turns = [ring_pairs(world_size, turn) for turn in range(3)]
    for pairs in turns:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    links = [frozenset(pair) for pairs in turns for pair in pairs]
    assert len(links) == len(set(links))
    assert set(links) == {frozenset((r, (r + 1) % world_size)) for r in range(world_size)}


def test_clocks_are_bounded_by_the_rounds() -> None:
    true_offset, rounds = 3.0, [(10.0, 10.2), (11.0, 11.05)]
    other = [(10.1 + true_offset, 10.15 + true_offset), (11.02 + true_offset, 11.06 + true_offset)]
    middle, error = network_findings.clock_offset(rounds, other)
    assert abs(middle - true_offset) <= error <= 0.05


@pytest.mark.parametrize(
    ("ranks", "changes", "expected"),
    [
        ([3], {"versions": "torch 2.11"}, (0, "fail", "torch 2.11 on rank 3 (n1)")),
        (
            *([2], {"error": ["run.device 8 ranks see 1 GPU", "see all"]}),
            (1, "fail", "rank 2 (n1): run.device 8 ranks see 1 GPU; see all"),
        ),
        ([0, 1, 2, 3], {"shares_gpu": True}, (1, "warn", "share GPUs: tried over gloo, not NCCL")),
    ],
)
def test_ranks_that_differ_or_lack_a_device_are_named(
    ranks: list[int], changes: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    here = {rank: facts | (changes if rank in ranks else {}) for rank, facts in HERE.items()}
    number, status, words = expected
    finding = network_findings.judge_versions(here)[number]
    assert finding.status == status
    assert words in finding.line()


def test_the_config_says_whether_ranks_may_share_a_gpu(tiny_config: Path) -> None:
    assert Options().share_gpu == "allow"
    assert Options(config=load_config(tiny_config)).share_gpu == "refuse"
    for setting in ('parallel.share_gpu="allow"', 'data.loader="mpi_readers"'):
        assert Options(config=load_config(tiny_config, [setting])).share_gpu == "allow"


@pytest.mark.parametrize("command", ["doctor --only network --device cpu", "network-test"])
@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "1 of 2 ranks came (node0); not within 0.5 s: rank 1;"),
        (1, "rank 1 on node1: cannot reach rank 0"),
    ],
)
def test_a_rank_that_never_comes_is_one_line(
    rank: int,
    words: str,
    command: str,
    port: int,
    tiny_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    one_of_two_tasks = {
        **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": f"node{rank}"},
        **{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
    }
    for name, value in one_of_two_tasks.items():
        monkeypatch.setenv(name, value)
    assert main([*command.split(), "--config", str(tiny_config), "--timeout", "0.5"]) == 1
    printed = capfd.readouterr()
    failed = [line for line in printed.out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert words in failed[0]
    assert printed.err == ""


def two_ranks(
    measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, finding: Finding = GOOD
) -> dict[int, Any]:
    """The output (or None) and result of `examine` on two ranks; `measure` is theirs.

    The ranks are threads; each node's own check finds `finding`.
    """
    monkeypatch.setattr(all_ranks, "measure", measure)
    monkeypatch.setattr(all_ranks, "_LAST_WORDS_S", 0.2)
    monkeypatch.setattr(all_ranks, "set_cpu_threads", lambda info: 1)
    options = Options(device="cpu", timeout_s=1.0)
    returned: dict[int, Any] = {}

    def rank(number: int) -> None:
        info = RankInfo(number, 2, 0, 1, number, "slurm")
        shown: list[list[Finding]] = []
        status = all_ranks.examine(info, [lambda: [finding]], options, shown.append)
        returned[number] = (shown[0] if shown else None, status)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return returned


def test_only_rank_zero_has_findings_and_all_have_the_status(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = measured()

    def measure(info: RankInfo, *_: Any) -> dict[str, Any]:
        return {**numbers[info.rank], "pairs": {str(1 - info.rank): 1e9}}

    returned = two_ranks(measure, monkeypatch, warn("limits.open_files", "1024", "raise it"))
    assert returned[1] == (None, 0)
    findings, status = returned[0]
    assert status == 0
    limits = [finding for finding in findings if finding.name == "limits.open_files"]
    assert [finding.status for finding in limits] == ["warn"]  # once for both nodes
    assert "(node 0), " in limits[0].found
    assert "all 2 ranks came" in next(f.found for f in findings if f.name == "network.ranks")


@pytest.mark.parametrize(
    ("failing", "error", "words"),
    [
        (
            1,
            "NCCL error: cable\nmany lines",
            ["no end within 1 s", "rank 1 (", "Error: NCCL error"],
        ),
        (0, "connection closed", ["connection closed", "no word from rank 1"]),
    ],
)
def test_ranks_that_fail_or_hang_are_named(
    failing: int, error: str, words: list[str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()

    def measure(info: RankInfo, *_: Any) -> dict[str, Any]:
        if info.rank == failing:
            raise RuntimeError(error)
        let_go.wait(60)  # as a collective waits for the other rank
        return {}

    returned = two_ranks(measure, monkeypatch)
    let_go.set()
    assert returned[1] == (None, 1)
    findings, status = returned[0]
    assert (status, findings[-1].status) == (1, "fail")
    assert all(word in findings[-1].found for word in words)
    assert "many lines" not in findings[-1].found


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


def test_only_a_failure_refuses() -> None:
    assert exit_status([]) == exit_status([GOOD, SLOW]) == 0
    assert exit_status([GOOD, BROKEN, SLOW]) == 1


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (
            *(ZeroDivisionError("by zero\nand more"), "ZeroDivisionError: by zero"),
            "mend that, or leave the check out (--only)",
        ),
        (ConfigError("run.device", "is 'cuda'", "use 'cpu'"), "run.device: is 'cuda'", "use 'cpu'"),
    ],
)
def test_a_check_that_raises_fails_with_its_reason(
    error: Exception, found: str, remedy: str
) -> None:
    def raises() -> list[Finding]:
        raise error

    assert examined("disk", raises, 10) == [fail("disk", found, remedy)]


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

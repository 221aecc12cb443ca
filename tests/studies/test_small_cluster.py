"""small_cluster.py: its sums, its predictions, its namespaces, and two ranks that do the work."""

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from support import REPOSITORY, load_study, run_process, run_study

STUDY = REPOSITORY / "logs" / "2026-11-27-small-cluster"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_study(STUDY.name, "small_cluster")


@pytest.fixture(scope="module")
def hosts(tool: ModuleType) -> ModuleType:
    return sys.modules["hosts"]


def step(end: float, backward_end: float, reduced: float, tokens: list[int]) -> dict[str, Any]:
    seen = {"end": end, "backward_end": backward_end, "reduced": reduced, "tokens": tokens}
    return seen | {"processor": end / 10, "received": 300 * end}


def test_a_step_ends_with_the_slowest_rank(tool: ModuleType) -> None:
    tokens = [[5, 5], [7, 3], [4, 6]]
    first, second = (
        {
            **{name: [] for name in ("reduce", "scatter", "gather", "nested")},
            "alone": [
                [step(end, 0, end - 0.1, each) for end, each in zip(ends, tokens, strict=True)]
            ],
            "buckets": {},
            "blocks": {
                "arm": [
                    [
                        step(end, end - 0.5, end - later, each)
                        for end, each in zip(ends, tokens, strict=True)
                    ]
                ]
            },
        }
        for ends, later in (((1.0, 2.0, 3.0), 0.1), ((1.1, 2.3, 2.9), 0.3))
    )
    found = tool.merged([first, second])
    assert found["blocks"]["arm"]["step_ms"] == [[1200.0, 700.0]]
    # Backward ended at 1.5 and 1.8, gradients had come at 1.9 and 2.0; then 2.5, 2.4, 2.9, 2.6.
    assert found["blocks"]["arm"]["exposed_ms"] == [[200.0, 400.0]]
    assert found["blocks"]["arm"]["tokens"] == [tokens[1:]]
    assert found["blocks"]["arm"]["processor_ms"] == [pytest.approx((200 + 180) / tool.STEPS)]
    assert found["blocks"]["arm"]["received"] == 300
    alone = [list(each.values()) for each in found["calibration"]["alone"]]
    assert alone == [[7, 1200.0, 100.0], [6, 700.0, 100.0]]


def record(tool: ModuleType, clip: str, *, sharding: str = "flat") -> dict[str, Any]:
    """Two ranks of 1 ms a token; a collective takes 10 ms, an update 6.4, a clip 2.4, else 15."""
    flat = [[0, 0.010], [8_000_000, 0.010]]
    steps = [{"tokens": 100, "step": 123.8, "update": 6.4}]
    return {
        **{"ranks": 2, "nodes": 2, "bits_per_s": 1e9, "compute": "sleep", "ms_per_token": 1.0},
        "model": tool.load_config(tool.BASE, []).model,
        "arms": {"arm": {"set": {"clip.policy": clip, "parallel.data_parallel": sharding}}},
        "calibration": {"reduce": flat, "scatter": flat, "gather": flat, "nested": flat}
        | {"alone": steps},
        "buckets": {"arm": [[4_000_000, 0], [4_000_000, 9]]},
        "blocks": {
            "arm": {
                **{"tokens": [[[100, 300]]], "step_ms": [[340.0]], "exposed_ms": [[10.0]]},
                "received": 1000,
            }
        },
    }


def test_a_prediction_adds_the_slowest_ranks_work_to_what_is_exposed(tool: ModuleType) -> None:
    # The second bucket is ready when backward ends; the first has travelled by then.
    found = tool.compared(record(tool, "none"), "arm")
    assert found["predicted_ms"] == pytest.approx(300 + 15 + 10 + 6.4, abs=0.01)
    assert found["predicted_exposed_ms"] == pytest.approx(10, abs=0.1)
    assert (found["step_ms"], found["exposed_ms"], found["imbalance"]) == (340.0, 10.0, 1.5)


@pytest.mark.parametrize(
    ("clip", "more"),
    [
        ("whole_before_allreduce", 2.4),  # clipped, then sent as one
        ("bucket_before_allreduce", 2.4),  # the first bucket is hidden as before
        ("after_allreduce", 2.4),
    ],
)
def test_a_prediction_clips_once(tool: ModuleType, clip: str, more: float) -> None:
    found = tool.compared(record(tool, clip), "arm")
    assert found["predicted_ms"] == pytest.approx(331.4 + more, abs=0.01)


def test_a_sharded_prediction_updates_half_and_gathers(tool: ModuleType) -> None:
    found = tool.compared(record(tool, "none", sharding="shard_world"), "arm")
    # 28 of 32 bytes are of the update, which is halved; all gradients are zeroed.
    assert found["predicted_ms"] - 331.4 == pytest.approx(10 - 6.4 * 28 / 32 / 2, abs=0.01)


def test_an_exchange_in_the_step_comes_first(tool: ModuleType) -> None:
    exchanging = record(tool, "none")
    exchanging["arms"]["arm"]["in_step"] = True
    exchanging["calibration"]["gather"] = [[0, 0.0], [4000, 0.004]]
    # A rank receives 1,000 bytes of one other, so 2,000 are gathered.
    assert tool.compared(exchanging, "arm")["predicted_ms"] == pytest.approx(333.4, abs=0.01)


def test_times_between_and_beyond_what_was_measured(tool: ModuleType) -> None:
    times = sys.modules["predict"].Times([(1000, 0.003), (2000, 0.003), (3000, 0.005)])
    assert [times.ms(size) for size in (10, 1500, 2500, 4000)] == pytest.approx([3, 3, 4, 7])


def test_a_gain_is_in_tokens_a_second(tool: ModuleType) -> None:
    two = record(tool, "none")
    for key in ("arms", "buckets", "blocks"):
        two[key]["nothing"] = two[key]["arm"]
    two["blocks"]["arm"] = two["blocks"]["arm"] | {"tokens": [[[200, 200]]], "step_ms": [[170.0]]}
    # Predicted: 231.4 ms beside 331.4 of as many tokens.
    gains = [2.0, 2.0, 2.0, 331.4 / 231.4]
    assert tool.gain(two, "arm", "nothing") == pytest.approx(gains, abs=1e-3)
    rows = list(tool.techniques({"x": two | {"network": "slow"}}))
    gained = "10 ms (10) | 2.00 (2.00 to 2.00; predicted 1.43) |"
    assert rows[2] == f"| 2, slow | arm | 1.000 | 170 ms | 231 ms | +36.1% | {gained}"


@pytest.mark.parametrize(
    ("user", "missing", "said"), [(1000, "", "root"), (0, "ip", "ip: "), (0, "tc", "tc: ")]
)
def test_without_root_or_a_command_one_line_says_so(
    tool: ModuleType,
    hosts: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    user: int,
    missing: str,
    said: str,
) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: user)
    monkeypatch.setattr(
        hosts.shutil, "which", lambda name: None if name == missing else f"/sbin/{name}"
    )
    assert run_study(tool) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("small_cluster: error: ")
    assert said in line


@pytest.fixture
def commands(hosts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run; `ip link add` fails."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(list(command))
        failed = list(command[:3]) == ["ip", "link", "add"]
        return subprocess.CompletedProcess(command, int(failed), "", "no\n veth" if failed else "")

    monkeypatch.setattr(hosts.subprocess, "run", run)
    return seen


def test_namespaces_go_when_the_link_cannot_be_made(
    hosts: ModuleType, commands: list[list[str]]
) -> None:
    with pytest.raises(hosts.ConfigError, match="no veth"), hosts.linked_hosts(2):
        pass
    added = [command[-1] for command in commands if command[:3] == ["ip", "netns", "add"]]
    deleted = [command[-1] for command in commands if command[:3] == ["ip", "netns", "delete"]]
    assert len(set(added)) == 3
    assert deleted == added


def test_hosts_reach_each_other_at_the_rate_and_go_after_ctrl_c(hosts: ModuleType) -> None:
    try:
        hosts.check_possible()
    except hosts.ConfigError as error:
        pytest.skip(str(error))
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt), hosts.linked_hosts(3, 8e6) as names:
        made += names
        for name in names:
            shown = run_process("ip", "netns", "exec", name, "tc", "qdisc", "show", "dev", "veth0")
            assert "tbf" in shown.stdout
            assert "rate 8Mbit" in shown.stdout
        serve = "import socket; print(socket.create_server(('10.0.0.3', 5000)).accept()[1][0])"
        command = ["ip", "netns", "exec", names[2], sys.executable, "-c", serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            call = (
                "import socket, time\n"
                "while socket.socket().connect_ex(('10.0.0.3', 5000)): time.sleep(0.05)"
            )
            run_process("ip", "netns", "exec", names[0], sys.executable, "-c", call)
            assert server.communicate(timeout=20)[0] == "10.0.0.1\n"
        raise KeyboardInterrupt
    left = run_process("ip", "netns", "list").stdout
    assert not any(name in left for name in made)


def test_a_rank_that_fails_ends_the_wait_for_the_other(tool: ModuleType) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as slow,
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as failing,
    ):
        try:
            with pytest.raises(tool.ConfigError, match="rank 1: ended with status 3"):
                tool.wait_for_all([slow, failing])
            assert slow.poll() is None
        finally:
            slow.kill()


@pytest.fixture(scope="module")
def measured(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One round of two ranks, without namespaces, of arms that send in different ways."""
    out = tmp_path_factory.mktemp("cluster")
    tool.make_set(out / "set")
    names = ("nothing", "lengths: exchange_global, in the step", "shards: world")
    arms = {name: tool.ARMS[name] for name in names}
    arms["first"] = tool.bucket_arms()["bucket_before_allreduce, 0.8, first 0.02"]
    job = {
        **{"name": "test", "compute": "sleep", "ms_per_token": 0.01, "arms": arms, "rounds": 1},
        **{"data": str(out / "set"), "parallel.nodes": 1, "parallel.ranks_per_node": 2},
    }
    (out / "job.json").write_text(json.dumps(job))
    done = run_process(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *(STUDY / "cluster_rank.py", out / "job.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1" in done.stdout
    answers = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(2)]
    found: dict[str, Any] = tool.merged(answers)
    return job | found


def test_ranks_sleep_for_their_tokens_and_time_every_step(
    tool: ModuleType, measured: dict[str, Any]
) -> None:
    parameters = tool.load_config(tool.BASE, []).model.num_parameters
    for name in measured["arms"]:
        total = sum(size for size, _ in measured["buckets"][name])
        assert 4 * parameters < total < 4.4 * parameters  # with the flat buffers' padding
        (times,), (tokens,) = (measured["blocks"][name][key] for key in ("step_ms", "tokens"))
        assert len(times) == len(tokens) == tool.STEPS
        assert all(time > 0.01 * max(own) for time, own in zip(times, tokens, strict=True))
    assert measured["buckets"]["first"][0][0] < measured["buckets"]["first"][1][0] / 10
    assert len(measured["calibration"]["alone"]) == 3 * tool.STEPS


def test_other_ways_to_deal_have_the_same_tokens(measured: dict[str, Any]) -> None:
    drawn, dealt = (
        measured["blocks"][name]["tokens"][0]
        for name in ("nothing", "lengths: exchange_global, in the step")
    )
    assert [sum(each) for each in drawn] == [sum(each) for each in dealt]
    assert drawn != dealt

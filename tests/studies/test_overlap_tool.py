"""measure_overlap.py: its arithmetic, its picture, what it watches, and that it cleans up."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import REPOSITORY, load_study, run_process, run_study

STUDY = REPOSITORY / "logs" / "2026-11-21-overlap"
JOB = Path(__file__).with_name("overlap_job.py")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_study(STUDY.name, "measure_overlap")


@pytest.fixture(scope="module")
def link(tool: ModuleType) -> ModuleType:
    return sys.modules["overlap_link"]


def record(start: float, end: float, **other: Any) -> dict[str, Any]:
    """A step that began and ended then, with three buckets sent in its backward's second half."""
    length = end - start
    at = [start + length * share for share in (0.5, 0.6, 0.7)]
    return {
        "start": start,
        "forward_end": start + 0.2 * length,
        "ready": at,
        "sent": at,
        "done": [time + 0.1 * length for time in at],
        "backward_end": start + 0.8 * length,
        "optimizer_start": start + 0.9 * length,
        "end": end,
        **other,
    }


def test_a_step_takes_as_long_as_on_the_slower_rank(tool: ModuleType) -> None:
    first = {"none": [record(1.0, 2.0), record(5.0, 7.0)]}
    second = {"none": [record(1.5, 3.0), record(6.0, 7.0)]}
    assert tool.step_times_ms([first, second]) == {"none": [1500.0, 2000.0]}


def test_backward_is_the_slower_ranks_until_its_last_gradient(tool: ModuleType) -> None:
    # Half of a step by `record`: 1, 2 and 3 s on one rank, 2, 2 and 2 s on the other.
    first, second = (
        {"none, alone": [record(0.0, end) for end in ends]}
        for ends in ((2.0, 4.0, 6.0), (4.0, 4.0, 4.0))
    )
    assert tool.backward_ms([first, second]) == pytest.approx(2000)


def test_exposed_is_a_difference_of_medians_and_paired_a_median_of_differences(
    tool: ModuleType,
) -> None:
    # The second and third round are slow for both, so that pairing sees what medians do not.
    times = {"none": [20.0, 130.0, 140.0], "none, alone": [10.0, 90.0, 120.0]}
    (found,) = tool.exposures(times)
    assert (found.mode, found.step_ms, found.alone_ms) == ("none", 130.0, 90.0)
    assert found.exposed_ms == 40.0
    assert found.paired_ms == 20.0
    assert found.paired_quartiles_ms == (15.0, 30.0)


def exposed(tool: ModuleType, **by_mode: float) -> list[Any]:
    times = {"none, no hook": [110.0] * 3, "none, no hook, alone": [100.0] * 3}
    for mode, ms in by_mode.items():
        times |= {mode: [100 + ms] * 3, f"{mode}, alone": [100.0] * 3}
    found: list[Any] = tool.exposures(times)
    return found


@pytest.mark.parametrize(("bucket_ms", "verdict"), [(11.0, "met"), (12.0, "MISSED")])
def test_bars_compare_what_is_exposed(tool: ModuleType, bucket_ms: float, verdict: str) -> None:
    found = exposed(
        tool, none=100.0, bucket_before_allreduce=bucket_ms, whole_before_allreduce=200.0
    )
    no_hook, none, whole = tool.bars(found)
    assert (no_hook.ratio, none.ratio, whole.ratio) == pytest.approx(
        (bucket_ms / 10, bucket_ms / 100, bucket_ms / 200)
    )
    assert no_hook.paired_ratio == pytest.approx(no_hook.ratio)
    assert no_hook.in_words().endswith(verdict)
    assert none.in_words().endswith("met")


def test_table_has_a_row_for_each_mode_that_sends(tool: ModuleType) -> None:
    lines = tool.table(2048, exposed(tool, none=20.0)).splitlines()
    assert "vocabulary 2,048" in lines[0]
    assert lines[2:] == [
        "| none, no hook | 110 | 100 | 10 | 10 (10 .. 10) | 0.50 |",
        "| none | 120 | 100 | 20 | 20 (20 .. 20) | 1.00 |",
    ]


def drawable(tool: ModuleType) -> Any:
    """Both ranks' records of three rounds, the second one in the middle; rank 1 begins late."""
    timeline = sys.modules["overlap_timeline"]
    ranks = [
        {
            mode: [record(9.0 + late, 9.9), record(20 + late, 21.0), record(30.0 + late, 31.5)]
            for mode in timeline.PANELS
        }
        for late in (0.0, 0.25)
    ]
    return timeline.representative(ranks, tool.step_times_ms(ranks))


def test_the_step_nearest_the_median_is_drawn_from_its_first_ranks_start(tool: ModuleType) -> None:
    for rows in drawable(tool).values():
        assert [row["start"] for row in rows] == pytest.approx([0.0, 250.0])
        assert [row["end"] for row in rows] == pytest.approx([1000.0, 1000.0])
        assert rows[0]["ready"] == pytest.approx([500.0, 600.0, 700.0])


def test_backward_ends_with_its_last_gradient_and_waiting_follows(tool: ModuleType) -> None:
    timeline = sys.modules["overlap_timeline"]
    found = timeline.spans(record(0.0, 100.0))
    assert [colour for colour, _, _ in found] == [
        *(timeline.FORWARD, timeline.BACKWARD, timeline.WAITING),
        *(timeline.CLIPPING, timeline.OPTIMIZER),
    ]
    assert [begin for _, begin, _ in found] == pytest.approx([0, 20, 70, 80, 90])
    assert [length for _, _, length in found] == pytest.approx([20, 50, 10, 10, 10])


def test_picture_is_drawn(tool: ModuleType) -> None:
    assert sys.modules["overlap_timeline"].draw(drawable(tool)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("user", "missing", "said"), [(1000, "", "root"), (0, "ip", "ip: "), (0, "tc", "tc: ")]
)
def test_without_root_or_a_command_one_line_says_so(
    tool: ModuleType,
    link: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    user: int,
    missing: str,
    said: str,
) -> None:
    monkeypatch.setattr(link.os, "geteuid", lambda: user)
    monkeypatch.setattr(
        link.shutil, "which", lambda name: None if name == missing else f"/sbin/{name}"
    )
    assert run_study(tool, "--out", tmp_path / "new") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("measure_overlap: error: ")
    assert said in line
    assert not (tmp_path / "new").exists()


def test_too_few_steps_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    assert run_study(tool, "--out", tmp_path / "new", "--steps", "19") == 2
    assert not (tmp_path / "new").exists()


@pytest.fixture
def commands(link: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run; `ip link add` fails."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(list(command))
        failed = list(command[:3]) == ["ip", "link", "add"]
        return subprocess.CompletedProcess(command, int(failed), "", "no\n veth" if failed else "")

    monkeypatch.setattr(link.subprocess, "run", run)
    return seen


def test_namespaces_go_when_the_link_cannot_be_made(
    link: ModuleType, commands: list[list[str]]
) -> None:
    with pytest.raises(link.ConfigError, match="no veth"), link.linked_namespaces():
        pass
    added = [command[-1] for command in commands if command[:3] == ["ip", "netns", "add"]]
    deleted = [command[-1] for command in commands if command[:3] == ["ip", "netns", "delete"]]
    assert len(set(added)) == 2
    assert deleted == added


def test_namespaces_see_each_other_at_the_rate_and_go_after_ctrl_c(link: ModuleType) -> None:
    try:
        link.check_possible()
    except link.ConfigError as error:
        pytest.skip(str(error))
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt), link.linked_namespaces() as names:
        made += names
        inside = ["ip", "netns", "exec", names[0]]
        set_rate = "from overlap_link import throttle; throttle(8e6)"
        subprocess.run([*inside, sys.executable, "-c", set_rate], cwd=STUDY, check=True)
        shown = subprocess.run(
            [*inside, "tc", "qdisc", "show", "dev", link.INTERFACE],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "tbf" in shown.stdout
        assert "rate 8Mbit" in shown.stdout
        raise KeyboardInterrupt
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert len(made) == 2
    assert not any(name in left.stdout for name in made)


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
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Both ranks' record of one step of each mode."""
    out = tmp_path_factory.mktemp("watched")
    done = run_process(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *(JOB, STUDY, out),
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(2)]
    return [{mode: records[0] for mode, records in answer.items()} for answer in answers]


SENDING = (
    *("none", "after_allreduce", "bucket_before_allreduce", "whole_before_allreduce"),
    *("our reducer, bucket", "sharded, bucket"),
)


def test_every_bucket_is_seen_in_order(watched: list[dict[str, dict[str, Any]]]) -> None:
    marks = ("start", "forward_end", "backward_end", "optimizer_start", "end")
    for rank in watched:
        for mode in SENDING:
            step = rank[mode]
            assert len(step["ready"]) == len(step["sent"]) == len(step["done"]) > 2
            assert sorted(marks, key=lambda name, step=step: step[name]) == list(marks)
            for ready, sent, done in zip(step["ready"], step["sent"], step["done"], strict=True):
                assert step["forward_end"] < ready < sent < done < step["end"]
            # Only the whole gradient's clipping sends nothing before the last is ready.
            early = [sent for sent in step["sent"] if sent < step["ready"][-1]]
            assert len(early) == (0 if mode == "whole_before_allreduce" else len(step["sent"]) - 1)
            # Alone it sends nothing and works on the same buckets.
            alone = rank[f"{mode}, alone"]
            assert alone["sent"] == alone["done"] == []
            assert len(alone["ready"]) == len(step["ready"])

"""Trees of MLPerf logs: whose they are, MLPerf's score, and what cannot be read is named."""

import json
import os
import shutil
from pathlib import Path

import pytest

from bert_tools.common.log_reader import TOKEN
from bert_tools.plan import log_tree
from bert_tools.plan.entries import Entry
from bert_tools.plan.log_tree import read_tree
from log_trees import RUNS, write_run, write_system
from mlperf_bert.common.errors import DataError
from plan_cases import Asked
from support import REPOSITORY

TIMES = [10.0, 19.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 1.0]
MEAN_OF_EIGHT = (10 + 12 + 13 + 14 + 15 + 16 + 17 + 18) / 8


def only(root: Path) -> Entry:
    (entry,), skipped = read_tree(root)
    assert not skipped
    return entry


def test_an_entry_of_ten_runs(tmp_path: Path) -> None:
    root = tmp_path / "training_results_v2.1" / "Acme"
    write_system(root, "acme_n2", minutes=TIMES, samples=2_500_000, nodes=2)
    entry = only(tmp_path)
    assert (entry.system, entry.accelerators, entry.round) == ("acme_n2", 16, "2.1")
    assert (entry.submitter, entry.division, entry.accelerator) == ("Acme", "closed", "Example A1")
    assert entry.time_min == pytest.approx(MEAN_OF_EIGHT)
    assert (entry.samples, entry.runs, entry.failed_runs) == (2_500_000, RUNS, 0)
    assert entry.seq_per_s == pytest.approx(sum(2.5e6 / 60 / each for each in TIMES) / RUNS)
    assert entry.global_batch_size == 448


@pytest.mark.parametrize("how", ["aborted", "cut", "hostile"])
def test_one_failed_run_is_the_slowest_and_two_leave_no_score(tmp_path: Path, how: str) -> None:
    directory = write_system(tmp_path, "acme", minutes=TIMES, samples=2_500_000)
    fail(directory / "result_4.txt", how)  # that of 14 minutes
    (entry,), skipped = read_tree(tmp_path)
    assert entry.failed_runs == 1
    assert entry.time_min == pytest.approx((19 + 10 + 12 + 13 + 15 + 16 + 17 + 18) / 8)
    names = [each.name for each in skipped]
    assert names == ([] if how == "aborted" else [str(directory / "result_4.txt")])
    fail(directory / "result_7.txt", how)
    entries, skipped = read_tree(tmp_path)
    assert entries == []
    assert "2 of 10 runs failed or cannot be read" in skipped[-1].problem
    assert skipped[-1].name == str(directory)


def fail(path: Path, how: str) -> None:
    if how == "aborted":
        path.unlink()
        write_run(path, 5.0, 1_000_000, status="aborted")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        path.write_text(f'{TOKEN}{{"key": "run_start", "time_ms": 1e999}}\n')


def test_few_runs_have_a_plain_mean(tmp_path: Path) -> None:
    write_system(tmp_path, "acme", minutes=[3.0, 5.0], samples=1000)
    assert only(tmp_path).time_min == pytest.approx(4.0)
    fail(tmp_path / "results/acme/bert/result_1.txt", "aborted")
    assert read_tree(tmp_path)[0] == []


def test_the_logs_own_ranks_come_before_the_description(tmp_path: Path) -> None:
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000, nodes=4, says_ranks=True)
    (tmp_path / "systems" / "acme.json").write_text("{")
    (entry,), skipped = read_tree(tmp_path)
    assert (entry.accelerators, entry.accelerator) == (32, "")
    assert [each.name for each in skipped] == [str(tmp_path / "systems" / "acme.json")]
    write_run(tmp_path / "results/acme/bert/result_3.txt", 2.0, 1000, ranks=8)
    assert "runs on 8 and 32 ranks" in read_tree(tmp_path)[1][-1].problem


def test_samples_beyond_all_runs_are_refused(tmp_path: Path) -> None:
    """No number holds their mean or their rate, be they of training or of the evaluation alone."""
    own = '"key": "train_samples"'
    for said, change in ((f'{own}, "value": 1000', f'{own}, "value": 1e308'), (own, '"key": "o"')):
        for path in write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000).iterdir():
            text = path.read_text().replace('"samples_count": 1000', '"samples_count": 1e308')
            assert said in text
            path.write_text(text.replace(said, change))
        entries, skipped = read_tree(tmp_path)
        assert entries == []
        assert {each.problem for each in skipped} == {"says more than 1,000,000,000,000 samples"}
        shutil.rmtree(tmp_path / "results")


def test_without_a_number_of_accelerators_there_is_no_entry(tmp_path: Path) -> None:
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    path = tmp_path / "systems" / "acme.json"
    for count in ("0", "-8", "8.5", "1e3", 2**70, None, ["8"], "8" * 5000):
        path.write_text(json.dumps({"number_of_nodes": "1", "accelerators_per_node": count}))
        entries, skipped = read_tree(tmp_path)
        assert entries == []
        assert "does not say how many accelerators" in skipped[-1].problem


def test_other_benchmarks_and_links_are_not_read(tmp_path: Path) -> None:
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    write_system(tmp_path, "other", minutes=[1, 2, 3], samples=1000, benchmark="resnet")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert only(tmp_path).system == "acme"


def test_logs_that_say_another_benchmark_are_left_out_and_named(tmp_path: Path) -> None:
    """Where directories do not say it, as in a tree of one's own."""
    directory = write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000, says_ranks=True)
    own = directory.rename(tmp_path / "own")
    assert only(tmp_path).system == "own"
    for path in own.iterdir():
        path.write_text(path.read_text().replace('"value": "bert"', '"value": "resnet"'))
    entries, skipped = read_tree(tmp_path)
    assert entries == []
    assert [each.problem for each in skipped] == ["is of the benchmark 'resnet'"] * 3


def test_a_log_that_is_a_link_to_nowhere_a_pipe_or_a_directory_is_named(tmp_path: Path) -> None:
    directory = write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    (directory / "result_3.txt").symlink_to("result_3.txt")
    assert len(read_tree(tmp_path)[1]) == 1
    os.mkfifo(directory / "result_4.txt")
    (directory / "result_5.txt").mkdir()
    skipped = [Path(each.name).name for each in read_tree(tmp_path)[1]]
    assert skipped == ["result_3.txt", "result_4.txt", "result_5.txt", "bert"]


def test_a_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    closed = tmp_path / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(log_tree.os, "scandir", refuse)
    entries, skipped = read_tree(tmp_path)
    assert len(entries) == 1
    assert [(each.name, each.problem) for each in skipped] == [(str(closed), "Permission denied")]


def test_what_lies_too_deep_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)  # three below
    write_system(tmp_path / "deep", "other", minutes=[1, 2, 3], samples=1000)
    assert len(read_tree(tmp_path)[0]) == 2
    monkeypatch.setattr(log_tree, "MOST_DEPTH", 3)
    entries, skipped = read_tree(tmp_path)
    assert [each.system for each in entries] == ["acme"]
    assert [each.name for each in skipped] == [str(tmp_path / "deep" / "results" / "other")]


def test_where_no_logs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="holds no MLPerf log of bert"):
        read_tree(tmp_path)
    write_system(tmp_path, "acme", minutes=[1, 2, 3], samples=1000)
    monkeypatch.setattr(log_tree, "MOST_FILES", 4)
    with pytest.raises(DataError, match="more than 4 files"):
        read_tree(tmp_path)


def test_the_law_of_a_tree(tmp_path: Path, asked: Asked, told: Asked) -> None:
    """Three sizes on time = 80 * p^-0.5; samples grow as p^0.25, so throughput does as p^0.75."""
    for nodes in (1, 4, 16):
        size = 8 * nodes
        write_system(
            tmp_path,
            f"acme_n{nodes}",
            minutes=[80 * size**-0.5] * 3,
            samples=round(1e6 * size**0.25),
            nodes=nodes,
        )
    broken = tmp_path / "results/broken/bert"
    broken.mkdir(parents=True)
    (broken / "result_0.txt").write_text("no log at all\n")
    answer = asked("law . --out x.png")
    assert answer["exponent"] == pytest.approx(-0.5, abs=1e-4)
    assert answer["coefficient_minutes"] == pytest.approx(80, rel=1e-3)
    assert answer["throughput_exponent"] == pytest.approx(0.75, abs=1e-4)
    assert answer["samples_exponent"] == pytest.approx(0.25, abs=1e-4)
    assert [each["name"] for each in answer["skipped"]] == [str(broken / "result_0.txt")]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert f"skipped: {broken}/result_0.txt: holds no line with" in told("law .")


def test_logs_that_are_given_one_by_one_are_one_system_for_each_directory(
    tmp_path: Path, asked: Asked
) -> None:
    """As a shell hands on `results/*/bert/result_*.txt`; a log that is given twice counts once."""
    paths = []
    for nodes, times in ((1, TIMES), (4, [3.0] * RUNS)):
        name = f"acme_n{nodes}"
        paths += write_system(tmp_path, name, minutes=times, samples=10**6, nodes=nodes).iterdir()
    entries = asked("law", *paths, paths[0])["entries"]
    found = [(each["accelerators"], each["time_min"], each["runs"]) for each in entries]
    assert found == [(8, pytest.approx(MEAN_OF_EIGHT), RUNS), (32, pytest.approx(3.0), RUNS)]


def test_the_projects_own_runs(asked: Asked, told: Asked) -> None:
    """Ten runs of two ranks: an entry, but no law alone."""
    results = REPOSITORY / "results"
    (entry,), _ = read_tree(results)
    assert (entry.system, entry.accelerators, entry.runs) == ("cpu_2core_pytorch", 2, 10)
    assert entry.samples and entry.seq_per_s and entry.time_min
    for path in (results, results / "cpu_2core_pytorch/bert/result_0.txt"):
        assert "one entry alone, 'unnamed cpu_2core" in told("law", path, status=2)
    # Beside 330 published ones that have a time and a size.
    assert len(asked("law published", results)["entries"]) == 331

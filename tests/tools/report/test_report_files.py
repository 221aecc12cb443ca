"""Which runs a report is of: found in directories, told apart by short names, bounded."""

from pathlib import Path

import pytest

from bert_tools.report import run_files
from bert_tools.report.run_files import MAX_RUNS, find_runs
from mlperf_bert.common.errors import UserError


def make_runs(root: Path, *indexes: int) -> Path:
    for index in indexes:
        (root / f"run_{index}").mkdir(parents=True)
        (root / f"run_{index}" / "metrics.jsonl").touch()
        (root / f"result_{index}.txt").touch()
    return root


def labels(*paths: Path) -> list[str]:
    return [each.label for each in find_runs(paths)]


def test_all_runs_of_a_directory_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = make_runs(tmp_path / "ten", 10, 2, 0)
    found = find_runs([root])
    assert [each.folder for each in found] == [root / f"run_{index}" for index in (0, 2, 10)]
    assert [each.log for each in found] == [root / f"result_{index}.txt" for index in (0, 2, 10)]
    assert [each.label for each in found] == ["ten/run_0", "ten/run_2", "ten/run_10"]


def test_a_directory_of_logs_alone(tmp_path: Path) -> None:
    for index in (0, 1):
        (tmp_path / f"result_{index}.txt").touch()
    found = find_runs([tmp_path])
    assert [(each.folder, each.log) for each in found] == [
        (None, tmp_path / "result_0.txt"),
        (None, tmp_path / "result_1.txt"),
    ]


def test_a_run_is_named_once_and_by_what_tells_it_apart(tmp_path: Path) -> None:
    one, two = make_runs(tmp_path / "a" / "x", 0), make_runs(tmp_path / "b" / "x", 0)
    assert labels(one) == ["x"]
    assert labels(one, one, one / "run_0") == ["x"]
    (tmp_path / "other_name").symlink_to(one)
    assert labels(one, tmp_path / "other_name") == ["x"]
    assert labels(one, two) == ["a/x/run_0", "b/x/run_0"]
    assert labels(one, make_runs(tmp_path / "a" / "y", 3)) == ["x", "y"]


def test_the_folder_of_a_run_has_its_log_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_runs(tmp_path / "x", 0, 1)
    assert [each.log for each in find_runs([root / "run_1"])] == [root / "result_1.txt"]
    monkeypatch.chdir(root / "run_1")
    (found,) = find_runs([Path(".")])
    assert found.log is not None and found.log.samefile(root / "result_1.txt")


def test_what_holds_no_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "x"])
    (tmp_path / "run_5").mkdir()
    for path in (tmp_path / "run_5", make_empty(tmp_path / "e")):
        with pytest.raises(UserError, match="holds no run: no run_<i>, no result_<i>"):
            find_runs([path])


def make_empty(path: Path) -> Path:
    path.mkdir()
    return path


def test_too_much_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_runs(tmp_path / "x", *range(MAX_RUNS + 1))
    with pytest.raises(UserError, match=f"are 33 runs; name {MAX_RUNS} of them at most"):
        find_runs([root])
    monkeypatch.setattr(run_files, "MAX_METRICS_BYTES_TOGETHER", 2**20)
    for index in (0, 1):
        (root / f"run_{index}" / "metrics.jsonl").write_bytes(b"\n" * 600_000)
    assert len(find_runs([root / "run_0"])) == 1
    with pytest.raises(UserError, match="have 1 MiB of metrics together; name fewer"):
        find_runs([root / "run_0", root / "run_1"])

"""Files of runs from outside: found, told apart, read also as they grow, or one line of error."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from run_cases import BATCH_16K, log_line, log_of, read_only, record, write_run

from bert_tools.report import run_files
from bert_tools.report.run_files import (
    MAX_LINE_BYTES,
    MAX_METRICS_BYTES,
    MAX_RECORDS,
    MAX_RUNS,
    find_runs,
    read_metrics,
)
from bert_tools.report.watch_files import CHUNK_BYTES, Tail
from mlperf_bert.common.errors import DataError, UserError

GOOD = json.dumps(record(1, 16, None)).encode()


def changed(**values: object) -> bytes:
    return json.dumps({**record(1, 16, None), **values}).encode() + b"\n"


def without(key: str) -> bytes:
    kept = {name: value for name, value in record(1, 16, None).items() if name != key}
    return json.dumps(kept).encode() + b"\n"


HOSTILE = {
    "no JSON": (b"{\n", "line 1: is no record"),
    "second line": (GOOD + b"\nx\n", "line 2: is no record"),
    "an empty line": (GOOD + b"\n\n", "line 2: is no record"),
    "a list": (b"[]\n", "is not a JSON object"),
    "deep": (b"[" * 8000 + b"\n", "is nested too deeply"),
    "NaN": (changed(loss=0).replace(b'"loss": 0', b'"loss": NaN'), "NaN is not JSON"),
    "a huge number": (b'{"step": 1e999}\n', "'step' is inf, no number"),
    "many digits": (b'{"step": ' + b"9" * 5000 + b"}\n", "line 1: is no record"),
    "a text": (changed(loss="1"), "'loss' is '1', no number"),
    "an object": (changed(more={}), "'more' is a dict, no number"),
    "a flag": (changed(step=True), "'step' is True, no number"),
    "no step": (without("step"), "step is None, no count"),
    "half a step": (changed(step=0.5), "step is 0.5, no count"),
    "fewer than no samples": (changed(samples=-1), "samples is -1, no count"),
    "no loss": (without("loss"), "loss is missing"),
    "more than all right": (changed(mlm_accuracy=1.5), "mlm_accuracy is 1.5, not in 0 .. 1"),
    "a step back": (GOOD + b"\n" + GOOD + b"\n", "line 2: goes back to step 1"),
    "a long line": (b" " * MAX_LINE_BYTES + GOOD + b"\n", "line 1: has more than 8,192 bytes"),
    "too many lines": (b"\n" * (MAX_RECORDS + 1), "has more than 200,000 lines"),
    "too large": (b" " * (MAX_METRICS_BYTES + 1), "has more than 33,554,432 bytes"),
}


def said_of(read: Callable[[], object]) -> str:
    """The error that reading raises, in one line."""
    with pytest.raises(UserError) as raised:
        read()
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500
    return str(raised.value)


def test_hostile_metrics_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for name, (contents, reason) in HOSTILE.items():
        path.write_bytes(contents)
        said = said_of(lambda: read_metrics(path))
        assert "metrics.jsonl" in said and reason in said, name


def test_metrics_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [record(step, 16, None if step % 2 else 0.5) for step in range(1, 9)]
    written[3]["loss"] = None  # which is what a loss that is no number becomes
    path = write_run(tmp_path / "run", BATCH_16K, written) / "run_0" / "metrics.jsonl"
    assert read_metrics(path) == written
    with path.open("ab") as file:
        file.write(GOOD[:40])  # a last line without its end
    assert read_metrics(path) == written


def test_a_report_skips_damaged_lines_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [record(step, 16, None) for step in range(1, 7)]
    path = write_run(tmp_path / "run", BATCH_16K, written) / "run_0" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    too_large = json.dumps(record(830, 16, None)).encode() + b"\n"
    path.write_bytes(b"".join([*lines[:2], too_large, *lines[3:]]))
    assert list(read_only(tmp_path / "run").records) == [*written[:2], *written[3:]]
    assert "line 4: goes back to step 4; skipped\n" in capsys.readouterr().err
    for damaged, said in (((2,), "; skipped\n"), ((2, 4), "; skipped (and 1 more)\n")):
        path.write_bytes(b"".join(b"x\n" if n in damaged else each for n, each in enumerate(lines)))
        run = read_only(tmp_path / "run")
        assert list(run.records) == [each for n, each in enumerate(written) if n not in damaged]
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.endswith(said)
        assert f"{path}, line 3: is no record" in error


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
    logs = [root / f"result_{index}.txt" for index in (0, 2, 10)]
    assert [each.log for each in found] == logs
    assert [each.label for each in found] == ["ten/run_0", "ten/run_2", "ten/run_10"]
    for index in (0, 2, 10):  # logs alone
        (root / f"run_{index}" / "metrics.jsonl").unlink()
        (root / f"run_{index}").rmdir()
    assert [(each.folder, each.log) for each in find_runs([root])] == [(None, log) for log in logs]


def test_a_run_is_named_once_and_by_what_tells_it_apart(tmp_path: Path) -> None:
    one, two = make_runs(tmp_path / "a" / "x", 0), make_runs(tmp_path / "b" / "x", 0)
    (tmp_path / "other_name").symlink_to(one)
    assert labels(one) == ["x"]
    assert labels(one, one, one / "run_0", tmp_path / "other_name") == ["x"]
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
    for name in ("run_5", "e"):
        (tmp_path / name).mkdir()
    (tmp_path / "no_metrics" / "run_0").mkdir(parents=True)
    (tmp_path / "no_metrics" / "run_0" / "config.toml").touch()
    for read in (read_only, lambda path: find_runs([path])):
        with pytest.raises(UserError, match="does not exist"):
            read(tmp_path / "x")
        for name in ("run_5", "e"):
            with pytest.raises(UserError, match="holds no run: no run_<i>, no result_<i>"):
                read(tmp_path / name)
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl, nor a run_<i> with one"):
        read_only(tmp_path / "no_metrics")


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


def test_the_doctor_takes_one_run_by_its_directory_or_its_parents(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [record(1, 16, 0.5)], ended="aborted")
    run = read_only(directory)
    assert run == read_only(directory / "run_0")
    assert (run.ended, run.initial_weights, run.task.is_reference) == (
        "aborted",
        "checkpoint",
        True,
    )
    (directory / "run_1").mkdir()
    assert read_only(directory) == run  # the other one has no metrics
    (directory / "run_1" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"holds 2 runs; give one of them: .*run_0"):
        read_only(directory)
    (directory / "run_0" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"config\.toml"):
        read_only(directory / "run_0")


def test_what_is_not_bert_large_is_no_reference(tmp_path: Path) -> None:
    for change in ("model.num_heads=8", "model.vocab_size=30528"):
        overrides = [change, "mlperf.enforce_rules=false"]
        run = read_only(write_run(tmp_path / change, BATCH_16K, [], overrides=overrides))
        assert not run.task.is_reference


def test_a_hostile_outcome_is_one_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [])
    outcome = {"schema_version": 1, "seconds": 1.0, "status": "fine"}
    (directory / "run_0" / "outcome.json").write_text(json.dumps(outcome))
    with pytest.raises(UserError, match=r"outcome\.json: status: is 'fine'"):
        read_only(directory)


def test_a_hostile_log_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for log, reason in (
        ("nothing\n", "holds no line with ':::MLLOG'"),
        ("0: :::MLLOG {}\n", "line 1: is no complete record"),
        (log_line("eval_accuracy", 0.5), "an eval_accuracy of 0.5 at None"),
        (log_line("eval_accuracy", "high", epoch_num=1), "an eval_accuracy of 'high' at 1"),
        (2 * log_line("eval_accuracy", 0.5, epoch_num=1), "an evaluation at 1 samples after one"),
        (log_line("run_stop", None, status={}), "says status a dict"),
    ):
        path.write_text(log)
        assert reason in said_of(lambda: read_only(path))


def test_a_logs_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(log_of([(20, 0.5)], 16) + log_line("eval_accuracy", 1)[:30])
    assert len(read_only(log).evaluations) == 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def tail_of(path: Path, first_bytes: int = 2**20) -> Tail:
    return Tail(path, max_line_bytes=10, first_bytes=first_bytes)


def append(path: Path, contents: bytes) -> None:
    with path.open("ab") as file:
        file.write(contents)


def test_each_line_comes_once_and_only_when_it_is_whole(path: Path) -> None:
    tail = tail_of(path)
    found = tail.look()
    assert not found.is_there and found.lines == ()
    path.write_bytes(b"")
    assert tail.look().lines == ()
    append(path, b"a\nb")
    assert tail.look().lines == (b"a",)
    assert tail.look().lines == ()
    append(path, b"c")
    assert tail.look().lines == ()
    append(path, b"\n\nd\n")
    found = tail.look()
    assert found.lines == (b"bc", b"", b"d") and not found.is_anew and not found.has_more


def test_half_a_line_that_is_taken_back_was_never_there(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\nhalf")
    tail.look()
    os.truncate(path, 2)  # as a writer does on a full disk
    found = tail.look()
    assert found.lines == () and not found.is_anew
    append(path, b"b\n")
    assert tail.look().lines == (b"b",)


def cut(path: Path) -> None:
    path.write_bytes(b"new\n")


def replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(b"new\n" + b"x\n" * 100)
    beside.replace(path)


def write_again(path: Path) -> None:
    with path.open("r+b") as file:  # the same file, and longer than it was
        file.write(b"new\n" + b"x\n" * 100)


def remove_and_write(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"new\n" + b"x\n" * 100)  # which may get the number of the old one


def test_another_file_is_read_from_its_beginning(path: Path) -> None:
    for change in (cut, replace, write_again, remove_and_write):
        tail = tail_of(path)
        path.write_bytes(b"old 1\nold 2\nold 3\n")
        assert len(tail.look().lines) == 3
        change(path)
        found = tail.look()
        assert found.is_anew and found.lines[0] == b"new"


def test_a_file_that_goes_and_comes_back_is_anew(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\n")
    tail.look()
    path.unlink()
    found = tail.look()
    assert not found.is_there and found.is_anew
    assert not tail.look().is_anew  # told once
    path.write_bytes(b"a\n")
    found = tail.look()
    assert found.is_anew and found.lines == (b"a",)


def test_a_long_line_is_cut_and_the_next_one_is_whole(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\n" + b"x" * 30)
    assert tail.look().lines == (b"a", b"x" * 11)
    append(path, b"y" * 30)
    assert tail.look().lines == ()
    append(path, b"y\nb\n")
    assert tail.look().lines == (b"b",)
    append(path, b"z" * 50 + b"\nc\n")
    assert tail.look().lines == (b"z" * 11, b"c")


def test_a_line_without_end_needs_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 * CHUNK_BYTES)  # zeros
    append(path, b"\nlast\n")
    tail = Tail(path, max_line_bytes=10, first_bytes=100 * CHUNK_BYTES)
    found = tail.look()
    sizes, lines = [sum(map(len, found.lines))], list(found.lines)
    while found.has_more:
        found = tail.look()
        sizes.append(sum(map(len, found.lines)))
        lines += found.lines
    assert lines == [b"\0" * 11, b"last"]
    assert len(sizes) > 40 and max(sizes) < 20


def test_of_a_large_file_the_end_is_read_from_a_whole_line_on(path: Path) -> None:
    path.write_bytes(b"".join(b"%05d\n" % number for number in range(1000)))
    found = tail_of(path, first_bytes=100).look()
    assert found.lines == tuple(b"%05d" % number for number in range(984, 1000))


def test_many_lines_come_in_portions(path: Path) -> None:
    path.write_bytes(b"1234567\n" * (CHUNK_BYTES // 4))
    tail = tail_of(path, first_bytes=100 * CHUNK_BYTES)
    found = tail.look()
    count = len(found.lines)
    assert found.has_more and count < CHUNK_BYTES // 4
    while found.has_more:
        found = tail.look()
        count += len(found.lines)
    assert count == CHUNK_BYTES // 4


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_and_may_become_one(path: Path) -> None:
    tail = tail_of(path)
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        tail.look()
    path.unlink()
    path.write_bytes(b"a\n")
    assert tail.look().lines == (b"a",)

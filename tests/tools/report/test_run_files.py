"""Files of runs: found, told apart, and read although lines of them are damaged."""

import json
import os

import pytest

from bert_tools.report.run import (
    MAX_RUNS,
    find_runs,
    newest_run,
    read_environment,
    read_metrics,
)
from mlperf_bert.errors import UserError
from run_cases import lines_of, record, write_run

GOOD = json.dumps(record(1)).encode() + b"\n"


def changed(**values):
    """A record with these values; one of `...` is not there."""
    found = {key: value for key, value in {**record(1), **values}.items() if value is not ...}
    return json.dumps(found).encode() + b"\n"


DAMAGED = {
    "no JSON": (b"{\n", "line 1, which is not a record"),
    "second line": (GOOD + b"x\n", "line 2, which is not a record"),
    "an empty line": (GOOD + b"\n", "line 2, which is not a record"),
    "a list": (b"[]\n", "not a JSON object"),
    "deep": (b"[" * 100_000 + b"\n", "line 1, which is not a record"),
    "not UTF-8": (b"\xff\xfe\x00\n", "line 1, which is not a record"),
    "many digits": (b'{"step": ' + b"9" * 5000 + b"}\n", "line 1, which is not a record"),
    "no step": (changed(step=...), "step is not a number"),
    "no loss": (changed(loss=...), "loss is not a number"),
    "a step of null": (changed(step=None), "step is not an integer"),
    "half a sample": (changed(samples=0.5), "samples is not an integer"),
    "a loss in words": (changed(loss="1"), "loss is not a number"),
    "NaN": (changed(loss=float("nan")), "loss is not a number"),
    "a step back": (GOOD + GOOD, "line 2, which goes back to step 1"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_skipped_and_said_in_one_line(name, tmp_path, capsys):
    path = tmp_path / "metrics\x1b[2J.jsonl"
    contents, reason = DAMAGED[name]
    path.write_bytes(contents)
    assert len(read_metrics(path)) == contents.startswith(GOOD)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error[:-1].isprintable() and len(error) < 500
    assert reason in error and "jsonl: skipped line " in error


def test_metrics_come_back_as_they_were_written(tmp_path, capsys):
    written = [record(step, None if step % 2 else 0.5, unknown=step) for step in range(1, 9)]
    written[3]["loss"] = None  # which is what a loss that is no number becomes
    path = write_run(tmp_path / "run", written) / "run_0" / "metrics.jsonl"
    assert read_metrics(path) == written
    with path.open("ab") as file:
        file.write(GOOD[:40])  # a last line without its end
    assert read_metrics(path) == written
    assert capsys.readouterr().err == ""


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(changed(more={}, word="x", grad_norm=float("inf"), other=[1]))
    (found,) = read_metrics(path)
    assert found == {key: value for key, value in record(1).items() if key != "grad_norm"}


def test_of_lines_that_do_not_ascend_the_odd_one_is_skipped(tmp_path, capsys):
    written = [record(step) for step in range(1, 7)]
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of([*written[:2], record(830), *written[3:]]))
    assert read_metrics(path) == [*written[:2], *written[3:]]
    assert "skipped line 4, which goes back to step 4\n" in capsys.readouterr().err
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"x\n", *lines[:2], b"x\n"]))
    assert read_metrics(path) == written[:2]
    assert capsys.readouterr().err.endswith(", and 1 more\n")


def make_runs(root, *indexes):
    for index in indexes:
        (root / f"run_{index}").mkdir(parents=True)
        (root / f"run_{index}" / "metrics.jsonl").touch()
    return root


def test_runs_are_in_their_order_named_once_and_by_what_tells_them_apart(tmp_path):
    root = make_runs(tmp_path / "ten", 10, 2, 0)
    assert find_runs([root]) == {f"ten/run_{index}": root / f"run_{index}" for index in (0, 2, 10)}
    one, two = make_runs(tmp_path / "a" / "x", 0), make_runs(tmp_path / "b" / "x", 0)
    (tmp_path / "other_name").symlink_to(one)
    assert list(find_runs([one])) == ["x"]
    assert list(find_runs([one, one, one / "run_0", tmp_path / "other_name"])) == ["x"]
    assert list(find_runs([one, two])) == ["a/x/run_0", "b/x/run_0"]
    assert list(find_runs([one, make_runs(tmp_path / "a" / "y", 3)])) == ["x", "y"]


def test_what_holds_no_run_is_told_so(tmp_path):
    (tmp_path / "e").mkdir()
    with pytest.raises(UserError, match=r"contains no run \(neither run_<i> nor metrics\.jsonl\)"):
        find_runs([tmp_path / "e"])
    with pytest.raises(UserError, match="No such file or directory; pass a run directory"):
        find_runs([tmp_path / "x"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="pass a run directory"):
        find_runs([tmp_path / "file"])
    with pytest.raises(
        UserError, match=f"33 runs are too many for one page; pass at most {MAX_RUNS}"
    ):
        find_runs([make_runs(tmp_path / "many", *range(MAX_RUNS + 1))])


def test_the_newest_of_several_runs_or_the_one_that_is_named(tmp_path):
    make_runs(tmp_path, 0, 2, 10)
    for name in ("run_x", "run_", "run_9999999", "other_12"):
        (tmp_path / name).mkdir()
    (tmp_path / "run_17").touch()  # no run
    assert newest_run(tmp_path) == tmp_path / "run_10"
    assert newest_run(tmp_path / "run_2") == tmp_path / "run_2"
    assert newest_run(tmp_path / "other_12") is None
    run = write_run(tmp_path / "other_12" / "run", [record(1)]) / "run_0"  # as of `pretrain`
    assert newest_run(tmp_path / "other_12") == run
    assert list(find_runs([tmp_path / "other_12"]).values()) == [run]
    assert newest_run(tmp_path / "nothing") is None


def test_an_environment_is_flat_text(tmp_path):
    path = tmp_path / "environment.json"
    facts = {"schema_version": 1, "packages": {"torch": "2", "no": None}, "world_size": 2, "x": []}
    path.write_text(json.dumps(facts))
    found = {"packages.torch": "2", "packages.no": "", "world_size": "2", "x": "[]"}
    assert read_environment(path) == found
    for contents in ("{", "[]", "[" * 100_000):
        path.write_text(contents)
        with pytest.raises(UserError, match=r"environment\.json: is not a JSON object"):
            read_environment(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(make, tmp_path):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")

"""`mlperf_bert package` from end to end, with MLCommons' checkers; our own: tests/tools/package."""

import os
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import Mock

import pytest

from bert_tools.package.cli import make_package
from bert_tools.package.export import CODE_DIRECTORIES, CODE_FILES, export
from mlperf_bert.__main__ import main
from mlperf_bert.errors import ConfigError
from submissions import (
    CLOSED,
    DIVISIONS,
    MEAN_OF_EIGHT,
    OPEN,
    TIMES,
    drop,
    log_of,
    miss_target,
    write_repository,
)
from support import REPOSITORY, refusal


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with ten good runs in each division. Not to be changed."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(root, DIVISIONS)
    return root


@pytest.fixture
def root(repository, tmp_path):
    """A copy with the open system alone, to be spoiled."""
    copy = tmp_path / "repository"
    ignore = shutil.ignore_patterns(CLOSED, f"{CLOSED}.json")
    shutil.copytree(repository, copy, ignore=ignore)
    return copy


def call(*arguments):
    """Status and stdout of `mlperf_bert package`."""
    with redirect_stdout(StringIO()) as output:
        status = main(["package", *map(str, arguments)])
    return status, output.getvalue()


DEFAULT, ALL = "5.0.0, 4.1.0", "5.0.0, 4.1.0, 2.0.0"
RULESETS = ["5.0.0", *(pytest.param(each, marks=pytest.mark.longest) for each in (DEFAULT, ALL))]


@pytest.fixture(scope="module", params=RULESETS)
def accepted(request, repository, tmp_path_factory):
    """The package of both systems, checked under these rulesets, and what was printed."""
    out = tmp_path_factory.mktemp("out") / "deep [1]" / "submission"
    told = () if request.param == DEFAULT else request.param.split(", ")
    words = [word for ruleset in told for word in ("--ruleset", ruleset)]
    results = repository / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parents[1])
        patch.setattr("tempfile.tempdir", "/dev/null")  # where nothing can be written
        near = out.relative_to(out.parents[1])
        status, output = call(results, "--root", repository, "--out", near, *words)
    assert status == 0, output
    said = output.splitlines()
    assert said[-1] == f"wrote {near}, which passed all checks of the rulesets {request.param}"
    return out, said


def test_both_divisions_are_accepted_with_the_mean_of_the_middle_eight(accepted):
    _, said = accepted
    assert len(said) == 3 * len(DIVISIONS) + 2
    assert re.fullmatch(rf"packaging the results in .* of {CLOSED}, {OPEN}", said[0])
    for name, division in DIVISIONS.items():
        score = f"{name} ({division}): {MEAN_OF_EIGHT:.3f} minutes, the olympic mean of 10 runs"
        first = said.index(score)
        assert said[first + 1] == f"  times {' '.join(f'{minutes:.3f}' for minutes in TIMES)}"
        assert said[first + 2] == (
            "  accuracy 0.7234 or better; page cache dropped before 10 of 10 runs"
        )


def test_the_package_holds_what_a_submission_consists_of(accepted, repository):
    out, _ = accepted
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    code = {*CODE_FILES, *(f"{directory}/README.md" for directory in CODE_DIRECTORIES)}
    logs = {f"results/{name}/bert/result_{n}.txt" for name in DIVISIONS for n in range(10)}
    assert files == code | logs | {f"systems/{name}.json" for name in DIVISIONS}
    for name in files:
        assert (out / name).read_bytes() == (repository / name).read_bytes()
    assert os.access(out / "run_and_time.sh", os.X_OK)
    assert list(out.parent.iterdir()) == [out]


def test_one_run_may_miss_its_target_and_counts_as_the_slowest(repository, tmp_path):
    shutil.copytree(repository, tmp_path / "repository")
    for name in DIVISIONS:
        miss_target(log_of(tmp_path / "repository", 9, name))  # the fastest one
    words = ("--root", tmp_path / "repository", "--out", tmp_path / "out", "--ruleset", "5.0.0")
    status, output = call(tmp_path / "repository/results", *words)
    assert status == 0, output
    mean = sum(sorted(TIMES)[2:]) / 8
    for name, division in DIVISIONS.items():
        assert f"{name} ({division}): {mean:.3f} minutes, the olympic mean of 10 runs" in output
    assert output.count("18.000 inf\n  accuracy 0.7234 or better") == len(DIVISIONS)


@pytest.mark.longest
def test_a_log_that_olympic_scoring_would_swallow_is_refused(root, tmp_path):
    drop(log_of(root, 3), "cache_clear")
    out = tmp_path / "submission"
    results = root / "results"
    status, output = call(results, "--root", root, "--out", out, "--ruleset", "5.0.0")
    assert status == 1 and not out.exists()
    assert "accepting this under olympic scoring" in output
    words = "Required AT_LEAST_ONE occurrence of 'cache_clear' but found 0"
    log = f"results/{OPEN}/bert/result_3.txt"
    assert f"{log}: compliance_checker of 5.0.0 reports: {words}; fix it, and check" in output


def test_a_refusal_leaves_nothing_behind(root, tmp_path):
    (log_of(root, 0).parent / ".DS_Store").write_text("")
    out = tmp_path / "out" / "submission"
    status, output = call(root / "results", "--root", root, "--out", out)
    assert status == 1
    assert output.splitlines()[1].startswith(f"results/{OPEN}/bert/.DS_Store: has a name")
    assert output.splitlines()[2].startswith(f"the submission has 1 problem, so {out} was")
    assert list(out.parent.iterdir()) == []


def test_a_users_own_runs_are_packaged_by_their_run_directory(root, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "submission"
    shutil.copytree(log_of(root, 0).parent, runs)
    (runs / "run_0").mkdir()
    shutil.rmtree(root / "results")
    words = (runs, "--root", root, "--out", out, "--ruleset", "5.0.0", "--system", OPEN)
    status, output = call(*words)
    assert status == 0, output
    assert output.splitlines()[0] == f"packaging the runs in {runs} as results of {OPEN}"
    assert len(list((out / "results" / OPEN / "bert").iterdir())) == 10
    assert list((out / "results").iterdir()) == [out / "results" / OPEN]


def test_mistakes_have_status_2(root, tmp_path, monkeypatch, capsys):
    results, new = root / "results", ("--out", tmp_path / "new")
    runs = log_of(root, 0).parent
    mistakes = [
        ((results, "--root", tmp_path, *new), "no such directory; pass the results, and use"),
        ((root / "no", "--root", root, *new), "no such directory; pass the LOGDIR of your ten"),
        (("--root", root, *new), "RESULTS: is missing; pass the LOGDIR of your ten runs"),
        (
            (root, "--root", root, *new),
            "contains neither result_<i>.txt nor <system>/bert/result_<i>.txt; pass",
        ),
        ((results, "--root", root, "--out", root), "exists; pass a new directory"),
        ((results, "--root", root, "--out", results / "new"), "is inside .*results; pass"),
        ((runs, "--root", root, *new), f"--system: is missing.* is one of {OPEN}"),
        ((runs, "--root", root, "--system", OPEN[:-1], *new), f"did you mean {OPEN}"),
        ((results, "--root", root, "--system", OPEN, *new), "--system: needs a run directory"),
    ]
    for arguments, reason in mistakes:
        status, _ = call(*arguments)
        assert (status, re.search(reason, capsys.readouterr().err) is not None) == (2, True)
    assert not (tmp_path / "new").exists() and not (root / "results" / "new").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is not installed; run tools/venv\.sh in the repo"):
        make_package(root, root / "results", tmp_path / "tree", ("5.0.0",))


def test_a_full_disk_is_named_with_its_reason(root, tmp_path, monkeypatch, capsys):
    reason = "[Errno 28] No space left on device"
    fail = Mock(side_effect=shutil.Error([("from", "to", reason), ("from", "to", reason)]))
    monkeypatch.setattr("shutil.copytree", fail)
    out = tmp_path / "new"
    said = refusal(capsys, "package", root / "results", "--root", root, "--out", out)
    assert f"--out: {out} cannot be written ({reason}); check" in said


def test_the_export_of_this_repository_is_what_git_knows(repository, tmp_path):
    tree = tmp_path / "tree"
    _, problems = export(REPOSITORY, repository / "results", tree)
    assert {problem.args[0] for problem in problems} == {f"systems/{s}.json" for s in DIVISIONS}
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", (tree / "Dockerfile").read_text(), re.MULTILINE)
    assert copied and all((tree / name).exists() for names in copied for name in names.split())
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(
        [*command, "--", *CODE_FILES, *CODE_DIRECTORIES], cwd=REPOSITORY, text=True
    )
    known = {name for name in listed.split("\0") if (REPOSITORY / name).is_file()}
    exported = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert {name for name in exported if not name.startswith("results/")} == known

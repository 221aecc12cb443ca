"""A start in a directory with unreadable files, lost checkpoints, or links.

Each is a process of its own, which ends in one line and changes nothing but where the test says so.
"""

import errno
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from forked_starts import Started, start_each
from mlperf_bert.checkpoint.manifest import verify
from mlperf_bert.checkpoint.resume import find_start
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import ConfigError, DataError, UnreadableError
from mlperf_bert.files import LineFile, check_writable, replaced_file, write_file
from mlperf_bert.run.directory import RunDirectory
from resume_cases import MISSED, run_train
from support import snapshot

CHECKPOINTS = "run_0/checkpoints"
NEWEST = f"{CHECKPOINTS}/step_00000002"
# Names, and what is asked to go on: the run itself, or one of its directories.
FORBIDDEN = {
    f"{NEWEST}/manifest.json": "auto",
    f"{NEWEST}/model.safetensors": "auto",
    f"{NEWEST}/optimizer": "auto",
    CHECKPOINTS: "auto",
    "run_0": "auto",
    f"{CHECKPOINTS}/LATEST": CHECKPOINTS,
    "run_0/environment.json": "auto",
}
LOST = ("damaged", "removed", "put aside")
READ_LINK = "run_0/outcome.json"  # the run has ended
LINKS = (
    *("result_0.txt", "run_0", CHECKPOINTS, "run_0/interrupted"),
    *("run_0/stdout.log", "run_0/metrics.jsonl"),
)
REPLACED_LINKS = (
    *("config.toml", "environment.json", "vocab.txt", "checkpoints/LATEST"),
    *("checkpoints/step_00000003", "checkpoints/damaged_step_00000003"),
)
SAID = {
    "forbidden": "cannot be read (Permission denied); check the file's permissions",
    "link": "is a symbolic link; ",
}


@dataclass
class Case:
    """A start: what it was asked, and the directory that it was asked of."""

    run: Path
    resume: Path | str = "auto"
    into: Path | None = None
    before: object = None
    started: Started | None = None

    def is_refused(self):
        assert self.started.status == 2, self.started.printed
        (line,) = self.started.printed.splitlines()
        assert snapshot(self.run.parent) == self.before
        return line


@pytest.fixture(scope="module")
def whole(tiny_config, synthetic_data, tmp_path_factory):
    """A run of 3 steps that lost its last checkpoint."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    settings = ("run.max_steps=3", "checkpoint.interval_steps=2", "checkpoint.keep_last=9")
    assert run_train(tiny_config, synthetic_data, directory, *settings) == MISSED
    shutil.rmtree(directory / CHECKPOINTS / "step_00000003")
    (directory / CHECKPOINTS / "LATEST").write_text("step_00000002\n")
    return directory


def interrupted(whole, parent, name):
    """A copy that has an outcome if that is the place."""
    parent.mkdir(parents=True)
    run = shutil.copytree(whole, parent / "run")
    if name != READ_LINK:
        (run / "run_0/outcome.json").unlink()
    return run


def forbid(run, name):
    if name == "run_0/environment.json":  # asked for its seed before the first checkpoint
        shutil.rmtree(run / CHECKPOINTS)
    resume = FORBIDDEN[name]
    return Case(run) if resume == "auto" else Case(run, run / resume, run.parent / "new")


def lose(run, how):
    newest = run / NEWEST
    if how == "damaged":
        os.truncate(newest / "model.safetensors", 10)
    elif how == "removed":
        shutil.rmtree(newest)
    else:
        newest.rename(newest.with_name(f"damaged_{newest.name}"))
        (run / CHECKPOINTS / "LATEST").unlink()
    return Case(run)


def link(run, names):
    """Have each name lead to what was there, or to a file of somebody else's."""
    for number, name in enumerate(names):
        path, target = run / name, run.parent / f"target {number}"
        if path.exists():
            path.rename(target)
        else:
            target.mkdir()
        path.symlink_to(target)
    return Case(run)


def start_all(cases, config, data):
    """One after the other, by one process that has imported torch, with no right but files'."""
    commands = []
    for case in cases.values():
        case.before = snapshot(case.run.parent)
        where = ("--data", data, "--run-dir", case.into or case.run, "--set", "run.max_steps=3")
        commands.append(("train", "--config", config, *where, "--resume", case.resume))
    forbidden = [cases["forbidden", name].run / name for name in FORBIDDEN]
    rights = [path.stat().st_mode for path in forbidden]
    try:
        for path in forbidden:
            path.chmod(0)
        all_started = start_each(commands, without_rights=os.geteuid() == 0)
    finally:
        for path, mode in zip(forbidden, rights, strict=True):
            path.chmod(mode)
    for case, started in zip(cases.values(), all_started, strict=True):
        case.started = started


MAKE = {
    **{("forbidden", name): partial(forbid, name=name) for name in FORBIDDEN},
    **{("lost", how): partial(lose, how=how) for how in LOST},
    **{("link", name): partial(link, names=(name,)) for name in (*LINKS, READ_LINK)},
    ("link", "replaced"): partial(link, names=[f"run_0/{name}" for name in REPLACED_LINKS]),
}
REFUSED = [key for key in MAKE if key[0] in SAID and key[1] not in (READ_LINK, "replaced")]


@pytest.fixture(scope="module")
def cases(tiny_config, synthetic_data, whole, tmp_path_factory):
    """All of them, started."""
    top = tmp_path_factory.mktemp("cases")
    found = {}
    for number, (key, make) in enumerate(MAKE.items()):
        found[key] = make(interrupted(whole, top / str(number), key[1]))
    start_all(found, tiny_config, synthetic_data)
    return found


@pytest.mark.parametrize("key", REFUSED, ids=" ".join)
def test_a_place_is_named_and_what_to_do(cases, key):
    kind, name = key
    line = cases[key].is_refused()
    assert line.startswith(f"mlperf_bert: error: {cases[key].run / name}") and SAID[kind] in line


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_file_that_is_stale_or_fails(whole, monkeypatch, name, number):
    real = os.open

    def failing(path, *rest, **others):
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number))
        return real(path, *rest, **others)

    with monkeypatch.context() as patch, pytest.raises(UnreadableError, match=os.strerror(number)):
        patch.setattr(os, "open", failing)
        verify(whole / NEWEST)


@pytest.mark.parametrize("how", LOST)
def test_a_run_that_had_checkpoints_is_not_begun_anew(cases, how):
    line = cases["lost", how].is_refused()
    assert f"{CHECKPOINTS}: has no usable checkpoint" in line
    assert "start a new run with --run-dir NEW" in line
    assert ("skipped a damaged checkpoint" in line) == (how == "damaged")


def test_a_link_is_read_or_replaced_where_a_file_is_renamed_to_its_name(cases):
    case = cases["link", READ_LINK]
    assert case.started.status == MISSED
    assert snapshot(case.run.parent) == case.before
    case = cases["link", "replaced"]
    assert case.started.status == MISSED, case.started
    after = snapshot(case.run.parent)
    targets = {name: each for name, each in case.before.items() if "/target " in name}
    assert len(targets) >= len(REPLACED_LINKS)
    assert {name: each for name, each in after.items() if "/target " in name} == targets
    own = case.run / "run_0"
    links = {path.name for path in own.rglob("*") if path.is_symlink()}
    # Those were put aside, with what was there before them.
    assert links == {"config_0.toml", "environment_0.json"} | {
        *("damaged_step_00000003", "damaged_step_00000003_1")
    }


def test_a_pipe_in_a_files_place_keeps_nobody_waiting(tiny_config, tmp_path):
    directory = RunDirectory(tmp_path, 0)
    for pipe in (directory.mlperf_log, tmp_path / "stdout.log"):
        os.mkfifo(pipe)
    with pytest.raises(DataError, match="is not a regular file"):
        find_start("auto", directory, load_config(tiny_config))
    with pytest.raises(ConfigError, match=r"stdout\.log: cannot be opened"):
        LineFile(tmp_path / "stdout.log", print, continued=True)


def test_nothing_is_written_through_a_link_at_a_temporary_name(tmp_path):
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_text("kept")
    with replaced_file(path) as temporary:
        temporary.touch()
    for write in (lambda: write_file(path, b"new"), lambda: check_writable(path)):
        temporary.symlink_to(target)
        write()
        assert target.read_text() == "kept"
    assert path.read_bytes() == b"new"

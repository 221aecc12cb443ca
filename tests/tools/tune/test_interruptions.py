"""A study survives signals, kills and torn files; nothing that finished is lost."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_study import rates


def start(words):
    return subprocess.Popen(
        [sys.executable, "-m", "mlperf_bert", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(is_there):
    until = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_training(study, name):
    return (study / "trials" / name / "run_0" / "metrics.jsonl").exists()


def trainers_of(study):
    """Command lines of processes that train for the study."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(f"{study}/trials" in word for word in words) and "tune" not in words:
            found.append(" ".join(words))
    return found


def test_it_goes_on_as_if_nothing_had_happened(tmp_path, study_words, studied):
    options = {"trials": 4}
    expected = studied(study="undisturbed", **options)
    studied(study="disturbed", status=None, **{**options, "trials": 2})
    study = tmp_path / "disturbed"
    finished = rates(study)
    for trial, number, status in ((2, signal.SIGTERM, 75), (3, signal.SIGKILL, -signal.SIGKILL)):
        process = start(study_words("stuck", study="disturbed", **options))
        wait_for(lambda trial=trial: is_training(study, f"trial_{trial:05d}"))
        process.send_signal(number)
        assert process.wait(120) == status
        wait_for(lambda: not trainers_of(study))  # it does not outlive what started it

    found = studied(study="disturbed", **options)
    best = found["best"]
    best["trial"] -= 2 * (best["trial"] > 2)  # the repeated ones have numbers of their own
    assert found == expected
    assert finished.items() <= rates(study).items()
    again = [rates(study)[f"trial_{number:05d}"] for number in (2, 3, 4)]
    assert len(set(again)) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_result_that_the_study_was_not_told(studied, monkeypatch, number):
    """The disk was full between two records of a trial. The trial counts once, by its result."""
    from optuna import Study

    expected = studied(study="undisturbed", trials=4)
    tell = Study.tell

    def full(study, *values, **named):
        if sum("result" in each.user_attrs for each in study.get_trials()) > number:
            raise OSError(errno.ENOSPC, "No space left on device", "journal.log")
        return tell(study, *values, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Study, "tell", full)
        assert "No space left on device" in studied(trials=4, status=2)
    assert studied(trials=4) == expected


def test_a_study_has_one_owner(tmp_path, study_words, studied):
    process = start(study_words("stuck", trials=1))
    try:
        wait_for(lambda: is_training(tmp_path / "study", "trial_00000"))
        assert "--out: study in" in studied(trials=1, status=2)
    finally:
        process.terminate()
        process.wait(120)


def test_journals_that_others_left(tmp_path, studied):
    journal = tmp_path / "study" / "journal.log"
    studied(trials=2, status=None)
    with journal.open("ab") as file:  # a line that a killed writer left is cut off
        file.write(b'{"op_code": 4, "worker')
    found = studied(trials=3, status=None)
    assert sum(found["trials"].values()) == 3
    sound = journal.read_text()
    journal.write_text(f"{sound}garbage\n")
    assert "is not a journal of Optuna" in studied(trials=3, status=2)
    # What a link leads to is not written.
    mine = tmp_path / "mine"
    mine.write_text("a line without its end")
    journal.unlink()
    journal.symlink_to(mine)
    assert "is a symbolic link" in studied(trials=1, status=2)
    assert mine.read_text() == "a line without its end"


def test_nothing_in_a_study_is_a_pickle():
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._base import BaseJournalSnapshot

    assert not issubclass(JournalFileBackend, BaseJournalSnapshot)

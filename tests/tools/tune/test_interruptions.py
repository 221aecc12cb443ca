"""A study survives signals, kills, torn files and company; nothing that finished is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_study import Studied, rates

from bert_tools.tune.store import Store, check_journal
from bert_tools.tune.trial_process import HEARTBEAT
from mlperf_bert.common.errors import DataError

Words = Callable[..., list[str]]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "mlperf_bert", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(is_there: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_training(study: Path, number: int) -> bool:
    return (study / "trials" / f"trial_{number:05d}" / "run_0" / "metrics.jsonl").exists()


def trainers_of(study: Path) -> list[str]:
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


def test_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, study_words: Words, studied: Studied
) -> None:
    options = {"trials": 4, "repeats": 1, "prune": "none"}
    expected = studied(study="undisturbed", **options)
    studied(study="disturbed", status=None, **{**options, "trials": 2, "repeats": 0})
    study = tmp_path / "disturbed"
    finished = rates(study)
    for trial, number, status in ((2, signal.SIGTERM, 75), (3, signal.SIGKILL, -signal.SIGKILL)):
        process = start(study_words("stuck", study="disturbed", **options))
        wait_for(lambda trial=trial: is_training(study, trial))
        process.send_signal(number)
        assert process.wait(120) == status
        wait_for(lambda: not trainers_of(study))  # it does not outlive what started it

    found = studied(study="disturbed", **options)
    assert found["arms"][0]["interrupted"] == 2
    found["arms"][0]["interrupted"] = 0
    best = found["arms"][0]["best"]
    best["trial"] -= 2 * (best["trial"] > 2)  # the repeated ones have numbers of their own
    assert found == expected
    assert finished.items() <= rates(study).items()
    again = [rates(study)[f"trial_{number:05d}"] for number in (2, 3, 4)]
    assert len(set(again)) == 1


def test_several_processes_share_one_study(
    tmp_path: Path, study_words: Words, studied: Studied
) -> None:
    options = {"trials": 4, "repeats": 1}
    other = start(study_words("together", **options))
    found = studied("together", **options)
    assert other.wait(120) == 0
    assert sum(found["arms"][0]["trials"].values()) == 4
    assert [len(each["needed"]) for each in found["fresh_seeds"]] == [1, 1]
    drawn = [rate for name, rate in rates(tmp_path / "study").items() if name[:5] == "trial"]
    assert len(drawn) == len(set(drawn)) == 4  # nobody draws what another one drew


def test_workers_are_processes_of_the_same_command(tmp_path: Path, studied: Studied) -> None:
    found = studied("together", trials=2, repeats=0, workers=2, status=None)
    assert sum(found["arms"][0]["trials"].values()) == 2
    owners = set()
    for line in (tmp_path / "study" / "journal.log").read_text().splitlines():
        owner = json.loads(line).get("user_attr", {}).get("owner")
        owners |= {owner["pid"]} if owner else set()
    assert len(owners) == 2 and os.getpid() not in owners


def test_journals_that_others_left(tmp_path: Path, studied: Studied) -> None:
    journal = tmp_path / "study" / "journal.log"
    studied(trials=2, repeats=0, status=None)
    with journal.open("ab") as file:  # a line that a killed writer left is cut off
        file.write(b'{"op_code": 4, "worker')
    found = studied(trials=3, repeats=0, status=None)
    assert sum(found["arms"][0]["trials"].values()) == 3
    sound = journal.read_text()
    for line in (  # that Optuna chokes on
        '{"op_code": 4}',
        '{"op_code": 0, "worker_id": "w", "study_name": [], "directions": 7}',
        '{"op_code": 4, "worker_id": "w", "study_id": {}, "datetime_start": 3}',
    ):
        journal.write_text(f"{sound}{line}\n")
        studied(trials=1, repeats=0, status=2)
    # What a link leads to is not written.
    mine = tmp_path / "mine"
    mine.write_text("a line without its end")
    journal.unlink()
    journal.symlink_to(mine)
    assert "is a link" in studied(trials=1, repeats=0, status=2)
    assert mine.read_text() == "a line without its end"


def test_a_journal_of_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    for line in ("[]", "{}", '{"op_code": 99}', '{"op_code": "4"}', "garbage", '{"op_code": NaN}'):
        path.write_text(line + "\n")
        with pytest.raises(DataError, match="line 1"):
            check_journal(path)


def test_a_trial_lost_before_it_drew_draws_what_it_would_have(tmp_path: Path) -> None:
    def draw_first(study: Path) -> float:
        study.mkdir(exist_ok=True)
        store = Store(study, ["trial"], seed=1)
        with store.locked():
            store.give_up_lost()
            return store.claim("trial", 8).suggest_float("rate", 0.0, 1.0)

    expected = draw_first(tmp_path / "undisturbed")
    (tmp_path / "disturbed").mkdir()
    store = Store(tmp_path / "disturbed", ["trial"], seed=1)
    store.claim("trial", 8)
    os.utime(store.directory_of("trial", 0) / HEARTBEAT, (0, 0))  # long ago
    assert draw_first(tmp_path / "disturbed") == expected


def test_nothing_in_a_study_is_a_pickle() -> None:
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._base import BaseJournalSnapshot

    assert not issubclass(JournalFileBackend, BaseJournalSnapshot)

"""A study survives signals, kills, torn files and company; nothing that finished is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_study import rates

from mlperf_bert.__main__ import main
from mlperf_bert.errors import DataError
from mlperf_bert.tune.journal import check_journal

Words = Callable[..., list[str]]
Captured = pytest.CaptureFixture[str]


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


def whole_study(words: list[str], captured: Captured) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(captured.readouterr().out)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, study_words: Words, capsys: Captured, number: int
) -> None:
    options = {"trials": 4, "repeats": 1, "prune": "none"}
    expected = whole_study(study_words(study="undisturbed", **options), capsys)
    assert main(study_words(study="disturbed", **{**options, "trials": 2, "repeats": 0})) in (0, 3)
    study = tmp_path / "disturbed"
    finished = rates(study)
    capsys.readouterr()
    process = start(study_words("stuck", study="disturbed", **options))
    wait_for(lambda: is_training(study, 2))
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 75)
    wait_for(lambda: not trainers_of(study))  # it does not outlive what started it

    found = whole_study(study_words(study="disturbed", **options), capsys)
    assert found["arms"][0]["interrupted"] == 1
    found["arms"][0]["interrupted"] = 0
    best = found["arms"][0]["best"]
    best["trial"] -= best["trial"] > 2  # the repeated one has a number of its own
    assert found == expected
    assert finished.items() <= rates(study).items()
    assert rates(study)["trial_00003"] == rates(study)["trial_00002"]


def test_several_processes_share_one_study(
    tmp_path: Path, study_words: Words, capsys: Captured
) -> None:
    words = study_words("slow", trials=6, repeats=1, samples=160)
    others = [start(words), start(words)]
    assert main([*words, "--json"]) in (0, 3)
    assert {each.wait(120) for each in others} <= {0, 3}
    found = json.loads(capsys.readouterr().out)
    assert sum(found["arms"][0]["trials"].values()) == 6
    assert [len(each["needed"]) for each in found["fresh_seeds"]] == [1] * len(found["fresh_seeds"])
    names = rates(tmp_path / "study")
    assert sum(name.startswith("trial") for name in names) == 6
    assert len(set(names.values())) >= 6  # nobody draws what another one drew


def test_workers_are_processes_of_the_same_command(
    tmp_path: Path, study_words: Words, capsys: Captured
) -> None:
    words = study_words("slow", trials=4, repeats=0, workers=2, samples=320, prune="none")
    assert main([*words, "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out)
    assert sum(found["arms"][0]["trials"].values()) == 4
    owners = set()
    for line in (tmp_path / "study" / "journal.log").read_text().splitlines():
        owner = json.loads(line).get("user_attr", {}).get("owner")
        owners |= {owner["pid"]} if owner else set()
    assert len(owners) == 2 and os.getpid() not in owners


def test_a_line_that_a_killed_writer_left_is_cut_off(
    tmp_path: Path, study_words: Words, capsys: Captured
) -> None:
    assert main(study_words(trials=2, repeats=0)) in (0, 3)
    with (tmp_path / "study" / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    capsys.readouterr()
    assert main([*study_words(trials=3, repeats=0), "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out)
    assert sum(found["arms"][0]["trials"].values()) == 3


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"op_code": 99}', '{"op_code": "4"}', "garbage", '{"op_code": NaN}']
)
def test_a_journal_of_anything_else_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.log"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        check_journal(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"op_code": 4}',
        '{"op_code": 0, "worker_id": "w", "study_name": [], "directions": 7}',
        '{"op_code": 4, "worker_id": "w", "study_id": {}, "datetime_start": 3}',
    ],
)
def test_a_journal_that_optuna_chokes_on_is_one_line(
    tmp_path: Path, study_words: Words, capsys: Captured, line: str
) -> None:
    assert main(study_words(trials=1, repeats=0)) in (0, 3)
    with (tmp_path / "study" / "journal.log").open("a") as file:
        file.write(line + "\n")
    capsys.readouterr()
    assert main(study_words(trials=1, repeats=0)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_in_a_study_is_a_pickle() -> None:
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._base import BaseJournalSnapshot

    assert not issubclass(JournalFileBackend, BaseJournalSnapshot)

"""What `watch --once` prints and what the page of `report` says, held whole."""

from pathlib import Path

import pytest

from report_pages import checked, page_of
from run_cases import end_run, record, records_of, write_clock, write_environment, write_run

SAID = ("evaluation at 160 samples: accuracy 0.1000 (0.5 s)",)
UNDER_WAY = [record(step, 0.05 * step if step % 3 == 0 else None) for step in range(1, 15)]
ENDS = {
    "reached": ("success", None),
    "missed": ("aborted", None),
    "stopped": ("aborted", "SIGTERM"),
    "hostile": ("aborted", "\x1b]0;owned\x07"),
}


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_state_of_a_run_on_the_screen(tmp_path, told, snapshot, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path / "under_way", UNDER_WAY, said=SAID)
    write_run(tmp_path / "begun", said=["attention: grouped"])
    (tmp_path / "empty").mkdir()
    for name, end in ENDS.items():
        write_run(tmp_path / name, UNDER_WAY, said=SAID)
        end_run(tmp_path / name / "run_0", *end)
    write_run(tmp_path / "no_target", overrides=["eval.target_accuracy=none"], ended="success")
    odd = [record(1, 0.5, skipped_steps=2), record(2, 0.25, loss=None, skipped_steps=1)]
    run = write_run(tmp_path / "odd", odd) / "run_0"
    with (run / "metrics.jsonl").open("a") as file:
        file.write("x\n{}\n")
    (run / "config.toml").write_text("[run\n")
    names = ("under_way", "begun", "empty", *ENDS, "no_target", "odd")
    printed = told("watch", *names, "--once")
    assert printed == snapshot and "\x1b" not in printed
    assert told("watch", *names) == printed  # which is no terminal
    monkeypatch.setenv("COLUMNS", "60")
    assert all(len(line) <= 60 for line in told("watch", *names, "--once").splitlines())


def words_of(*names):
    """What the page of these runs says, but for the table of all their settings and its origin."""
    texts = checked(page_of(*map(Path, names))).texts[:-1]
    tables = [number for number, text in enumerate(texts) if text.endswith(" settings")]
    return texts[: tables[0]] if tables else texts


LOST = {
    "config": ["config.toml"],
    "metrics": ["metrics.jsonl"],
    "metrics and outcome": ["metrics.jsonl", "outcome.json"],
    "nothing": [],
}


@pytest.mark.parametrize("name", LOST)
def test_a_page_says_what_is_not_there(name, tmp_path, snapshot):
    run = write_run(tmp_path / "run", records_of(), ended="success") / "run_0"
    for lost in LOST[name]:
        (run / lost).unlink()
    words = words_of("run")
    assert words_of("run/run_0")[3:] == words[3:]  # but for its name
    if "Curves" in words:
        del words[words.index("Curves") : words.index("In numbers")]
    assert words == snapshot


def test_pages_of_one_run_and_of_two(tmp_path, snapshot):
    unknown = records_of(something_new=5.0, noise_scale=None)  # columns of a newer program
    one = write_run(tmp_path / "one", unknown, ended="success")
    write_environment(one / "run_0", packages={"torch": "2.13.0"})
    write_clock(one, init_start=10, init_stop=13, run_start=13, run_stop=113)
    assert words_of("one") == snapshot(name="one")
    changed = ["optim.learning_rate=5e-4", 'optim.name="lamb"']
    slow = records_of(samples_per_s=600.0)[:3]
    write_run(tmp_path / "two", slow, overrides=changed, ended="aborted")
    assert words_of("one", "two") == snapshot(name="two")

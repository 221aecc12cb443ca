"""Engines and settings of runs; `squad compare`: what runs, is kept, refused and stopped."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bert_tools.squad import cli, compare
from bert_tools.squad.compare import Job, at_batch, hold_to_comparison, make_jobs, run_jobs
from bert_tools.squad.comparison import RunRecord
from bert_tools.squad.settings import (
    EngineName,
    SquadSettings,
    parse_engine,
    settings_of,
)
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import STOPPED, ConfigError, DataError
from squad_cases import record, write_record

HERE = Path(__file__)


def settings(engine: str = "single", seed: int = 1, **changes: Any) -> SquadSettings:
    return SquadSettings(engine=parse_engine(engine), seed=seed, **({"updates": 12} | changes))


class FakeRuns:
    """Leaves a record where a run would, or ends with another status from `fail_at` on."""

    def __init__(self, fail_at: int = 99, status: int = STOPPED) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self._fail_at, self._status = fail_at, status

    def __call__(self, words: Sequence[str], num_ranks: int) -> int:
        self.calls.append((list(words), num_ranks))
        if len(self.calls) >= self._fail_at:
            return self._status
        given = dict(pairwise(words))
        found = record(
            given["--engine"].partition("@")[0],
            seed=int(given["--seed"]),
            ranks=num_ranks,
            settings=record()["settings"] | {"global_batch": int(given["--global-batch"])},
        )
        write_record(Path(given["--run-dir"]), found)
        return 0

    def run(self, jobs: Sequence[Job]) -> tuple[list[RunRecord], int]:
        """`run_jobs` with these in the place of real ones."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "run_on_ranks", self)
            return run_jobs(jobs)


def jobs_of(out: Path, engines: Sequence[str], seeds: int, batches: Sequence[int]) -> list[Job]:
    per_engine = [settings(name, seed) for seed in range(1, seeds + 1) for name in engines]
    return make_jobs(out, per_engine, batches, "square_root")


def test_engines_take_turns_and_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, ["single", "ddp:2"], 2, [16])
    stopped, again = FakeRuns(fail_at=3), FakeRuns()
    runs, status = stopped.run(jobs)
    assert (len(runs), status, len(stopped.calls)) == (2, STOPPED, 3)  # the first failure ends it
    runs, status = again.run(jobs)
    in_turns = [("single", 1), ("ddp:2", 1), ("single", 2), ("ddp:2", 2)]
    assert status == 0 and [(run.engine, run.seed) for run in runs] == in_turns
    assert [ranks for _, ranks in stopped.calls[:2] + again.calls] == [1, 2, 1, 2]
    status = FakeRuns(fail_at=1, status=2).run(jobs_of(tmp_path / "2", ["single"], 1, [16]))[1]
    assert status == 2


def test_a_damaged_record_is_named_not_passed_over(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, ["single"], 1, [16])
    write_record(jobs[0].directory, record(losses="none"))
    with pytest.raises(DataError, match="losses"):
        FakeRuns().run(jobs)


def test_a_sweep_trains_on_as_many_samples_at_every_batch(tmp_path: Path) -> None:
    found = [job.settings for job in jobs_of(tmp_path, ["ddp:2"], 1, [16, 32, 64])]
    assert [each.updates for each in found] == [12, 6, 3]
    assert {each.global_batch * (each.updates or 0) for each in found} == {192}
    # sqrt(32 / 16) and sqrt(64 / 16) times 5e-5
    rates = [each.learning_rate for each in found]
    assert rates == pytest.approx([5e-5, 7.0711e-5, 1e-4], rel=1e-4)
    assert at_batch(settings(), 64, "keep").learning_rate == 5e-5


def test_another_comparison_in_the_same_place_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert hold_to_comparison(out, {"train": "aa", "learning_rate": 1e-3}) == "new"
    assert hold_to_comparison(out, {"train": "aa", "learning_rate": 1e-3}) == "same"
    write_record(out / "runs" / "single", record())
    with pytest.raises(DataError, match="train is 'bb' now, and was 'aa'"):
        hold_to_comparison(out, {"train": "bb", "learning_rate": 1e-3})


def test_a_comparison_of_which_no_run_ended_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, works = FakeRuns(fail_at=1, status=2), FakeRuns()
    runner = {"now": fails}
    monkeypatch.setattr(compare, "run_on_ranks", lambda words, n, **_: runner["now"](words, n))
    monkeypatch.setattr("bert_tools.squad.compare.PEAK_SECONDS", 0.01)
    out = tmp_path / "out"
    words = compare_words(out, "--seeds", "1", "--updates", "10", "--hidden", "16", "--heads", "2")
    assert main([*words, "--layers", "1"]) == 2
    (out / "vocab.txt").write_text("of other questions")
    (out / "peak.json").write_text('{"tflops": 9, "means": "of another model"}')
    runner["now"] = works
    assert main([*words, "--layers", "2"]) == 0
    assert "of other questions" not in (out / "vocab.txt").read_text()
    assert "of another model" not in (out / "peak.json").read_text()
    assert main([*words, "--layers", "1"]) == 2  # runs have ended now
    assert "model is [1, 16, 2] now, and was [2, 16, 2]" in capsys.readouterr().err
    assert len(works.calls) == 2


def test_another_machine_or_setting_is_another_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(engine: str = "single", seed: int = 1, **changes: Any) -> dict[str, Any]:
        return compare.facts_of(settings(engine, seed, train=HERE, dev=HERE, **changes))

    first = facts()
    assert facts("ddp:2", 7) == first  # more seeds, engines and batches belong to the same
    changes: tuple[dict[str, Any], ...] = (
        {"max_length": 99},
        {"learning_rate": 1.0},
        {"updates": 13},
    )
    assert all(facts(**each) != first for each in changes)
    monkeypatch.setattr(compare, "usable_cpus", lambda: frozenset(range(1000)))
    assert facts() != first


@pytest.mark.parametrize("engine", ["single", "fsdp:3", "pipeline:2@gpipe", "pipeline:2xddp:2"])
def test_options_of_a_rank_give_the_same_settings(engine: str) -> None:
    odd = {"learning_rate": 1.23456789e-5, "dropout": 0.25, "global_batch": 48, "microbatches": 12}
    wanted = settings(engine, seed=5, train=HERE, dev=HERE, layers=3, **odd)
    parser = argparse.ArgumentParser()
    cli.add_train(parser)
    args = parser.parse_args(wanted.as_words())
    assert settings_of(args, parse_engine(args.engine), args.seed) == wanted
    assert "--layers" not in replace(wanted, init_checkpoint=HERE).as_words()
    assert str(Path("here").absolute()) in replace(wanted, vocab=Path("here")).as_words()


def compare_words(out: Path, *more: str) -> list[str]:
    return ["squad", "compare", "--engines", "single,ddp:2", "--out", str(out), *more]


def test_the_command_writes_table_json_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRuns()
    monkeypatch.setattr(compare, "run_on_ranks", lambda words, ranks, **_: fake(words, ranks))
    out = tmp_path / "out"
    (out).mkdir()
    (out / "peak.json").write_text('{"tflops": 0.1, "means": "as measured"}')
    words = compare_words(out, "--seeds", "2", "--updates", "10", "--json")
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 1
    assert [each["label"] for each in answer["engines"]] == ["single", "ddp:2"]
    assert answer["engines"][1]["values"]["mfu"]["mean"] == pytest.approx(8.0)
    assert answer["study"]["rows"][0]["samples_per_s"] == 37.98
    assert "ddp:2" in (out / "table.md").read_text()
    assert (out / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "result.json").read_text()) == answer
    # Once more: everything is kept, and a third seed is added.
    assert main(compare_words(out, "--seeds", "3", "--updates", "10")) == 0
    assert len(fake.calls) == 6
    assert "seeds 1, 2, 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--engines", "magic"], "--engine"),
        (["--batches", "16,x"], "--batches"),
        (["--batches", "16,16"], "--batches"),
        (["--batches", "16,32", "--global-batch", "16"], "--batches"),
        (["--initial-batch", "0"], "--initial-batch"),
        (["--train", "nowhere.json"], "nowhere.json"),
        (["--microbatches", "3"], "--microbatches"),
        (["--layers", "0"], "--layers"),
        (["--hidden", "65"], "--hidden"),
        (["--layers", "2", "--init-checkpoint", "x"], "--layers"),
        (["--batches", "16,36", "--updates", "12"], "192 samples"),
        (["--engines", "ddp:2,ddp:2"], "twice"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: str
) -> None:
    assert main(compare_words(tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "runs").exists()


def test_a_missing_matplotlib_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(compare_words(tmp_path / "out")) == 2
    assert "matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("single", EngineName(kind="single")),
        ("ddp:4", EngineName(kind="ddp", replicas=4)),
        ("fsdp", EngineName(kind="fsdp", replicas=3)),
        ("pipeline:4", EngineName(kind="pipeline", stages=4, schedule="1f1b")),
        ("pipeline:2 x ddp:2", EngineName(kind="pipeline", stages=2, replicas=2, schedule="1f1b")),
        (
            "pipeline:2xddp:3@gpipe",
            EngineName(kind="pipeline", stages=2, replicas=3, schedule="gpipe"),
        ),
        (" pipeline@zero_bubble ", EngineName(kind="pipeline", stages=3, schedule="zero_bubble")),
    ],
)
def test_names_are_read(text: str, expected: EngineName) -> None:
    assert parse_engine(text, ranks=3) == expected


def test_a_name_is_written_as_it_is_read_and_tells_ranks_and_parts() -> None:
    for text in ("single", "ddp:4", "fsdp:2", "pipeline:2", "pipeline:2xddp:3"):
        assert str(parse_engine(text)) == text
    assert parse_engine("pipeline:2xddp:3").ranks == 6
    assert parse_engine("pipeline:2").num_parts == 2
    assert parse_engine("pipeline:2@interleaved").num_parts == 4


REFUSED = (
    *("", "zero", "ddp:0", "single:2", "pipeline:1", "ddp:2xddp:2", "fsdp:2@gpipe", "ddp:-1"),
    *("pipeline:2@fifo", "pipeline:2xfsdp:2", "pipeline:2xddp:0", "ddp:99999"),
)


def test_other_names_are_refused() -> None:
    for text in REFUSED:
        with pytest.raises(ConfigError, match="--engine: "):
            parse_engine(text)


@pytest.mark.parametrize(
    ("engine", "changes", "option"),
    [
        ("single", {"microbatches": 3}, "--microbatches"),  # does not divide 16
        ("single", {"microbatches": 0}, "--microbatches"),
        ("ddp:3", {}, "--microbatches"),  # 4 over 3 ranks
        ("pipeline:4", {"microbatches": 2}, "--microbatches"),  # 1F1B needs one a stage
        ("pipeline:2xddp:2", {"noise_every": 5, "microbatches": 2}, "--microbatches"),
        ("single", {"noise_every": 5, "microbatches": 1}, "--microbatches"),
        ("pipeline:2@interleaved", {"microbatches": 8, "global_batch": 24}, None),
        ("pipeline:4@interleaved", {"microbatches": 9, "global_batch": 18}, "--microbatches"),
        ("single", {"learning_rate": float("nan")}, "--learning-rate"),
        ("single", {"dropout": 1.0}, "--dropout"),
        ("single", {"warmup": -0.1}, "--warmup"),
        ("single", {"epochs": 0.0}, "--epochs"),
        ("single", {"epochs": float("inf")}, "--epochs"),
        ("single", {"epsilon": -1.0}, "--epsilon"),
        ("single", {"updates": 0}, "--updates"),
    ],
)
def test_settings_that_cannot_run(
    engine: str, changes: dict[str, object], option: str | None
) -> None:
    with nullcontext() if option is None else pytest.raises(ConfigError, match=option):
        SquadSettings(engine=parse_engine(engine), **changes)  # type: ignore[arg-type]


def test_updates_of_epochs_are_rounded_up_and_must_fit_the_memory() -> None:
    epochs = SquadSettings(engine=parse_engine("single"), epochs=2.0)
    assert epochs.num_updates(100) == 13  # 200 windows in batches of 16
    assert epochs.num_updates(1) == 1
    with pytest.raises(ConfigError, match="--updates, --epochs: are 10,000,000 of 16"):
        SquadSettings(engine=parse_engine("single"), updates=10**7).num_updates(100)

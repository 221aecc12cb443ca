"""Engines and settings of runs; `squad compare`: what runs, is kept, refused and stopped."""

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bert_tools.doctor.cli import cpu_model
from bert_tools.squad import cli, compare
from bert_tools.squad.compare import at_batch, directory_of, run_all
from bert_tools.squad.settings import EngineName, SquadSettings, parse_engine, settings_of
from mlperf_bert.__main__ import main
from mlperf_bert.errors import STOPPED, ConfigError, DataError
from mlperf_bert.files import file_sha256
from mlperf_bert.machine import usable_cpus
from squad_cases import record, write_record
from support import refusal

HERE = Path(__file__)


def settings(engine="single", seed=1, **changes):
    return SquadSettings(engine=parse_engine(engine), seed=seed, **({"updates": 12} | changes))


class FakeRuns:
    """Leaves a record where a run would, or ends with another status from `fail_at` on."""

    def __init__(self, fail_at=99, status=STOPPED, **machine):
        self.calls = []
        self._machine = {"processor": cpu_model(), "cores": len(usable_cpus())} | machine
        self._fail_at, self._status = fail_at, status

    def __call__(self, words, num_ranks):
        self.calls.append((list(words), num_ranks))
        if len(self.calls) >= self._fail_at:
            return self._status
        parser = argparse.ArgumentParser()
        cli.add_train(parser)
        args = parser.parse_args(self.calls[-1][0][2:])
        given = settings_of(args, parse_engine(args.engine), args.seed)
        more = self._machine | {
            "seed": given.seed,
            "ranks": num_ranks,
            "settings": given.to_record(),
        }
        more["data"] = record()["data"] | {
            "train_sha256": file_sha256(given.train),
            "dev_sha256": file_sha256(given.dev),
        }
        write_record(args.run_dir, record(str(given.engine), **more))
        return 0

    def run(self, out, runs):
        """`run_all` with these in the place of real ones."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "run_on_ranks", self)
            return run_all(out, runs)


TURNS = [("single", 1), ("ddp:2", 1), ("single", 2), ("ddp:2", 2)]


def test_what_has_ended_is_not_run_again(tmp_path):
    planned = [settings(name, seed) for name, seed in TURNS]
    stopped, again = FakeRuns(fail_at=3), FakeRuns()
    runs, status = stopped.run(tmp_path, planned)
    assert (len(runs), status, len(stopped.calls)) == (2, STOPPED, 3)  # the first failure ends it
    runs, status = again.run(tmp_path, planned)
    assert status == 0 and [(run["engine"], run["seed"]) for run in runs] == TURNS
    assert [ranks for _, ranks in stopped.calls[:2] + again.calls] == [1, 2, 1, 2]
    assert FakeRuns(fail_at=1, status=2).run(tmp_path / "2", planned) == ([], 2)


def test_a_sweep_trains_on_as_many_samples_at_every_batch():
    found = [at_batch(settings("ddp:2"), batch) for batch in (16, 32, 64)]
    assert [each.updates for each in found] == [12, 6, 3]
    # sqrt(32 / 16) and sqrt(64 / 16) times 5e-5
    rates = [each.learning_rate for each in found]
    assert rates == pytest.approx([5e-5, 7.0711e-5, 1e-4], rel=1e-4)
    assert at_batch(settings(), 16) == settings()


def test_a_run_of_other_settings_in_the_same_place_is_refused_by_name(tmp_path):
    FakeRuns().run(tmp_path, [settings()])
    assert directory_of(tmp_path, settings()).name == "single-batch_16-seed_1"
    for changes, named in (
        ({"max_length": 99}, "has max_length = 384, but this comparison has 99"),
        ({"layers": 2}, "has layers = 4, but this comparison has 2"),
        ({"precision": "bf16"}, "has precision = 'fp32', but this comparison has 'bf16'"),
        ({"init_checkpoint": HERE}, "has init_checkpoint = None, but this comparison has '.*'"),
        ({"train": HERE}, "has train = "),
    ):
        with pytest.raises(DataError, match=named):
            FakeRuns().run(tmp_path, [settings(**changes)])


def test_a_run_of_other_questions_is_refused_before_another_runs(tmp_path):
    train = tmp_path / "train.json"
    train.write_text("before")
    FakeRuns().run(tmp_path, [settings(train=train)])
    train.write_text("after")
    again = FakeRuns()
    with pytest.raises(DataError, match="other questions than"):
        again.run(tmp_path, [settings("ddp:2", train=train), settings(train=train)])
    assert again.calls == []


@pytest.mark.parametrize("machine", [{"cores": 999}, {"processor": "another"}])
def test_a_run_of_another_machine_is_refused_before_another_runs(tmp_path, machine):
    FakeRuns(**machine).run(tmp_path, [settings()])
    again = FakeRuns()
    with pytest.raises(DataError, match=r"ran with .* but this process has .* another --out"):
        again.run(tmp_path, [settings("ddp:2"), settings()])
    assert again.calls == []


@pytest.mark.parametrize("engine", ["single", "fsdp:3", "pipeline:2@gpipe"])
def test_options_of_a_rank_give_the_same_settings(engine):
    odd = {"learning_rate": 1.23456789e-5, "global_batch": 48, "microbatches": 12}
    wanted = settings(engine, seed=5, train=HERE, dev=HERE, layers=3, **odd)
    parser = argparse.ArgumentParser()
    cli.add_train(parser)
    args = parser.parse_args(wanted.as_words())
    assert settings_of(args, parse_engine(args.engine), args.seed) == wanted
    assert str(Path("here").absolute()) in replace(wanted, vocab=Path("here")).as_words()


def compare_words(out, *more):
    return ["squad", "compare", "--engines", "single,ddp:2", "--out", str(out), *more]


def test_the_command_writes_table_and_record(tmp_path, monkeypatch, capsys):
    fake = FakeRuns()
    monkeypatch.setattr(compare, "run_on_ranks", lambda words, ranks, **_: fake(words, ranks))
    out = tmp_path / "out"
    words = compare_words(out, "--seeds", "2", "--updates", "10", "--json")
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 3
    assert [each["engine"] for each in answer["engines"]] == ["single", "ddp:2"]
    assert answer["engines"][1]["values"]["goodput"]["mean"] == 8.0
    assert json.loads((out / "result.json").read_text()) == answer
    # Once more: everything is kept, and a third seed is added.
    assert main(compare_words(out, "--seeds", "3", "--updates", "10")) == 0
    assert len(fake.calls) == 6
    assert "seeds 1, 2, 3" in capsys.readouterr().out
    engines = [words[words.index("--engine") + 1] for words, _ in fake.calls]
    assert engines == ["single", "ddp:2"] * 3  # they take turns, seed by seed


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--engines", "magic"], "--engine"),
        (["--batches", "16,x"], "--batches"),
        (
            ["--batches", "16,16", "--updates", "12", "--noise-every", "2"],
            "list each engine and batch size once",
        ),
        (["--batches", "16,32", "--updates", "12"], "--batches: needs --noise-every"),
        (
            ["--batches", "16,64", "--updates", "40", "--noise-every", "20"],
            "--noise-every: is 20, so no update of the 10 at a batch of 64 measures noise",
        ),
        (["--vocab", "tokenizer.json"], "--vocab: is tokenizer.json, but squad reads only word"),
        (["--batches", "16,32", "--global-batch", "16"], "--batches"),
        (["--layers", "0"], "--layers"),
        (["--hidden", "65"], "--hidden"),
        (["--layers", "2", "--init-checkpoint", "x"], "--layers"),
        (["--batches", "16,36", "--updates", "12", "--noise-every", "2"], "192 samples"),
        (["--batches", "16,32"], "--batches: needs --updates"),
        (["--batches", "16,32", "--epochs", "1"], "set --updates to the number of updates at"),
        (["--engines", "ddp:2,ddp:2"], "twice"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(tmp_path, monkeypatch, capsys, more, named):
    monkeypatch.setattr(compare, "run_on_ranks", lambda *_: pytest.fail("a run was started"))
    assert named in refusal(capsys, *compare_words(tmp_path / "out", *more))
    assert not (tmp_path / "out" / "runs").exists()


def test_names_are_written_as_they_are_read_and_others_refused():
    for text, expected, parts in (
        ("single", EngineName(kind="single"), 1),
        ("ddp:4", EngineName(kind="ddp", ranks=4), 4),
        ("pipeline:2", EngineName(kind="pipeline", ranks=2, schedule="1f1b"), 2),
        ("pipeline:2@interleaved", EngineName(kind="pipeline", ranks=2, schedule="interleaved"), 4),
    ):
        found = parse_engine(f" {text} ")
        assert (found, str(found), found.num_parts) == (expected, text, parts)
    wrong = ["", "zero", "ddp", "ddp:0", "ddp:-1", "ddp:99999", "ddp:2xddp:2", "single:2"]
    wrong += ["fsdp:2@gpipe", "pipeline:1", "pipeline:2@fifo", "pipeline:2xfsdp:2"]
    for text in wrong:
        with pytest.raises(ConfigError, match="--engine: "):
            parse_engine(text)


def test_settings_that_cannot_run():
    for engine, changes, option in (
        ("single", {"microbatches": 3}, "--microbatches"),  # does not divide 16
        ("single", {"microbatches": 0}, "--microbatches"),
        ("ddp:3", {}, "--microbatches"),  # 4 over 3 ranks
        ("pipeline:4", {"microbatches": 2}, "--microbatches"),  # 1F1B needs one a stage
        ("ddp:4", {"noise_every": 5}, "--microbatches"),  # 4 over 4 ranks, in two halves
        ("single", {"noise_every": 5, "microbatches": 1}, "--microbatches"),
        ("pipeline:2@interleaved", {"microbatches": 8, "global_batch": 24}, None),
        ("pipeline:4@interleaved", {"microbatches": 9, "global_batch": 18}, "--microbatches"),
        ("single", {"learning_rate": float("nan")}, "--learning-rate"),
        ("single", {"epochs": 0.0}, "--epochs"),
        ("single", {"epochs": float("inf")}, "--epochs"),
        ("single", {"updates": 0}, "--updates"),
    ):
        with nullcontext() if option is None else pytest.raises(ConfigError, match=option):
            SquadSettings(engine=parse_engine(engine), **changes)


def test_updates_of_epochs_are_rounded_up():
    epochs = SquadSettings(engine=parse_engine("single"), epochs=2.0)
    assert (epochs.num_updates(100), epochs.num_updates(1)) == (13, 1)  # in batches of 16

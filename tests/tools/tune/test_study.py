"""`mlperf_bert tune` with a trainer of our own: what is searched, kept, written and refused."""

import json
import tomllib
from types import SimpleNamespace

import optuna
import pytest

from bert_tools.tune.study import StudySettings, report_point
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import load_config


def rates(study):
    """The learning rate that each training was given, by its directory."""
    return {
        path.parent.name: tomllib.loads(path.read_text())["optim"]["learning_rate"]
        for path in sorted((study / "trials").glob("*/trial.toml"))
    }


def samples_by_formula(rate, best=3e-3):
    """Samples of the fake trainer: 32 per evaluation, accuracy quality * k / 10 up to 0.5."""
    quality = min(rate / best, best / rate)
    return next((32 * k for k in range(1, 21) if quality * k / 10 + 1e-6 >= 0.5), None)


def test_the_best_is_the_one_that_needs_fewest_samples(tmp_path, studied):
    result = studied(objective="time")
    study = tmp_path / "study"
    given = {name: rate for name, rate in rates(study).items() if name.startswith("trial")}
    assert len(given) == 6
    needed = {name: samples_by_formula(rate) for name, rate in given.items()}
    least = min(samples for samples in needed.values() if samples)
    best_name = min(name for name, samples in needed.items() if samples == least)
    best = result["best"]
    assert best["samples"] == least and best["trial"] == int(best_name.removeprefix("trial_"))
    assert result["objective"] == "time" and best["seconds"] == best["samples"] / 32 * 0.5
    assert sum(result["trials"][how] for how in ("reached", "missed", "pruned")) == 6
    assert result["schema_version"] == 4

    config = load_config(study / "best.toml")
    assert config.optim.learning_rate == given[best_name]
    assert config.run.seed == 11  # as in the config that was given
    assert config.run.max_steps == 40  # those of the trials, which are twice those of the config
    comments = [line for line in (study / "best.toml").read_text().split("\n") if line[:1] == "#"]
    assert "trial" in comments[0] and "tiny.toml" in comments[1]


@pytest.mark.parametrize(("samples", "steps"), [(608, 76), (128, 20)])
def test_the_best_config_trains_at_least_as_long_as_a_trial(tmp_path, studied, samples, steps):
    """Half of the batch needs twice the steps, and a schedule of as many samples."""
    space = tmp_path / "batches.toml"
    space.write_text('[[parameter]]\nkey = "parallel.local_batch_size"\nchoices = [8]\n')
    more = ("--set", "eval.target_accuracy=0.1")
    studied(space=space, trials=1, samples=samples, more=more)
    best = load_config(tmp_path / "study" / "best.toml")
    assert (best.parallel.local_batch_size, best.run.max_steps) == (8, steps)
    given = load_config(tmp_path / "tiny.toml", more[1:2]).schedule
    (trained,) = (tmp_path / "study" / "trials").glob("trial_*/trial.toml")
    for schedule in (best.schedule, load_config(trained).schedule):
        assert schedule.warmup_steps == 2 * given.warmup_steps > 0
        assert schedule.decay_steps == 2 * given.decay_steps


@pytest.mark.parametrize(
    ("samples", "reported"),
    [((32, 64, 96), [(0.3, 1)]), ((128, 256, 384), [(0.4, 2), (0.3, 4), (0.2, 6)])],
)
def test_trials_of_other_batches_are_compared_at_equal_samples(samples, reported):
    """The study's interval is 64. MLPerf's grows with the batch, and a trial's may be shorter."""
    found, last = [], 0
    trial = SimpleNamespace(report=lambda value, number: found.append((round(value, 9), number)))
    for each, accuracy in zip(samples, (0.6, 0.7, 0.8), strict=True):
        last = report_point(trial, last, 64, each, accuracy)
    assert found == reported and last == reported[-1][1]


def test_a_miss_is_called_one(tmp_path, study_words, capsys):
    words = study_words(samples=64, trials=2)  # two evaluations: 0.2 at best
    assert main(words) == 3
    captured = capsys.readouterr()
    result = json.loads((tmp_path / "study" / "result.json").read_text())
    progress = captured.err.strip().split("\n")
    assert result["trials"]["missed"] == 2 and result["best"] is None
    assert not (tmp_path / "study" / "best.toml").exists()
    assert "trial 2 of 2: missed 0.5" in progress[-1]
    assert "no trial reached the target" in captured.out


@pytest.mark.filterwarnings("error::UserWarning")  # of Optuna, which nobody can act on
def test_hopeless_trainings_are_ended(studied):
    # The fifth would wait for minutes, if nobody ended it.
    trials = studied("patient", trials=6, samples=320)["trials"]
    # The sixth, told to end, reached the target first: that counts.
    assert (trials["reached"], trials["pruned"]) == (5, 1)


def test_all_trials_are_evaluated_after_as_many_samples(tiny_config, tmp_path):
    """MLPerf's interval grows with the batch, which would round their results differently."""
    changes = ("eval.interval_samples=mlperf", "schedule.decay_steps=20000")
    config, large = (
        load_config(tiny_config, [*changes, f"parallel.local_batch_size={size}"])
        for size in (16, 4096)
    )
    settings = StudySettings(
        config=config,
        config_path=tiny_config,
        space=(),
        data=tmp_path,
        objective="samples",
        most_samples=10**6,
        seed=1,
        trainer=None,
    )
    trial = settings.trial_config({"parallel.local_batch_size": 4096})
    assert trial.eval_interval_samples == 150_000 < large.eval_interval_samples


@pytest.mark.parametrize(("objective", "is_pruned"), [("samples", True), ("time", False)])
def test_no_search_for_the_fastest_is_pruned(studied, monkeypatch, objective, is_pruned):
    """Curves are compared at equal samples, where a large batch is behind and may be faster."""
    pruners, create = [], optuna.create_study

    def created(**options):
        pruners.append(options["pruner"])
        return create(**options)

    monkeypatch.setattr(optuna, "create_study", created)
    studied(trials=1, objective=objective, status=None)
    assert isinstance(pruners[0], optuna.pruners.MedianPruner) == is_pruned


def test_values_that_contradict_cost_nothing(tmp_path, studied):
    space = tmp_path / "batches.toml"
    space.write_text('[[parameter]]\nkey = "model.num_heads"\nchoices = [3, 5]\n')  # of 32 channels
    result = studied(space=space, trials=2, status=3)
    assert result["trials"]["refused"] == 2
    assert not list((tmp_path / "study" / "trials").glob("*/run_0"))


def test_more_trials_go_on_with_the_same_study_until_nothing_is_left(tmp_path, studied):
    options = {"space": "clipping"}  # which has ranges, factors and choices
    studied(trials=2, status=None, **options)
    before = rates(tmp_path / "study")
    whole = studied(trials=4, status=None, **options)
    now = rates(tmp_path / "study")
    assert whole["objective"] == "samples"
    assert len(before) == 2 and len(now) == 4 and before.items() <= now.items()
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("train.log")}
    assert studied("fails", trials=4, status=None, **options) == whole
    assert logs == {path: path.stat().st_mtime_ns for path in logs}


def test_another_study_is_not_mixed_in(tmp_path, studied):
    options = {"trials": 1}
    studied(status=None, **options)
    changes = (
        ({"seed": 2}, "other values of seed"),
        ({"samples": 320}, "other values of most_samples"),
        ({"objective": "time"}, "other values of objective"),
        ({"space": "schedule"}, "other values of space"),
    )
    for changed, named in changes:
        assert named in studied(status=2, **options, **changed)
    (tmp_path / "data" / "eval" / "index" / "dataset.json").write_text("other")
    assert "other values of data_sha256" in studied(status=2, **options)


def test_a_trainer_that_cannot_work_ends_the_search(studied):
    error = studied("fails", status=2)
    assert "3 trainings in a row failed" in error and "out of memory" in error
    # A mistake of the user is told at once, and uses up no trial.
    error = studied("mistaken", study="other", status=2)
    assert "stopped with an error: " in error and "no such data" in error
    assert "trial 1 of" not in error
    # Without a trainer of one's own it is `mlperf_bert train`, which refuses data that are none.
    error = studied(trainer=None, study="real", status=2)
    assert "stopped with an error: " in error and "dataset.json" in error


def test_values_that_only_the_trainer_rejects(tmp_path, studied):
    """Such a trial ends, so that the study goes on. At its start, the command may be wrong."""
    space = tmp_path / "batches.toml"
    options = {"space": space, "more": ("--set", "eval.target_accuracy=0.1")}
    parameter = '[[parameter]]\nkey = "parallel.local_batch_size"\nchoices = {}\n'
    space.write_text(parameter.format([32]))
    assert "batch too large" in studied("small", status=2, **options)
    assert studied("small", trials=2, status=3, **options)["trials"]["refused"] == 2

    space.write_text(parameter.format([16, 32]) + (tmp_path / "space.toml").read_text())
    trials = studied("small", study="both", trials=6, **options)["trials"]
    assert trials["refused"] > 0 and sum(trials.values()) == 6


def test_a_mistake_in_the_middle_ends_the_search(studied):
    """It does not use up all trials that are left."""
    before = studied(trials=2, status=None)["trials"]
    assert "no such data" in studied("mistaken", trials=9, status=2)
    trials = studied(trials=9)["trials"]
    assert trials["refused"] == 3 and trials["reached"] >= before["reached"]
    assert sum(trials.values()) == 9


def test_mistakes_are_one_line(tmp_path, studied):
    for options, named in (
        ({"trials": 0}, "--trials"),
        ({"seed": -1}, "--seed"),
        ({"samples": 31}, "first evaluation is after 32"),
        ({"study": "/proc"}, ".study.lock cannot be created"),  # where nobody can write
        ({"space": "unknown"}, "SPACE"),
        ({"data": "nowhere"}, "create the set with `mlperf_bert prepare`"),
        ({"trainer": tmp_path / "command"}, "--trainer"),
        ({"more": ("--set", "eval.target_accuracy=none")}, "a search needs a target"),
    ):
        assert named.lower() in studied(status=2, **options).lower()

"""The training command end to end on made-up words: files, rules, determinism."""

import json
import math
import re
import sys
import time

import pytest
import torch

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.errors import MISTAKE, TARGET_MISSED
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.model.layers import pretraining_loss
from mlperf_bert.step import eager
from mlperf_bert.train import MAX_SKIPPED_IN_A_ROW
from report_pages import checked
from resume_cases import DROPOUT, run_train
from support import (
    REPOSITORY,
    metrics_losses,
    metrics_records,
    mlperf_records,
    prepare_small,
)

SPOILT = range(5, 17)  # steps in a row without an update; the run recovers before it is judged


@pytest.fixture
def train(tiny_config, synthetic_data, tmp_path):
    """Run `mlperf_bert train` in this process, into tmp_path/<name>."""

    def run(name, *overrides, extra=()):
        return run_train(tiny_config, synthetic_data, tmp_path / name, *overrides, extra=extra)

    return run


def test_reaching_the_target_ends_the_run_and_a_report_shows_all_of_it(train, tmp_path, capsys):
    assert train("a run", "eval.target_accuracy=0.001") == 0
    run_dir = tmp_path / "a run"
    lines = capsys.readouterr().out.splitlines()
    place = next(
        number for number, line in enumerate(lines) if f"run directory {run_dir}/run_0" in line
    )
    assert lines[place + 1].startswith("to watch the run from another terminal: ")
    assert lines[-2].startswith("to see the run in a browser: ")  # the rest: test_hints.py
    assert {path.name for path in run_dir.iterdir()} == {"result_0.txt", "run_0"}
    names = {path.name for path in (run_dir / "run_0").iterdir()}
    files = {"config.toml", "environment.json", "metrics.jsonl", "outcome.json", "stdout.log"}
    assert names == {*files, "checkpoints", "vocab.txt"}
    assert metrics_records(run_dir)[-1]["samples"] == 160  # stopped at the first evaluation
    last = (run_dir / "result_0.txt").read_text().splitlines()[-1]
    assert '"run_stop"' in last and '"success"' in last
    assert (run_dir / "run_0" / "checkpoints" / "LATEST").read_text() == "step_00000010\n"
    assert main(["report", "page", str(run_dir / "run_0")]) == 0
    page = checked((run_dir / "run_0" / "report.html").read_text("utf-8"))
    assert f"{metrics_losses(run_dir)[-1]:.3f}" in page.words
    for words in ("1 rank on cpu", "Training loss", "run.max_steps", "target reached"):
        assert words in page.words
    assert "there is no" not in page.words  # no file of it was missed


def test_metrics_have_the_documented_keys(train, tmp_path):
    assert train("run", "run.log_interval_steps=7") == TARGET_MISSED
    records = metrics_records(tmp_path / "run")
    page = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
    rows = page.splitlines()
    names = [row.split("|")[1] for row in rows if row.startswith("| `")]
    documented = {name for cell in names for name in re.findall(r"`(\w+)`", cell)}
    assert len(documented) == 19
    for record in records:
        assert record.keys() == documented
        assert record["data_wait_ms"] > 0
    # Multiples of 7; an evaluation every 160 samples closes an interval too, as does the end.
    assert [record["step"] for record in records] == [7, 10, 14, 20]
    assert [record["mlm_accuracy"] is None for record in records] == [True, False, True, False]


def test_a_run_is_never_written_over(train, tmp_path, capsys):
    assert train("run", "run.max_steps=1") == TARGET_MISSED
    before = (tmp_path / "run" / "result_0.txt").read_bytes()
    capsys.readouterr()
    assert train("run", "run.max_steps=1") == 2
    assert "--run-dir" in capsys.readouterr().err
    assert (tmp_path / "run" / "result_0.txt").read_bytes() == before
    assert train("run", "run.max_steps=1", extra=("--run-index", "1")) == TARGET_MISSED


def test_same_seed_same_losses_and_warm_up_leaves_no_trace(train, tmp_path):
    same = (*DROPOUT, "run.max_steps=10")
    train("a", *same)
    train("b", *same, "run.warm_up_steps=0")
    train("c", *same, "run.seed=12")
    assert metrics_losses(tmp_path / "a") == metrics_losses(tmp_path / "b")
    assert metrics_losses(tmp_path / "a") != metrics_losses(tmp_path / "c")


def test_checkpoint_gives_the_same_accuracy_everywhere_without_h5py(
    train, tmp_path, synthetic_data, monkeypatch, capsys
):
    for name in [name for name in sys.modules if name.startswith("mlperf_bert.prepare")]:
        monkeypatch.delitem(sys.modules, name)  # so that who imports them imports HDF5 too
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert train("first", "optim.learning_rate=1e-2") == TARGET_MISSED
    accuracy = metrics_records(tmp_path / "first")[-1]["mlm_accuracy"]
    checkpoints = str(tmp_path / "first" / "run_0" / "checkpoints")
    frozen = ("run.max_steps=1", "optim.learning_rate=0.0", "run.seed=99")
    assert train("second", *frozen, extra=("--init-checkpoint", checkpoints)) == TARGET_MISSED
    for name, weights in (("first", "random"), ("second", "checkpoint")):
        (record,) = mlperf_records(tmp_path / name / "result_0.txt", "initial_weights")
        assert record["value"] == weights
    assert metrics_records(tmp_path / "second")[-1]["mlm_accuracy"] == accuracy
    capsys.readouterr()
    options = ["--checkpoint", checkpoints, "--data", str(synthetic_data), "--json"]
    assert main(["evaluate", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mlm_accuracy"], result["schema_version"]) == (accuracy, 2)


def test_divergence_aborts_the_run(train, tmp_path, capsys):
    assert train("run", "optim.learning_rate=1e38", "clip.policy=none") == TARGET_MISSED
    assert "lower optim.learning_rate" in capsys.readouterr().out
    assert '"aborted"' in (tmp_path / "run" / "result_0.txt").read_text().splitlines()[-1]
    last = metrics_records(tmp_path / "run")[-1]
    assert last["step"] < 20
    assert last["grad_norm"] is None  # JSON has no word for what it was


def test_time_spent_in_evaluations_is_no_training_time(train, tmp_path, monkeypatch):
    """By a clock on which each evaluation takes an hour."""
    now, evaluate, hours = time.perf_counter, Evaluator.__call__, []

    def takes_an_hour(self, *arguments):
        hours.append(1)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Evaluator, "__call__", takes_an_hour)
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 3600 * len(hours))
    assert train("run", "run.log_interval_steps=10") == TARGET_MISSED
    assert len(hours) == 2
    slowest_per_s = 160 / 600  # a tenth of an hour for the samples between two evaluations
    for record in metrics_records(tmp_path / "run"):
        assert record["samples_per_s"] > slowest_per_s
        assert 0 < record["step_ms"] < 1e3 * 600 / 10
    stats = mlperf_records(tmp_path / "run" / "result_0.txt", "tracked_stats")
    assert len(stats) == 2
    assert all(each["value"]["throughput"] > slowest_per_s for each in stats)


def test_the_time_limit_of_a_hang_is_that_of_a_batch_of_an_evaluation(train, monkeypatch):
    at, activities = Whereabouts.at, []

    def record(self, doing, number=None):
        activities.append((doing, number))
        at(self, doing, number)

    monkeypatch.setattr(Whereabouts, "at", record)
    assert train("run", "run.max_steps=10") == TARGET_MISSED
    assert activities.count(("evaluation", 160)) >= 3  # at its start and around each batch


def test_writing_the_last_checkpoint_is_no_training_time(train, tmp_path, monkeypatch):
    now, finish, hours = time.perf_counter, CheckpointWriter.finish, []

    def take_an_hour(self):
        hours.append(1)
        finish(self)

    monkeypatch.setattr(CheckpointWriter, "finish", take_an_hour)
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 3600 * len(hours))
    assert train("run", "run.max_steps=1") == TARGET_MISSED
    outcome = json.loads((tmp_path / "run/run_0/outcome.json").read_text())
    assert hours and outcome["seconds"] < 3600


def test_a_run_that_has_recovered_goes_on(train, tmp_path, monkeypatch):
    losses = []

    def spoilt(*arguments):
        losses.append(pretraining_loss(*arguments))
        return losses[-1] * (math.nan if len(losses) in SPOILT else 1.0)

    monkeypatch.setattr(eager, "pretraining_loss", spoilt)
    steps = ("run.max_steps=40", "schedule.decay_steps=40", "run.warm_up_steps=0")
    settings = ("run.log_interval_steps=20", "eval.interval_samples=100000")
    assert train("run", *steps, *settings) == TARGET_MISSED
    assert len(SPOILT) > MAX_SKIPPED_IN_A_ROW
    records = metrics_records(tmp_path / "run")
    assert [record["step"] for record in records] == [20, 40]
    assert [record["skipped_steps"] for record in records] == [len(SPOILT), 0]


def test_a_run_without_a_target_has_succeeded_at_its_last_step(train, tmp_path, capsys):
    settings = ("eval.target_accuracy=none", "mlperf.enforce_rules=true")
    assert train("run", *settings) == 0
    run = tmp_path / "run" / "run_0"
    assert "no target accuracy. The context-free baseline reaches 0." in (
        said := capsys.readouterr().out
    )
    assert re.search(
        r"^20 steps, 320 samples, .*; accuracy 0\.\d{4}, 0\.\d+ x the context", said, re.M
    )
    log = tmp_path / "run" / "result_0.txt"  # claims nothing
    assert '"status": "aborted"' in log.read_text().splitlines()[-1]
    assert mlperf_records(log, "quality_target")[0]["value"] == "none"
    assert main(["report", "page", "--out", str(tmp_path / "page.html"), str(run)]) == 0
    assert "run_0: finished, no target" in capsys.readouterr().out
    assert 'class="level"' not in (tmp_path / "page.html").read_text()
    assert main(["watch", "--once", str(run)]) == 0
    assert "ended: finished, no target" in capsys.readouterr().out
    spoiled = ("optim.learning_rate=1e38", "clip.policy=none")
    assert train("spoiled", *settings, *spoiled) == TARGET_MISSED


def test_a_target_that_a_guess_reaches_is_refused(train, capsys):
    assert train("run", "mlperf.enforce_rules=true", "eval.target_accuracy=0.2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "context-free baseline" in line


def test_room_for_more_masks_than_any_example_has_is_not_needed(
    train, tiny_config, synthetic_data, tmp_path, capsys
):
    wide = {"max_seq_length": 32, "max_predictions": 76, "dupe_factor": 2, "with_baseline": True}
    for name in ("train", "eval"):  # as they are, but for the default of --max-predictions
        texts, words = [synthetic_data / f"{name}.txt"], synthetic_data / "words.txt"
        prepare_small(texts, words, tmp_path / "data" / name, **wide)
    assert train("before", "run.max_steps=3") == TARGET_MISSED
    places = (tiny_config, tmp_path / "data", tmp_path / "run", "run.max_steps=3")
    assert run_train(*places) == TARGET_MISSED
    assert metrics_losses(tmp_path / "run") == metrics_losses(tmp_path / "before")
    assert run_train(*places, "data.max_predictions=4") == 2
    assert "data.max_predictions" in capsys.readouterr().err


def test_blocks_that_differ_between_nodes_are_refused(train, monkeypatch, capsys):
    for of_nodes, status in ((["one", "", "other"], 2), (["one", "", "one"], TARGET_MISSED)):

        def gathered(_, value, digests=of_nodes):
            return digests if isinstance(value, str) else [value, value]

        monkeypatch.setattr("mlperf_bert.train.from_all_ranks", gathered)
        assert train(f"run {status}", "run.max_steps=1") == status
        error = capsys.readouterr().err
        refused = status == 2
        assert ("the data is not the same on all nodes" in error, error.count("\n")) == (
            refused,
            refused,
        )


def test_out_of_memory_is_one_line_that_names_the_part(monkeypatch, capsys):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("bert_tools.bench.cli.run", full)
    assert main(["bench", "train"]) == MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench train: out of memory" in line and "9 GiB" in line

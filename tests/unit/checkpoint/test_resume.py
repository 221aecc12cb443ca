"""When a run is saved; what `--resume` goes on from and refuses: losses show nothing of it."""

import gc
import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint import writer
from mlperf_bert.checkpoint.resume import allowed_differences
from mlperf_bert.config.files import load_config
from mlperf_bert.run.metrics import MetricsFile
from resume_cases import (
    DROPOUT,
    MISSED,
    random_streams,
    run_train,
    weights,
    with_other_train,
)
from support import (
    contents,
    metrics_losses,
    metrics_records,
    mlperf_records,
    refusal,
    sets_of,
    snapshot,
)
from verify_cases import flip_words

SAME = (*DROPOUT, "checkpoint.keep_last=9", "eval.interval_samples=100000")


@pytest.fixture(scope="module")
def whole(tiny_config, synthetic_data, tmp_path_factory):
    """The run directory of an uninterrupted run of 20 steps, with checkpoints of 8 and 16."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    settings = (*SAME, "checkpoint.interval_steps=8")
    assert run_train(tiny_config, synthetic_data, directory, *settings) == MISSED
    return directory


@pytest.fixture
def resumed(tiny_config, synthetic_data, tmp_path):
    """Train into `tmp_path`/run again, as the whole run did but for what is given."""

    def run(*settings, resume="auto", data=synthetic_data):
        return run_train(tiny_config, data, tmp_path / "run", *SAME, *settings, resume=resume)

    return run


@pytest.fixture
def killed(whole, tmp_path):
    """A copy of the whole run as if it had been killed after step 18."""
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    own = directory / "run_0"
    (own / "outcome.json").unlink()
    shutil.rmtree(own / "checkpoints/step_00000020")
    (own / "checkpoints/LATEST").write_text("step_00000016\n")
    lines = (own / "metrics.jsonl").read_text().splitlines(keepends=True)
    (own / "metrics.jsonl").write_text("".join(lines[:18]) + lines[18][:10])
    return directory


NEWEST = "run_0/checkpoints/step_00000016"


def flip(run):
    path = run / NEWEST / "optimizer/rank_00000.safetensors"
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


def lose_manifest(run):
    (run / NEWEST / "manifest.json").unlink()


def lose_checkpoints(run):
    shutil.rmtree(run / "run_0/checkpoints")


@pytest.mark.parametrize(
    ("harm", "settings", "step", "said"),
    [
        (lambda _: None, (), 16, "resumed from step_00000016"),
        (flip, (), 8, "skipped a damaged checkpoint"),
        (lose_manifest, (), 8, "skipped a damaged checkpoint"),
        (lose_checkpoints, ("run.seed=random",), None, "seed 11"),  # it begins anew with that one
    ],
    ids=["killed", "flipped", "no manifest", "no checkpoint"],
)
def test_it_goes_on_bit_for_bit(resumed, killed, whole, harm, settings, step, said, capsys):
    harm(killed)
    assert resumed(*settings) == MISSED
    assert said in capsys.readouterr().out
    assert metrics_losses(killed) == metrics_losses(whole)
    assert weights(killed) == weights(whole)
    assert random_streams(killed) == random_streams(whole)
    (record,) = mlperf_records(killed / "result_0.txt", "resumed")
    assert record["value"] is True
    if step is not None:
        assert (record["metadata"]["step"], record["metadata"]["samples"]) == (step, 16 * step)
    old = killed / "run_0/interrupted/result_0_0.txt"
    assert mlperf_records(old, "resumed")[0]["value"] is False
    outcome = json.loads((killed / "run_0/outcome.json").read_text())
    assert (outcome["status"], outcome["steps"], outcome["stopped_by"]) == ("aborted", 20, None)


def test_memory_does_not_grow_with_what_came_before(resumed, killed):
    young = killed.with_name("young")
    shutil.copytree(killed, young)
    peaks = []
    for times in (0, 40_000):  # beside what training takes anyway
        shutil.rmtree(killed)
        shutil.copytree(young, killed)
        _grow_older(killed, times)
        gc.collect()
        gc.freeze()  # what other tests left behind would delay the collection of this run's garbage
        tracemalloc.start()
        try:
            assert resumed() == MISSED
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18


def _grow_older(directory, times):
    """As if so many more lines had been recorded, and attempts interrupted."""
    own = directory / "run_0"
    for path in (own / "metrics.jsonl", directory / "result_0.txt", own / "stdout.log"):
        first, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(times * (first + b"\n") + first + b"\n" + rest)
    (own / "interrupted").mkdir()
    for number in range(times // 80):
        (own / f"interrupted/result_0_{number}.txt").write_bytes(b"")
        (own / f"checkpoints/damaged_step_{number:08d}").mkdir()


def test_an_end_that_could_not_be_saved_is_trained_again(
    resumed, whole, killed, monkeypatch, capsys
):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "complete", full_disk)
        assert resumed() == 2
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert "to resume: " in said.out
    assert not (killed / "run_0/outcome.json").exists()
    assert resumed() == MISSED
    assert weights(killed) == weights(whole)
    assert outcome_of(killed)["steps"] == 20


def outcome_of(directory):
    """The outcome but for its duration."""
    outcome = json.loads((directory / "run_0/outcome.json").read_bytes())
    outcome.pop("seconds")
    return outcome


def test_a_run_that_has_ended_is_left_as_it_is(resumed, whole, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    before = snapshot(directory)
    assert resumed() == MISSED
    assert "has already ended, after 20 steps" in capsys.readouterr().out
    assert snapshot(directory) == before
    (directory / "run_0/outcome.json").unlink()  # killed between its last checkpoint and its end
    before = snapshot(directory)
    assert resumed() == MISSED
    assert "has already ended, after 20 steps" in capsys.readouterr().out
    assert outcome_of(directory) == outcome_of(whole)
    (directory / "run_0/outcome.json").unlink()
    assert snapshot(directory) == before


@pytest.mark.parametrize("another", [False, True], ids=["renamed", "another run in its place"])
@pytest.mark.parametrize("interval", ["1", "never"])
def test_a_directory_renamed_while_its_run_goes_on(
    interval, another, resumed, whole, killed, monkeypatch, capsys
):
    """It is said at the next record; nothing is made anew, and nothing of another run touched."""
    elsewhere = killed.with_name("elsewhere")
    write = MetricsFile.write

    def renaming(file, record):
        write(file, record)
        if record["step"] == 18:
            killed.rename(elsewhere)
            if another:
                shutil.copytree(whole, killed)
                (killed / "run_0/checkpoints/.step_00000020.theirs.partial").mkdir()

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", renaming)
        assert resumed(f"checkpoint.interval_steps={interval}") == 2
    said = capsys.readouterr()
    assert said.out.count("was renamed or removed during the run; no checkpoint is saved") == 1
    assert said.err.count("\n") == 1 and "restore the directory's name" in said.err
    if another:
        (killed / "run_0/checkpoints/.step_00000020.theirs.partial").rmdir()
        assert contents(killed) == contents(whole)
        shutil.rmtree(killed)
    assert not killed.exists()
    elsewhere.rename(killed)
    assert resumed() == MISSED
    assert weights(killed) == weights(whole)


def test_going_on_needs_the_directory_of_the_run(tiny_config, synthetic_data, capsys):
    command = ["train", "--config", tiny_config, "--data", synthetic_data]
    assert "--run-dir: is missing" in refusal(capsys, *command, "--resume", "auto")


def test_a_first_start_is_said(tiny_config, synthetic_data, tmp_path, capsys):
    places = ("--config", tiny_config, "--data", synthetic_data, "--run-dir", tmp_path / "run")
    command = [*map(str, ("train", *places, "--resume", "auto")), *sets_of("run.max_steps=1")]
    line = f"no earlier run in {tmp_path / 'run'}; starting a new one\n"
    assert main(command) == MISSED and line in capsys.readouterr().out
    main(command)
    assert line not in capsys.readouterr().out


def test_latest_is_the_last_checkpoint_of_a_run_that_was_killed_after_it(resumed, whole, tmp_path):
    """Killed before LATEST was written, so another command would take an older checkpoint."""
    run = shutil.copytree(whole, tmp_path / "run") / "run_0"
    (run / "outcome.json").unlink()
    (run / "checkpoints/LATEST").write_text("step_00000016\n")
    assert resumed() == MISSED
    assert (run / "checkpoints/LATEST").read_text() == "step_00000020\n"
    assert (run / "outcome.json").exists()


def test_what_ended_before_its_clock_began_is_no_part_of_the_run(resumed, killed):
    lose_checkpoints(killed)
    log = (killed / "result_0.txt").read_text().splitlines(keepends=True)
    begun = next(number for number, line in enumerate(log) if '"run_start"' in line)
    (killed / "result_0.txt").write_text("".join(log[:begun]))
    assert resumed() == MISSED
    assert mlperf_records(killed / "result_0.txt", "resumed")[0]["value"] is False


def test_twice_interrupted(resumed, killed, whole):
    assert resumed("run.max_steps=18") == MISSED
    (killed / "run_0/outcome.json").unlink()
    shutil.rmtree(killed / "run_0/checkpoints/step_00000018")
    assert resumed() == MISSED
    assert metrics_losses(killed) == metrics_losses(whole)
    names = {path.name for path in (killed / "run_0/interrupted").glob("result_*")}
    assert names == {"result_0_0.txt", "result_0_1.txt"}


def test_auto_without_a_run_is_a_new_one(resumed, tmp_path, whole):
    assert resumed("run.max_steps=4") == MISSED
    assert metrics_losses(tmp_path / "run") == metrics_losses(whole)[:4]
    assert mlperf_records(tmp_path / "run/result_0.txt", "resumed")[0]["value"] is False


def test_another_run_goes_on_from_a_checkpoint(resumed, tmp_path, whole, capsys):
    checkpoint = whole / NEWEST
    assert resumed(resume=checkpoint) == MISSED
    assert metrics_losses(tmp_path / "run") == metrics_losses(whole)[16:]
    assert weights(tmp_path / "run") == weights(whole)
    shutil.rmtree(tmp_path / "run")
    capsys.readouterr()
    assert resumed("optim.learning_rate=1e-4", resume=checkpoint) == MISSED
    assert "optim.learning_rate was 0.003 and is 0.0001" in capsys.readouterr().out
    assert metrics_losses(tmp_path / "run") != metrics_losses(whole)[16:]


def test_a_run_without_a_checkpoint_of_its_own_goes_on_where_it_started(
    resumed, tmp_path, whole, capsys
):
    checkpoint, own = whole / NEWEST, tmp_path / "run/run_0"
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved / checkpoint.name)
    for _ in range(2):  # killed twice before it saved anything
        resume = "auto" if own.exists() else moved / checkpoint.name
        assert resumed(resume=resume) == MISSED
        assert metrics_losses(tmp_path / "run") == metrics_losses(whole)[16:]
        assert weights(tmp_path / "run") == weights(whole)
        shutil.rmtree(own / "checkpoints")
        (own / "outcome.json").unlink()
    shutil.rmtree(moved)
    before = snapshot(tmp_path / "run")
    capsys.readouterr()
    assert resumed() == 2
    assert str(moved / checkpoint.name) in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before


def test_the_moments_of_another_optimizer_are_refused(resumed, whole, capsys):
    assert resumed("optim.name=muon", resume=whole / NEWEST) == 2
    assert "optim.name: is 'muon', but the checkpoint has 'adamw'" in capsys.readouterr().err


def test_other_kernels_are_told(resumed, killed, whole, tmp_path, capsys):
    """What was used is compared, not the settings: "auto" and its policy by name are the same."""
    told = "model.attention was 'grouped' when this checkpoint was written and is 'reference' now"
    checkpoint = whole / NEWEST
    state = json.loads((checkpoint / "state.json").read_text())
    assert (state["attention"], state["kernels"]) == ("grouped", "reference")
    kept = killed.rename(tmp_path / "kept")
    for resume in ("auto", checkpoint):
        for attention, is_told in (("grouped", False), ("reference", True)):
            if resume == "auto":
                shutil.copytree(kept, killed)
            assert resumed(f"model.attention={attention}", resume=resume) == MISSED
            assert (told in capsys.readouterr().out) == is_told
            shutil.rmtree(killed)


def test_what_would_change_the_run_is_refused(resumed, killed, synthetic_data, tmp_path, capsys):
    before = snapshot(killed)
    for setting, words in (
        ("optim.learning_rate=1e-4", "optim.learning_rate: is 0.0001"),
        ("model.hidden_dropout=0.2", "model.hidden_dropout: is 0.2"),
        ("schedule.decay_steps=30", "schedule.decay_steps: is 30"),
        ("model.num_layers=3", "model.num_layers: is 3"),
        ("data.sampler=quantile", "data.sampler: is 'quantile'"),
        ("parallel.local_batch_size=8", "global batch of 8, but the checkpoint has 16"),
        ("run.max_steps=16", "run.max_steps: is 16, but the checkpoint is from step 16"),
        ("run.seed=12", "run.seed: is 12, but the run to resume has 11"),
    ):
        assert resumed(setting) == 2
        assert words in capsys.readouterr().err
        assert snapshot(killed) == before
    assert resumed(data=with_other_train(synthetic_data, tmp_path / "data")) == 2
    assert "was not trained on the data in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "ranks", "change", "said"),
    [
        ("bucket_before_allreduce", 2, ("ddp", "flat"), ["parallel.data_parallel"]),
        ("bucket_before_allreduce", 2, ("zero1", "ddp"), ["parallel.data_parallel"]),
        ("bucket_before_allreduce", 2, ("ddp", "ddp"), ["model.kernels"]),
        ("bucket_before_allreduce", 2, ("flat", "flat"), []),
        ("bucket_before_allreduce", 2, ("flat", "zero1"), []),
        ("bucket_before_allreduce", 1, ("ddp", "flat"), []),
        ("after_allreduce", 2, ("ddp", "flat"), []),
        ("after_allreduce", 2, ("ddp", "ddp"), []),
    ],
)
def test_only_buckets_tie_a_run_to_ddp_and_its_kernels(
    policy, ranks, change, said, tiny_config, monkeypatch
):
    """DDP forms its buckets in another way, and other buckets are clipped in another way."""
    common = (f"clip.policy={policy}", f"parallel.ranks_per_node={ranks}")
    kernels = ("reference", "auto") if change[0] == change[1] else ("auto", "auto")
    old, new = (
        load_config(
            tiny_config, [*common, f"parallel.data_parallel={way}", f"model.kernels={each}"]
        )
        for way, each in zip(change, kernels, strict=True)
    )
    monkeypatch.setattr("mlperf_bert.checkpoint.resume.read_config", lambda _: old)
    state = SimpleNamespace(step=4, seed=new.run.seed)
    found = allowed_differences(Path("checkpoint"), state, new, None)
    assert [line.split(" was ")[0] for line in found] == said


def test_what_changes_no_number_is_free(resumed, killed, whole):
    free = ("parallel.local_batch_size=8", "parallel.grad_accum_steps=2")
    free += ("run.log_interval_steps=2", "data.balance=presort_local", "run.slurm_minutes=9")
    assert resumed(*free) == MISSED
    assert metrics_losses(killed)[:16] == metrics_losses(whole)[:16]
    expected = np.reshape(metrics_losses(whole)[16:], (-1, 2)).mean(axis=1)
    assert metrics_losses(killed)[16:] == pytest.approx(expected, rel=1e-5)


def test_a_large_set_that_has_changed_is_refused(
    resumed, killed, whole, synthetic_data, tmp_path, monkeypatch, capsys
):
    def blocks_sha256(checkpoint):
        return json.loads((checkpoint / "state.json").read_text())["blocks_sha256"]

    monkeypatch.setattr("mlperf_bert.data.set_checks.SMALL_BYTES", 0)
    assert blocks_sha256(killed / NEWEST) is None  # it was small
    assert resumed("run.max_steps=18") == MISSED
    checkpoint = killed.rename(tmp_path / "before") / "run_0/checkpoints/step_00000018"
    assert isinstance(blocks_sha256(checkpoint), str)
    for part in ("train", "eval"):
        data = tmp_path / part
        shutil.copytree(synthetic_data, data)
        flip_words(data / part / f"shards/{part}.hdf5")
        capsys.readouterr()
        assert resumed(data=data, resume=checkpoint) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{data}: the data has changed since the run started" in line
        assert metrics_losses(killed) == []
        assert list((killed / "run_0/checkpoints").iterdir()) == []
        shutil.rmtree(killed)
    assert resumed(resume=checkpoint) == MISSED
    assert metrics_losses(killed) == metrics_losses(whole)[18:]


@pytest.mark.parametrize(
    "settings",
    [
        ("data.sampler=quantile", "optim.name=lamb", "model.precision=bf16"),
        ("run.step_mode=captured", "data.sampler=quantile", "optim.name=muon"),
        (
            "model.precision=bf16_autocast",
            *("parallel.grad_accum_steps=2", "clip.policy=bucket_before_allreduce"),
        ),
    ],
    ids=lambda settings: settings[0],
)
def test_every_way_of_training_goes_on_bit_for_bit(tiny_config, synthetic_data, tmp_path, settings):
    same = (*DROPOUT, "checkpoint.interval_steps=2", "checkpoint.keep_last=99", *settings)
    same = (*same, "run.max_steps=8", "eval.interval_samples=100000")
    run_train(tiny_config, synthetic_data, tmp_path / "whole", *same)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    own = tmp_path / "killed/run_0"
    (own / "outcome.json").unlink()
    shutil.rmtree(max((own / "checkpoints").glob("step_*")))  # the end
    last = max((own / "checkpoints").glob("step_*"))  # 6, where the disk was not too busy
    run_train(tiny_config, synthetic_data, tmp_path / "killed", *same, resume="auto")
    assert len(metrics_losses(tmp_path / "whole")) == 8
    (record,) = mlperf_records(tmp_path / "killed/result_0.txt", "resumed")
    assert last.name == f"step_{record['metadata']['step']:08d}"
    assert metrics_losses(tmp_path / "killed") == metrics_losses(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_a_checkpoint_ends_the_interval_of_the_metrics(tiny_config, synthetic_data, tmp_path):
    settings = ("checkpoint.interval_steps=3", "checkpoint.keep_last=9", "run.max_steps=7")
    settings = (*SAME, *settings, "run.log_interval_steps=1000")
    run_train(tiny_config, synthetic_data, tmp_path / "whole", *settings)
    checkpoints = (tmp_path / "whole/run_0/checkpoints").glob("step_*")
    assert sorted(int(path.name[5:]) for path in checkpoints) == [3, 6, 7]
    assert [record["step"] for record in metrics_records(tmp_path / "whole")] == [3, 6, 7]


def test_never_is_never(tiny_config, synthetic_data, tmp_path, capsys):
    settings = ("checkpoint.interval_steps=never", "run.max_steps=4")
    run_train(tiny_config, synthetic_data, tmp_path / "run", *settings)
    assert list((tmp_path / "run/run_0/checkpoints").iterdir()) == []
    assert "saved no checkpoint" in capsys.readouterr().out

"""Phases of training: one run begins with the weights, moments and data order of another's end."""

import json
import shutil

import pytest

from forked_ranks import run_ranks
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import INITIALIZED_FROM, MODEL, read_manifest, resolve
from mlperf_bert.checkpoint.tensors import read_tensors
from resume_cases import DROPOUT, MISSED, MODERN, run_train, with_other_train
from support import (
    metrics_losses,
    mlperf_records,
    prepare_small,
    refusal,
    sets_of,
    write_synthetic_text,
)

HALF = 4  # steps of each phase, of 16 samples
FLAT = (  # a rate that does not depend on where a step is counted from
    *("schedule.form=wsd", "schedule.warmup_steps=0", "eval.interval_samples=100000"),
    "checkpoint.keep_last=99",
)
SMALLEST = ("model.hidden_size=16", "model.intermediate_size=16")  # FP8 is slow on CPUs
TRAINING = "run.init_state=training"


def checkpoints(run):
    return run / "run_0" / "checkpoints"


def begin(checkpoint):
    return ("--init-checkpoint", str(checkpoint))


def state_of(run):
    """The last checkpoint's weights, moments, scales and count of updates, as lists.

    `fp8.step` is left out: it is the number of the step, which a new phase counts anew.
    """
    found = resolve(checkpoints(run))
    files = [found / MODEL, *sorted((found / "optimizer").iterdir()), found / "fp8.safetensors"]
    return {
        f"{path.name} {name}": tensor.tolist()
        for path in files
        if path.exists()
        for name, tensor in read_tensors(path).items()
        if name != "fp8.step"
    }


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=adamw", "data.sampler=quantile"),
        ("optim.name=muon", "data.sampler=quantile", "data.balance=exchange_global"),
        ("optim.name=adamw", "model.precision=fp8", *SMALLEST),
        pytest.param(("optim.name=lamb", "model.precision=bf16"), marks=pytest.mark.longest),
        pytest.param(("optim.name=lamb", "run.step_mode=captured"), marks=pytest.mark.longest),
    ],
    ids=" ".join,
)
def test_a_phase_that_changes_nothing_is_the_run_that_never_stopped(
    tiny_config, synthetic_data, tmp_path, settings
):
    """Bit for bit: losses, weights, moments, FP8 units and the count of updates."""

    def train(name, *more, extra=()):
        run = tmp_path / name
        assert (
            run_train(tiny_config, synthetic_data, run, *FLAT, *settings, *more, extra=extra)
            == MISSED
        )
        return run

    half, go_on = f"run.max_steps={HALF}", f"data.skip_samples={16 * HALF}"
    whole = train("whole", f"run.max_steps={2 * HALF}")
    first = train("first", half)
    second = train("second", half, go_on, TRAINING, extra=begin(checkpoints(first)))
    losses = metrics_losses(first) + metrics_losses(second)
    if "run.step_mode=captured" in settings:  # paddings are planned anew, so sums round otherwise
        assert losses == pytest.approx(metrics_losses(whole), rel=1e-5)
    else:
        assert losses == metrics_losses(whole)
        assert state_of(second) == state_of(whole)
    cold = train("cold", half, go_on, extra=begin(checkpoints(first)))
    assert metrics_losses(cold)[0] == pytest.approx(metrics_losses(second)[0], abs=1e-3)
    assert metrics_losses(cold)[1:] != metrics_losses(second)[1:]  # by weights alone
    assert state_of(cold)["rank_00000.safetensors updates"] == HALF


@pytest.fixture(scope="module")
def short(synthetic_data, tmp_path_factory):
    """The first phase's data: shorter examples of the same vocabulary."""
    directory = tmp_path_factory.mktemp("short")
    for name, documents, seed in (("train", 100, 5), ("eval", 30, 6)):
        write_synthetic_text(directory / f"{name}.txt", documents, seed)
        sizes = {"max_seq_length": 16, "max_predictions": 3, "dupe_factor": 2}
        texts, words = [directory / f"{name}.txt"], synthetic_data / "words.txt"
        prepare_small(texts, words, directory / name, with_baseline=True, **sizes)
    return directory


# ModernBERT's later phases have longer texts and another base.
KINDS = {
    "lamb": ((), ()),
    "muon": (MODERN, ("model.max_position_embeddings=16", "model.rope_base_global=10000")),
}
MUON = pytest.param("muon", marks=pytest.mark.longest)


@pytest.fixture(scope="module", params=["lamb", MUON])
def kind(request):
    """An optimizer, with it a model, and how a phase trains that begins with a first one's end."""
    return request.param, (
        *(f"optim.name={request.param}", "run.max_steps=8", "schedule.decay_steps=8", *DROPOUT),
        *("schedule.form=wsd", "schedule.warmup_steps=2", "schedule.cooldown_steps=4"),
        *("checkpoint.interval_steps=1", "checkpoint.keep_last=99", TRAINING),
        *KINDS[request.param][0],
    )


@pytest.fixture(scope="module")
def first(kind, tiny_config, short, tmp_path_factory):
    """A first phase on two ranks that share the optimizer's state: short texts, small batches."""
    name, _ = kind
    settings = (
        *("parallel.local_batch_size=4", "data.max_seq_length=16", "data.max_predictions=3"),
        *("schedule.form=wsd", "run.max_steps=6", f"optim.name={name}", *DROPOUT),
        *(word for words in KINDS[name] for word in words),
        *("parallel.ranks_per_node=2", "parallel.data_parallel=zero1"),
    )
    run = tmp_path_factory.mktemp(name) / "run"
    places = ("--config", tiny_config, "--data", short, "--run-dir", run)
    statuses, printed = run_ranks("mlperf_bert", ["train", *places, *sets_of(*settings)], 2)
    assert statuses == [MISSED, MISSED], printed
    return run


@pytest.fixture
def train_on(kind, first, tiny_config, synthetic_data):
    """Train the second phase, on one rank, with longer texts and larger batches."""

    def train(run, resume=None, begun=first):
        extra = begin(checkpoints(begun))
        places = (tiny_config, synthetic_data, run)
        assert run_train(*places, *kind[1], resume=resume, extra=extra) == MISSED
        return run

    return train


def test_a_longer_second_phase_goes_on_bit_for_bit(first, train_on, tmp_path, capsys):
    """Killed at its steps, it goes on."""
    whole = train_on(tmp_path / "whole")
    assert f"started from the training state of {checkpoints(first)}" in capsys.readouterr().out
    assert state_of(whole)["rank_00000.safetensors updates"] == 6 + 8
    log = whole / "result_0.txt"
    assert mlperf_records(log, "resumed")[0]["value"] is False
    assert mlperf_records(log, "initial_weights")[0]["value"] == "checkpoint"
    before = read_manifest(resolve(checkpoints(first)))
    origin = read_manifest(resolve(checkpoints(whole))).origin[INITIALIZED_FROM]
    assert origin == f"training state after 48 samples, {MODEL} {before.files[MODEL].sha256}"
    kept = sorted(checkpoints(whole).glob("step_*"))[:-1]
    assert kept
    for last in (None, kept[0], kept[-1]):  # None: killed before its first checkpoint
        killed = tmp_path / f"killed_{last and last.name}"
        shutil.copytree(whole, killed)
        (killed / "run_0/outcome.json").unlink()
        (checkpoints(killed) / "LATEST").unlink()
        for path in checkpoints(killed).glob("step_*"):
            if last is None or path.name > last.name:
                shutil.rmtree(path)
        train_on(killed, "auto")
        assert metrics_losses(killed) == metrics_losses(whole)
        assert state_of(killed) == state_of(whole)
        assert read_manifest(resolve(checkpoints(killed))).origin == {INITIALIZED_FROM: origin}
    third = train_on(tmp_path / "third", begun=whole)
    told = read_manifest(resolve(checkpoints(third))).origin[INITIALIZED_FROM]
    assert told.startswith("training state after 128 samples, ") and told.endswith(origin)


def test_a_phase_that_cannot_begin_is_refused(tiny_config, synthetic_data, tmp_path, capsys):
    run = tmp_path / "first"
    quantile = ("run.max_steps=1", "data.sampler=quantile")
    assert run_train(tiny_config, synthetic_data, run, *quantile) == MISSED
    saved, converted = checkpoints(run), tmp_path / "converted"
    shutil.copytree(resolve(saved), converted)
    manifest = json.loads((converted / "manifest.json").read_text())
    files = {name: each for name, each in manifest["files"].items() if "optimizer/" not in name}
    (converted / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    skip = ("data.skip_samples=16", "data.sampler=quantile")
    larger = "parallel.local_batch_size=32"
    other = with_other_train(synthetic_data, tmp_path / "other")
    for given, settings, said in (
        (None, (), "run.init_state: is 'training', but run.init_checkpoint is not set; pass"),
        (converted, (), f"'training', but {converted} has weights without a training state; pass"),
        (saved, ("optim.name=lamb",), "optim.name: is 'lamb', but the run in"),
        (saved, ("model.objective=mlm",), "model.objective: is 'mlm', but the run in"),
        (saved, ("model.hidden_size=16",), "model.hidden_size: is 16, but the weights in"),
        (saved, (*skip, "run.seed=5"), "run.seed: is 5, but the run in"),
        (saved, (*skip, "run.seed=random"), "has 11; use 11, because data.skip_samples requires"),
        (saved, (*skip, "data.sampler=uniform"), "data.sampler: is 'uniform', but the run in"),
        (saved, (*skip, larger), "divisor of the global batch up to 64): is 32, but the run"),
        (saved, (*skip, "other data"), "data.skip_samples: is 16, but"),
        (saved, ("mlperf.division=closed", "mlperf.enforce_rules=true"), "closed division"),
    ):
        data = other if "other data" in settings else synthetic_data
        words = [] if given is None else ["--init-checkpoint", given]
        sets = (TRAINING, *(each for each in settings if each != "other data"))
        words += sets_of(*sets)
        places = ("--data", data, "--run-dir", tmp_path / "run")
        line = refusal(capsys, "train", "--config", tiny_config, *places, *words)
        assert said in line and not (tmp_path / "run").exists()
        asked = ("config", "validate", tiny_config, "--data", data)
        assert refusal(capsys, *asked, *words) == line
    # Weights alone are fine in every form, and so is a state that nobody asks for.
    for given, settings in ((saved, ("optim.name=lamb",)), (converted, ()), (saved, skip)):
        words = sets_of(*settings)
        asked = ("config", "validate", tiny_config, "--data", synthetic_data)
        assert main([*map(str, (*asked, "--init-checkpoint", given)), *words]) == 0

"""The measurements on a GPU: all forms run, and the other side without padding equals itself."""

import argparse
import gzip
import json

import pytest
import torch

from bert_tools.bench import cli
from bert_tools.bench.baseline import BASELINES, make_baseline, prepare_baselines
from bert_tools.bench.transformers import (
    LARGEST_ROUNDED_DIFFERENCE,
    make_data,
    make_ours,
    mixed_and_sorted,
)
from mlperf_bert.config.files import load_config
from mlperf_bert.run.console import ProgressLines

DEVICE = torch.device("cuda")
SIZE = (
    *("model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.vocab_size=512"),
    *("model.intermediate_size=512", "model.max_position_embeddings=128"),
    *("data.max_seq_length=128", "model.precision=bf16", "parallel.local_batch_size=8"),
)
BRIEF = ("--steps", "5", "--seconds", "0.2")


def measured(capsys, *arguments, settings=()):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = [word for each in (*SIZE, *settings, "run.device=cuda") for word in ("--set", each)]
    assert cli.run(parser.parse_args([*arguments, *options, "--json"])) == 0
    return json.loads(capsys.readouterr().out)


def test_train(tmp_path, capsys):
    trace = tmp_path / "step.json.gz"
    profile = ("--profile", "--out", str(trace))
    for step_mode, words in (("eager", ()), ("captured", profile)):
        settings = (f"run.step_mode={step_mode}",)
        brief = (*BRIEF, "--peak-seconds", "0.1", *words)
        result = measured(capsys, "train", *brief, settings=settings)
        assert result["device_name"] == torch.cuda.get_device_name(DEVICE)
        memory = torch.cuda.get_device_properties(DEVICE).total_memory
        assert 0 < result["mfu"] < 1 and 0 < result["memory_peak_bytes"] < memory
        assert result["loss"] is not None
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert result["profile"]["unit_of_work"] == "kernel"
    assert not any(row["name"].startswith("aten::") for row in result["profile"]["rows"])


def test_other_side_runs_in_every_form():
    """Compiled too, which takes a minute; without padding with torch's nested tensors."""
    config = load_config(cli.BASE, [*SIZE, "run.seed=1"])
    model = config.model
    ours = make_ours(model, 1, DEVICE)
    data = make_data(config, *mixed_and_sorted(config, 2), DEVICE)
    losses = {}
    contenders, reasons = prepare_baselines(
        lambda: make_baseline(ours, model, DEVICE),
        data,
        model,
        device=DEVICE,
        compiled="whole",
        check=lambda name, loss: losses.update({name: loss.item()}),
        progress=ProgressLines(),
    )
    assert set(reasons) <= {"padding_free"}  # needs a package that may not be installed
    assert list(contenders) == [name for name in BASELINES if name not in reasons]
    assert losses["nested"] == pytest.approx(losses["padded"], abs=LARGEST_ROUNDED_DIFFERENCE)

"""The measurements on a GPU: all forms run, and the other side without padding equals itself."""

import argparse
import json
from typing import Any

import pytest
import torch

from bert_tools.bench import cli
from bert_tools.bench.against import LARGEST_ROUNDED_DIFFERENCE, make_ours
from bert_tools.bench.contenders import make_data
from bert_tools.bench.other_peers import BUILDERS, make_other_peers
from bert_tools.bench.peer import make_peer
from mlperf_bert.config.sections import ModelSection

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: nothing is measured on one here"
)
DEVICE = torch.device("cuda")
SIZE = ("--layers", "2", "--hidden", "128", "--vocab", "512", "--max-length", "128")
MODEL = (*SIZE, "--batch", "8", "--device", "cuda", "--precision", "bf16")
BRIEF = ("--steps", "5", "--seconds", "0.2")


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args([*arguments, "--json"])) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_train(step_mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("train", *MODEL, *BRIEF, "--step-mode", step_mode, "--peak-seconds", "0.1")
    result = measured(capsys, *arguments)
    assert result["device_name"] == torch.cuda.get_device_name(DEVICE)
    assert 0 < result["mfu"] < 1
    assert 0 < result["memory_peak_bytes"] < torch.cuda.get_device_properties(DEVICE).total_memory
    assert result["loss"] is not None


def test_fp8_peak_is_above_that_of_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("no FP8 products")
    peaks = []
    for precision in ("bf16", "fp8"):
        sizes = ("--layers", "1", "--hidden", "2048", "--vocab", "512", "--batch", "16")
        arguments = ("train", *sizes, "--device", "cuda", "--precision", precision, *BRIEF)
        peaks.append(measured(capsys, *arguments, "--peak-seconds", "0.2")["peak_long_tflops"])
    assert peaks[1] > peaks[0]


def test_profile_names_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, "profile", *MODEL, "--step-mode", "captured")
    assert result["unit_of_work"] == "kernel"
    assert "matrix product" in result["kinds"]
    assert not any(row["name"].startswith("aten::") for row in result["rows"])


def test_scale_and_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, "scale", *MODEL, *BRIEF, "--max-batch", "4")
    assert all(row["samples_per_s"] for row in result["rows"])
    result = measured(capsys, "eval", *MODEL, *BRIEF, "--step-mode", "captured", "--samples", "64")
    assert result["evaluation_samples_per_s"] > 0


def test_other_side_runs_in_every_form() -> None:
    """Compiled too, which takes a minute; without padding with torch's nested tensors."""
    model = ModelSection(
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        num_heads=2,
        intermediate_size=512,
        max_position_embeddings=128,
        precision="bf16",
    )
    ours = make_ours(model, 1, DEVICE)
    data = make_data(model, num_batches=2, batch_size=8, seed=1, device=DEVICE)
    losses: list[float] = []
    found = make_other_peers(
        lambda: make_peer(ours, model, DEVICE),
        data,
        model.precision,
        device=DEVICE,
        with_compile=True,
        check=lambda loss: losses.append(loss.item()),
        report=lambda _: None,
    )
    assert found.reasons == {}
    assert list(found.contenders) == list(BUILDERS)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = make_peer(ours, model, DEVICE).eval()(**data.padded[0]).loss.item()
    assert losses == pytest.approx([expected] * 2, abs=LARGEST_ROUNDED_DIFFERENCE)


def test_against(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("against", *SIZE, "--batch", "4", "--precision", "bf16", "--device", "cuda")
    result = measured(capsys, *arguments, "--steps", "4", "--no-compile")
    assert result["ours_step_mode"] == "captured"
    assert result["ratio_padded_flash"] > 0
    assert result["ratio_unpadded_peer"] > 0
    assert "--compile" in result["padded_compiled_reason"]

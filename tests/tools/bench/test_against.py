"""`bench against` on a tiny model: what it reports, and when it refuses to."""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch

from bert_tools.bench import against, cli
from bert_tools.bench.against import (
    LARGEST_LOSS_DIFFERENCE,
    NUM_BATCHES,
    check_same_loss,
    make_ours,
)
from bert_tools.bench.contenders import make_contenders, make_data, run_config
from bert_tools.bench.other_peers import BUILDERS
from bert_tools.bench.peer import make_peer
from bert_tools.bench.training_run import run_of_model
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import IGNORED

CPU = torch.device("cpu")
TINY = ModelSection(
    vocab_size=101,  # no multiple of 8: our model has padded words, the other side none
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_position_embeddings=24,
)
ARGUMENTS = (
    *("against", "--layers", "2", "--hidden", "32", "--heads", "2", "--vocab", "101"),
    *("--max-length", "24", "--batch", "3", "--steps", "5", "--threads", "1"),
)


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The JSON object of one tiny comparison."""
    with redirect_stdout(StringIO()) as printed:
        assert bench(*ARGUMENTS, "--json") == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def test_ratios_are_quotients_of_the_rates(result: dict[str, Any]) -> None:
    for ratio, above, below in (
        ("ratio_padded", "ours", "padded"),
        ("ratio_padded_to_longest", "ours", "padded_to_longest"),
        ("ratio_encoder", "ours_encoder", "padded_encoder"),
    ):
        rates = [result[f"{name}_samples_per_s"] for name in (above, below)]
        assert min(rates) > 0
        assert result[ratio] == pytest.approx(rates[0] / rates[1])
        low, middle, high = result[f"{ratio}_range"]
        assert 0 < low <= middle <= high


def test_result_says_what_was_compared(result: dict[str, Any]) -> None:
    import transformers

    expected = {
        "schema_version": 1,
        "max_length": 24,
        "batch": 3,
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "vocabulary": 101,
        "dropout": 0.1,
        "threads": 1,
        "steps": 5,
        "distinct_batches": NUM_BATCHES,
        "device": "cpu",
        "precision": "fp32",
        "ours_attention": "grouped",
        "ours_step_mode": "eager",
        "ours_padding_share": 0.0,
        "padded_autocast": None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    assert {key: result[key] for key in expected} == expected
    assert result["padded_attention"] in ("sdpa", "eager")
    assert 0 < result["mean_length"] < result["max_length"]
    assert result["loss_difference"] <= LARGEST_LOSS_DIFFERENCE


def test_what_does_not_run_is_null_with_a_reason(result: dict[str, Any]) -> None:
    for name in BUILDERS:
        assert result[f"{name}_samples_per_s"] is None
        assert result[f"ratio_{name}"] is None
    assert "--compile" in result["padded_compiled_reason"]
    assert "CUDA" in result["padded_flash_reason"]
    assert "CUDA" in result["unpadded_peer_reason"]


def test_rounded_weights_captured_and_a_compiled_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = []

    def note(module: torch.nn.Module, **_: object) -> torch.nn.Module:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", note)  # the real one takes a minute
    changes = ("--precision", "bf16", "--step-mode", "captured", "--compile", "--json")
    assert bench(*ARGUMENTS, *changes) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(compiled) == 1
    assert result["ratio_padded_compiled"] == pytest.approx(
        result["ours_samples_per_s"] / result["padded_compiled_samples_per_s"]
    )
    assert result["padded_compiled_reason"] is None
    assert result["ours_padding_share"] > 0
    assert result["padded_autocast"] == "bfloat16"


def test_a_padded_side_without_memory_is_null_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`padded` has none from the beginning, `padded_to_longest` none at its third call."""
    left = {"padded": 0, "padded_to_longest": 2}

    def short_of_memory(*arguments: Any) -> dict[str, Any]:
        def limited(name: str, run: Any) -> Any:
            def call(number: int) -> torch.Tensor:
                left[name] -= 1
                if left[name] < 0:
                    raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")
                loss: torch.Tensor = run(number)
                return loss

            return call if name in left else run

        made = make_contenders(*arguments)
        return {name: limited(name, run) for name, run in made.items()}

    monkeypatch.setattr(against, "make_contenders", short_of_memory)
    assert bench(*ARGUMENTS, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for name in left:
        assert result[f"{name}_samples_per_s"] is result[f"ratio_{name}"] is None
        assert result[f"{name}_reason"] == "out of memory (tried to allocate 9 GiB)"
    assert result["ratio_encoder"] > 0 and result["padded_encoder_reason"] is None
    left |= {"padded": 0, "padded_to_longest": 0}
    assert bench(*ARGUMENTS) == 0
    assert capsys.readouterr().out.count("not measured (out of memory") == 2


def test_words_name_every_rate(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*ARGUMENTS) == 0
    printed = capsys.readouterr()
    assert printed.out.count("samples/s") == sum(
        key.endswith("samples_per_s") and value is not None for key, value in result.items()
    )
    assert "step 5/5" in printed.err  # progress


@pytest.mark.parametrize("name", ["query.weight", "bias", "LayerNorm.weight"])
def test_another_model_is_refused(name: str) -> None:
    data = make_data(TINY, num_batches=1, batch_size=4, seed=1, device=CPU)
    ours = make_ours(TINY, 1, CPU)
    peer = make_peer(ours, TINY, CPU)
    assert check_same_loss(ours, peer, data) <= LARGEST_LOSS_DIFFERENCE
    parameter = next(p for key, p in peer.named_parameters() if key.endswith(name))
    with torch.no_grad():
        parameter.normal_(std=TINY.hidden_size**-0.5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="losses differ"):
        check_same_loss(ours, peer, data)


def test_other_heads_are_refused() -> None:
    data = make_data(TINY, num_batches=1, batch_size=4, seed=1, device=CPU)
    ours = make_ours(TINY, 1, CPU)
    peer = make_peer(ours, replace(TINY, num_heads=4), CPU)
    with pytest.raises(ConfigError, match="losses differ"):
        check_same_loss(ours, peer, data)


def test_both_sides_train_alike_without_dropout() -> None:
    model = replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)
    data = make_data(model, num_batches=3, batch_size=4, seed=1, device=CPU)
    ours = make_ours(model, 1, CPU)
    peer = make_peer(ours, model, CPU)
    with run_of_model(ours, run_config(model, 4, 1, "eager"), data.updates, ()) as run:
        contenders = make_contenders(run, peer, data)
        for number in range(3):  # the second loss already depends on the first update
            losses = [contenders[name](number).item() for name in ("ours", "padded")]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert ours.training


def test_padded_inputs_hold_the_batch() -> None:
    data = make_data(TINY, num_batches=2, batch_size=4, seed=3, device=CPU)
    for number, batch in enumerate(data.batches):
        for inputs, length in (
            (data.padded[number], 24),
            (data.padded_to_longest[number], batch.max_seqlen),
        ):
            is_real = inputs["attention_mask"].bool()
            assert is_real.shape == (4, length)
            assert is_real.sum(dim=1).tolist() == list(batch.lengths)
            assert torch.equal(inputs["input_ids"][is_real], batch.input_ids)
            assert torch.equal(inputs["token_type_ids"][is_real], batch.token_type_ids)
            labels = inputs["labels"][is_real]
            assert torch.equal((labels != IGNORED).nonzero()[:, 0], batch.masked_token_index)
            assert torch.equal(labels[batch.masked_token_index], batch.labels)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--batch", "0"), "--batch: is 0"),
        (("--layers", "0"), "--layers: is 0"),
        (("--heads", "0"), "--heads: is 0"),
        (("--heads", "5"), "--hidden: 32 cannot be divided by 5"),
        (("--hidden", "100", "--heads", "64"), "--hidden: 100 cannot be divided by 64"),
        (("--max-length", "7"), "--max-length: is 7"),
        (("--vocab", "1"), "--vocab: is 1"),
        (("--steps", "0"), "--steps: is 0"),
        (("--threads", "0"), "--threads: is 0"),
        (("--seconds", "0"), "--seconds: is 0"),
        (("--dropout", "1"), "--dropout: is 1"),
        (("--seed", "-1"), "--seed: is -1"),
    ],
)
def test_options_that_cannot_be(changed: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*ARGUMENTS, *changed)


def test_heads_default_to_64_channels() -> None:
    with pytest.raises(ConfigError, match="--hidden: 100 cannot be divided by 64"):
        bench("against", "--layers", "1", "--hidden", "100")


def test_transformers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers.*tools/venv\.sh dev"):
        bench(*ARGUMENTS)

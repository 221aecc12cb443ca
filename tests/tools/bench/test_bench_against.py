"""`bench against` on a tiny model: what it reports, when it refuses to, and every other side."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_cases import CPU, bench, measured, result_of, tiny
from torch import Tensor

from bert_tools.bench import against, cli, peer
from bert_tools.bench.against import (
    LARGEST_LOSS_DIFFERENCE,
    NUM_BATCHES,
    OTHERS,
    check_same_loss,
    fastest_attention,
    make_contenders,
    make_data,
    make_ours,
    mixed_and_sorted,
)
from bert_tools.bench.peer import (
    BUILDERS,
    Data,
    OtherPeers,
    make_other_peers,
    make_peer,
    masked_loss,
    padded_inputs,
    unpadded_inputs,
    unpadded_loss,
    use_nested_attention,
)
from bert_tools.bench.training_run import run_of_model
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.errors import ConfigError

# 101 words are no multiple of 8: our model has padded words, the other side none.
CONFIG = tiny("model.num_layers=2", "data.max_seq_length=24")
TINY = CONFIG.model
WITHOUT_DROPOUT = replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)
MODERN = tiny(
    "model.num_layers=4", "data.max_seq_length=24", "model.attention_window=6", *cli.MODERN
)
BRIEF = ("--steps", 5)
SETTINGS = ("model.num_layers=2", "data.max_seq_length=24", "parallel.local_batch_size=3")


@pytest.fixture(scope="module")
def data() -> Data:
    return make_data(CONFIG, *mixed_and_sorted(CONFIG, 3), CPU)


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], str, str]:
    """The JSON object of one tiny comparison, its words and its progress."""
    return measured("against", *BRIEF, "--no-compile", settings=SETTINGS)


def test_ratios_are_quotients_of_the_rates(found: tuple[dict[str, Any], str, str]) -> None:
    result, words, progress = found
    ours = result["ours_samples_per_s"]
    per_second = result["gflop_per_sequence"] / (1e3 * result["peak_tflops"])
    rates = {name: result[f"{name}_samples_per_s"] for name in OTHERS}
    for name in ("sorted", "padded_to_longest", "padded"):
        assert result[f"ratio_{name}"] == pytest.approx(ours / rates[name])
        assert result[f"{name}_mfu"] == pytest.approx(rates[name] * per_second)
        low, middle, high = result[f"ratio_{name}_range"]
        assert 0 < low <= middle <= high
    assert result["ours_mfu"] == pytest.approx(ours * per_second)
    assert 0 < result["ours_done_mfu"] < result["ours_mfu"]  # the last layer is not done whole
    # The headline is that of the strongest.
    fastest = max(rate for rate in rates.values() if rate is not None)
    assert rates[result["strongest"]] == fastest
    assert result["ratio_strongest"] == pytest.approx(ours / fastest)
    assert f"({OTHERS[result['strongest']]}): {result['ratio_strongest']:.2f}" in words
    assert words.count("samples/s") == 1 + sum(rate is not None for rate in rates.values())
    assert "step 5/5" in progress
    # What does not run is null with a reason.
    for name in BUILDERS:
        assert result[f"{name}_samples_per_s"] is result[f"ratio_{name}"] is None
        assert result[f"{name}_mfu"] is None
        assert ("--compile" if "compiled" in name else "CUDA") in result[f"{name}_reason"]


def test_result_says_what_was_compared(found: tuple[dict[str, Any], str, str]) -> None:
    import transformers

    result = found[0]
    expected = {
        "schema_version": 2,
        "peak_dtype": "float32",
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


def test_rounded_weights_captured_and_a_compiled_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def note(step: Any, **_: object) -> Any:
        compiled.append(step)
        return step

    monkeypatch.setattr(torch, "compile", note)  # the real one takes a minute
    changes = ("model.precision=bf16", "run.step_mode=captured")
    result = result_of("against", *BRIEF, settings=(*SETTINGS, *changes))
    assert len(compiled) == 1
    assert result["ratio_sorted_compiled"] == pytest.approx(
        result["ours_samples_per_s"] / result["sorted_compiled_samples_per_s"]
    )
    assert result["sorted_compiled_reason"] is None
    assert "on CUDA alone" in result["padded_compiled_reason"]
    assert result["ours_padding_share"] > 0
    assert result["padded_autocast"] == "bfloat16"


def test_a_padded_side_without_memory_is_null_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
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
    result, words, _ = measured("against", *BRIEF, "--no-compile", settings=SETTINGS)
    for name in left:
        assert result[f"{name}_samples_per_s"] is result[f"ratio_{name}"] is None
        assert result[f"{name}_reason"] == "out of memory (tried to allocate 9 GiB)"
    assert result["strongest"] == "sorted" and result["sorted_reason"] is None
    assert words.count("not measured (out of memory") == 2


def test_an_attention_that_fails_is_not_taken(make: Callable[[], Any]) -> None:
    other, lines = make(), list[str]()

    def step(_: int) -> Tensor:
        if other.config._attn_implementation == "sdpa":
            raise RuntimeError("no plan\nmore")
        return torch.zeros(())

    assert fastest_attention(other, step, 2, lines.append) == "eager"
    assert "sdpa: RuntimeError: no plan" in lines


@pytest.mark.parametrize("name", ["query.weight", "bias", "LayerNorm.weight", "heads"])
def test_another_model_is_refused(name: str, data: Data) -> None:
    ours = make_ours(TINY, 1, CPU)
    model = replace(TINY, num_heads=4) if name == "heads" else TINY
    other = make_peer(ours, model, CPU)
    if name != "heads":
        assert check_same_loss(ours, other, data) <= LARGEST_LOSS_DIFFERENCE
        parameter = next(p for key, p in other.named_parameters() if key.endswith(name))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            parameter.normal_(std=TINY.hidden_size**-0.5, generator=generator)
    with pytest.raises(ConfigError, match="losses differ"):
        check_same_loss(ours, other, data)


@pytest.mark.parametrize("name", ["sorted", "padded", "padded_to_longest"])
@pytest.mark.parametrize("architecture", ["bert", "modern"])
def test_both_sides_train_alike_without_dropout(name: str, architecture: str) -> None:
    config = replace(CONFIG, model=WITHOUT_DROPOUT) if architecture == "bert" else MODERN
    config = against.as_both_train(config)
    ours = make_ours(config.model, 1, CPU)
    other = make_peer(ours, config.model, CPU)
    mixed, by_length = mixed_and_sorted(config, 3)
    data = make_data(config, mixed, by_length, CPU)
    assert check_same_loss(ours, other, data) <= LARGEST_LOSS_DIFFERENCE
    updates = [(batch,) for batch in by_length] if name == "sorted" else mixed
    with run_of_model(ours, config, updates, ()) as run:
        step = make_contenders(other, data, config.model.precision)[name]
        for number in range(3):  # the second loss already depends on the first update
            assert run(number).item() == pytest.approx(step(number).item(), rel=1e-4)
    assert ours.training


def test_both_sides_have_one_optimizer_and_a_constant_rate() -> None:
    closed = ("optim.name=lamb", "schedule.warmup_steps=5", "parallel.grad_accum_steps=2")
    config = against.as_both_train(tiny(*closed))
    assert (config.optim, config.clip) == (peer.OPTIM, peer.CLIP)
    assert config.schedule.end_learning_rate == config.optim.learning_rate
    assert config.schedule.warmup_steps == 0
    assert config.parallel.grad_accum_steps == 1


def test_padded_inputs_hold_the_batch(data: Data) -> None:
    for number, batch in enumerate(data.batches):
        for inputs, length in (
            (data.padded[number], 24),
            (padded_inputs(batch, batch.max_seqlen), batch.max_seqlen),
        ):
            is_real = inputs["attention_mask"].bool()
            assert is_real.shape == (4, length)
            assert is_real.sum(dim=1).tolist() == list(batch.lengths)
            assert torch.equal(inputs["input_ids"][is_real], batch.input_ids)
            assert torch.equal(inputs["token_type_ids"][is_real], batch.token_type_ids)
            labels = inputs["labels"][is_real]
            assert torch.equal((labels != IGNORED).nonzero()[:, 0], batch.masked_token_index)
            assert torch.equal(labels[batch.masked_token_index], batch.labels)


def test_sorted_batches_hold_the_same_samples_and_less_padding(data: Data) -> None:
    found: dict[str, list[list[tuple[int, ...]]]] = {"sorted": [], "padded_to_longest": []}
    for name, samples in found.items():
        for inputs in getattr(data, name):
            tokens, is_real = (inputs["tokens"][each] for each in ("input_ids", "attention_mask"))
            assert is_real.sum(dim=1).max() == tokens.shape[1]  # to the longest
            rows = zip(tokens, is_real.bool(), strict=True)
            samples.append([tuple(row[real].tolist()) for row, real in rows])
    flat = {name: [each for batch in found[name] for each in batch] for name in found}
    assert sorted(flat["sorted"]) == sorted(flat["padded_to_longest"])
    lengths = list(map(len, flat["sorted"]))
    assert lengths == sorted(lengths) != list(map(len, flat["padded_to_longest"]))
    sizes = {
        name: sum(each["tokens"]["input_ids"].numel() for each in getattr(data, name))
        for name in found
    }
    assert sum(lengths) <= sizes["sorted"] < sizes["padded_to_longest"]


def test_masked_positions_alone_give_the_same_loss_and_gradients(
    make: Callable[[], Any], data: Data
) -> None:
    whole, masked = make().eval(), make().eval()
    losses = whole(**data.padded[0]).loss, masked_loss(masked, data.padded_to_longest[0])
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    expected = dict(whole.named_parameters())
    for name, parameter in masked.named_parameters():
        grad = expected[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6, msg=name)


def test_transformers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers.*tools/venv\.sh dev"):
        bench("against")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Make other sides, all of which may run on the CPU."""
    monkeypatch.setattr(peer, "_reason_against", lambda *_: None)
    ours = make_ours(WITHOUT_DROPOUT, 1, CPU)
    return lambda: make_peer(ours, WITHOUT_DROPOUT, CPU)


def others(make: Callable[[], Any], data: Data, **options: Any) -> OtherPeers:
    options = {"check": lambda _: None, "compiled": "whole", **options}
    return make_other_peers(make, data, "fp32", device=CPU, report=lambda _: None, **options)


def test_without_padding_loss_and_gradients_are_the_same(
    make: Callable[[], Any], data: Data
) -> None:
    padded, unpadded = make().eval(), make().eval()
    use_nested_attention(unpadded)
    for number, batch in enumerate(data.batches):
        losses = (
            padded(**data.padded[number]).loss,
            unpadded_loss(unpadded, unpadded_inputs(batch)),
        )
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    gradients = dict(unpadded.named_parameters())
    for name, parameter in padded.named_parameters():
        # Padding is a word to the padded model, and the embedding's row of it gets no gradient.
        torch.testing.assert_close(
            gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_dropout_reaches_the_attention_without_padding(make: Callable[[], Any], data: Data) -> None:
    other = make()
    use_nested_attention(other)
    inputs = unpadded_inputs(data.batches[0])
    without = [unpadded_loss(other, inputs).item() for _ in range(2)]
    other.bert.encoder.layer[0].attention.self.dropout.p = 0.5
    assert without[0] == without[1]
    assert unpadded_loss(other, inputs).item() != pytest.approx(without[0], rel=1e-6)


def test_all_that_can_run_train(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # takes a minute
    monkeypatch.setattr(peer, "FUSED", list(torch.nn.attention.SDPBackend.__members__.values()))
    checked: list[float] = []
    found = others(make, data, check=lambda loss: checked.append(loss.item()))
    assert found.reasons == {}
    assert list(found.contenders) == list(BUILDERS)
    assert checked == pytest.approx([checked[0]] * 2)  # what is compiled is not checked
    for contender in found.contenders.values():
        losses = [contender(0).item() for _ in range(5)]
        assert losses[-1] < losses[0]


def test_layers_may_be_compiled_by_themselves(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    compiled: list[tuple[torch.nn.Module, bool]] = []

    def note(module: torch.nn.Module, *, dynamic: bool) -> None:
        compiled.append((module, dynamic))

    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(torch.nn.Module, "compile", note)
    found = others(make, data, compiled="by layer")
    for name in ("sorted_compiled", "padded_compiled"):
        assert torch.isfinite(found.contenders[name](0))
    kinds = {(type(module).__name__, dynamic) for module, dynamic in compiled}
    assert kinds == {("BertLayer", True), ("BertLayer", False)}
    assert len(compiled) == 2 * TINY.num_layers


def test_what_fails_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nand a stack")

    monkeypatch.setattr(torch, "compile", fail)
    found = others(make, data)
    assert found.reasons["padded_compiled"] == "RuntimeError: no kernel"
    assert "unpadded_peer" in found.contenders


def test_what_runs_out_of_memory_is_freed_before_the_next(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    peers: list[weakref.ref[Any]] = []

    def make_noted() -> Any:
        assert all(other() is None for other in peers[:2])
        other = make()
        peers.append(weakref.ref(other))
        return other

    def fill(module: Any, **_: object) -> Any:
        def call(*arguments: Any, **inputs: Any) -> Any:
            module(*arguments, **inputs)
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

        return call

    monkeypatch.setattr(torch, "compile", fill)
    found = others(make_noted, data)
    for name in ("sorted_compiled", "padded_compiled"):
        assert found.reasons[name] == "out of memory (tried to allocate 9 GiB)"
    assert len(peers) == 4 and "unpadded_peer" in found.contenders


def test_another_model_is_no_reason_but_an_error(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], data: Data
) -> None:
    def refuse(_: Tensor) -> None:
        raise ConfigError("bench against", "another model", "use this one")

    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    with pytest.raises(ConfigError, match="another model"):
        others(make, data, check=refuse)

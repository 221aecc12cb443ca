"""`bench transformers` on a tiny model: what it reports and refuses, and every baseline."""

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bench_cases import CPU, assert_held, bench, measured, tiny

from bert_tools.bench import baseline, padding_free
from bert_tools.bench.baseline import (
    BASELINES,
    loss_function,
    make_baseline,
    masked_loss,
    padded_inputs,
    prepare_baselines,
    unpadded_inputs,
    unpadded_loss,
    use_nested_attention,
)
from bert_tools.bench.training_run import run_of_model
from bert_tools.bench.transformers import (
    LARGEST_LOSS_DIFFERENCE,
    as_both_train,
    check_same_loss,
    make_data,
    make_ours,
    mixed_and_sorted,
)
from mlperf_bert.errors import ConfigError
from mlperf_bert.run.console import ProgressLines

# 101 words are no multiple of 8: our model has padded words, the other side none.
CONFIG = tiny("model.num_layers=2", "data.max_seq_length=24")
TINY = CONFIG.model
WITHOUT_DROPOUT = replace(TINY, hidden_dropout=0.0, attention_dropout=0.0)
MODERN = tiny(
    *("model.num_layers=4", "data.max_seq_length=24", "model.attention_window=6"),
    *("model.architecture=modern", "model.objective=mlm"),
    *("model.hidden_dropout=0", "model.attention_dropout=0"),
    *("data.masking=dynamic", "data.masking_rate=0.3"),
)
BRIEF = ("--steps", 5)
SETTINGS = ("model.num_layers=2", "data.max_seq_length=24", "parallel.local_batch_size=3")


@pytest.fixture(scope="module")
def data():
    return make_data(CONFIG, *mixed_and_sorted(CONFIG, 3), CPU)


def test_what_is_compared_and_ratios_of_the_rates(snapshot):
    result, words, progress = measured("transformers", *BRIEF, "--no-compile", settings=SETTINGS)
    ours = result["ours_samples_per_s"]
    rates = {name: result[f"{name}_samples_per_s"] for name in BASELINES}
    for name in ("sorted", "padded"):
        assert result[f"ratio_{name}"] == pytest.approx(ours / rates[name])
        low, middle, high = result[f"ratio_{name}_range"]
        assert 0 < low <= middle <= high
    fastest = max(rate for rate in rates.values() if rate is not None)
    assert rates[result["strongest"]] == fastest  # whose ratio is the headline
    assert result["ratio_strongest"] == pytest.approx(ours / fastest)
    assert f"{result['ratio_strongest']:.4g}\n" in words and "step 5/5: ours" in progress
    for line in (
        "loading torch to measure bert, 2 layers, hidden 32",
        "building our model and that of transformers on cpu\n",
        "warming up baseline 1 of 6, sorted\n",
        "skipping baseline 2 of 6, sorted_compiled: torch.compile is turned off by --no-compile\n",
        "preparing our training step (step eager)\n",
        "measuring up to 5 steps of each of ours, sorted, padded\n",
        "; at most about 0 s left\n",
    ):
        assert line in progress
    assert_held(result, snapshot)  # what does not run is null with a reason
    assert 0 < result["mean_length"] < 24 and result["ours_padding_share"] == 0
    assert result["config"]["optim"]["name"] == "adamw"
    assert result["loss_difference"] <= LARGEST_LOSS_DIFFERENCE


def test_rounded_weights_and_a_side_without_memory(monkeypatch):
    def limited(name, *rest):
        def full(_):
            raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")

        return full if name == "padded" else loss_function(name, *rest)

    monkeypatch.setattr(baseline, "loss_function", limited)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)  # the real one takes a minute
    changes = ("model.precision=bf16", "run.step_mode=captured")
    result, words, progress = measured("transformers", *BRIEF, settings=(*SETTINGS, *changes))
    assert result["ratio_sorted_compiled"] and result["sorted_compiled_reason"] is None
    assert "compiling and warming up baseline 2 of 6, sorted_compiled\n" in progress
    assert "only on CUDA" in result["padded_compiled_reason"]
    assert result["ours_padding_share"] > 0
    assert result["padded_samples_per_s"] is result["ratio_padded"] is None
    assert result["padded_reason"] == "out of memory (tried to allocate 9 GiB)"
    assert "padded_samples_per_s" not in words and words.count("out of memory") == 1


@pytest.mark.parametrize("name", ["query.weight", "bias", "LayerNorm.weight", "heads"])
def test_another_model_is_refused(name, data):
    ours = make_ours(TINY, 1, CPU)
    model = replace(TINY, num_heads=4) if name == "heads" else TINY
    other = make_baseline(ours, model, CPU)
    if name != "heads":
        assert check_same_loss(ours, other, data) <= LARGEST_LOSS_DIFFERENCE
        parameter = next(p for key, p in other.named_parameters() if key.endswith(name))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            parameter.normal_(std=TINY.hidden_size**-0.5, generator=generator)
    with pytest.raises(ConfigError, match="losses differ"):
        check_same_loss(ours, other, data)


@pytest.fixture
def kernel(monkeypatch):
    """Put plain attention in place of FlashAttention's kernel, which needs CUDA."""
    transformers = baseline.import_transformers()

    def attend(module, query, key, value, mask, *, scaling, sliding_window=None, **flash):
        assert mask is None and query.shape[0] == 1
        bounds = flash["cu_seq_lens_q"].tolist()
        assert bounds == flash["cu_seq_lens_k"].tolist()
        assert flash["max_length_q"] == max(end - start for start, end in pairwise(bounds))
        parts = []
        for start, end in pairwise(bounds):
            place = torch.arange(end - start)
            reach = end if sliding_window is None else sliding_window
            near = (place[:, None] - place).abs() < reach
            q, k, v = (each[:, :, start:end] for each in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=near, scale=scaling
            )
            parts.append(attended.transpose(1, 2))
        return torch.cat(parts, dim=1), None

    transformers.AttentionInterface.register("plain_kernel", attend)
    monkeypatch.setattr(padding_free, "implementation", lambda: "plain_kernel")


@pytest.mark.parametrize("name", ["sorted", "padded", "padding_free"])
@pytest.mark.parametrize("architecture", ["bert", "modern"])
def test_both_sides_train_alike_without_dropout(name, architecture, kernel):
    config = replace(CONFIG, model=WITHOUT_DROPOUT) if architecture == "bert" else MODERN
    config = as_both_train(config)
    ours = make_ours(config.model, 1, CPU)
    other = make_baseline(ours, config.model, CPU)
    mixed, by_length = mixed_and_sorted(config, 3)
    data = make_data(config, mixed, by_length, CPU)
    assert check_same_loss(ours, other, data) <= LARGEST_LOSS_DIFFERENCE
    updates = by_length if name == "sorted" else mixed
    with run_of_model(ours, config, updates, ()) as run:
        step = baseline.baseline_step(
            other, loss_function(name, other, data), config.model.precision
        )
        for number in range(3):  # the second loss already depends on the first update
            assert run(number).item() == pytest.approx(step(number).item(), rel=1e-4)
    assert ours.training


def test_both_sides_have_one_optimizer_and_a_constant_rate():
    closed = ("optim.name=lamb", "schedule.warmup_steps=5", "parallel.grad_accum_steps=2")
    config = as_both_train(tiny(*closed))
    assert (config.optim, config.clip) == (baseline.OPTIM, baseline.CLIP)
    assert config.schedule.end_learning_rate == config.optim.learning_rate
    assert config.schedule.warmup_steps == 0
    assert config.parallel.grad_accum_steps == 1


def test_a_masked_lm_head_only_is_refused():
    with pytest.raises(ConfigError, match="must be 'mlm_nsp' to compare with BertForPreTraining"):
        bench("transformers", *BRIEF, settings=("model.objective=mlm",))


def test_padded_and_sorted_batches_hold_the_samples(data):
    for inputs, batch in zip(data.padded, data.batches, strict=True):
        is_real = inputs["attention_mask"].bool()
        assert is_real.shape == (4, 24)
        assert is_real.sum(dim=1).tolist() == list(batch.lengths)
        assert torch.equal(inputs["input_ids"][is_real], batch.input_ids)
    lengths = []
    for inputs in data.sorted:
        is_real = inputs["tokens"]["attention_mask"]
        assert is_real.sum(dim=1).max() == is_real.shape[1]  # to the longest
        lengths += is_real.sum(dim=1).tolist()
    mixed = [length for batch in data.batches for length in batch.lengths]
    assert lengths == sorted(mixed) != mixed
    masked = [sum(len(batch.labels) for batch in each) for each in (data.batches, data.by_length)]
    assert masked[0] == masked[1]
    computed = sum(each["tokens"]["input_ids"].numel() for each in data.sorted)
    assert computed < sum(len(batch.lengths) * batch.max_seqlen for batch in data.batches)


@pytest.fixture
def make(monkeypatch, kernel):
    """Make other sides, all of which may run on the CPU."""
    monkeypatch.setattr(baseline, "_reason_left_out", lambda *_: None)
    ours = make_ours(WITHOUT_DROPOUT, 1, CPU)
    return lambda: make_baseline(ours, WITHOUT_DROPOUT, CPU)


def others(make, data, **options):
    """The contenders, and the reasons of those that cannot run."""
    options = {"check": lambda *_: None, "compiled": "whole", **options}
    return prepare_baselines(make, data, TINY, device=CPU, progress=ProgressLines(), **options)


@pytest.mark.parametrize("name", ["masked positions", "without padding"])
def test_other_forms_give_the_same_loss_and_gradients(name, make, data):
    whole, other = make().eval(), make().eval()
    if name == "masked positions":
        pairs = [(padded_inputs(data.by_length[0], 24), masked_loss, data.sorted[0])]
    else:
        use_nested_attention(other)
        inputs = map(unpadded_inputs, data.batches)
        pairs = [
            (padded, unpadded_loss, own) for padded, own in zip(data.padded, inputs, strict=True)
        ]
    for padded, loss_of, own in pairs:
        losses = whole(**padded).loss, loss_of(other, own)
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    expected = dict(whole.named_parameters())
    for name, parameter in other.named_parameters():
        # Padding is a word to the padded model, and the embedding's row of it gets no gradient.
        grad = expected[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6, msg=name)


def test_dropout_reaches_the_attention_without_padding(make, data):
    other = make()
    use_nested_attention(other)
    inputs = unpadded_inputs(data.batches[0])
    without = [unpadded_loss(other, inputs).item() for _ in range(2)]
    other.bert.encoder.layer[0].attention.self.dropout.p = 0.5
    assert without[0] == without[1]
    assert unpadded_loss(other, inputs).item() != pytest.approx(without[0], rel=1e-6)


def test_all_that_can_run_train_and_layers_may_be_compiled_by_themselves(monkeypatch, make, data):
    compiled, checked = [], {}

    def note(module, *, dynamic):
        compiled.append((type(module).__name__, dynamic))

    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(torch.nn.Module, "compile", note)  # the real one takes a minute
    contenders, reasons = others(
        *(make, data),
        compiled="by layer",
        check=lambda name, loss: checked.update({name: loss.item()}),
    )
    assert reasons == {}
    assert list(contenders) == list(BASELINES)
    assert list(checked) == [
        "sorted",
        "padded",
        "padding_free",
        "nested",
    ]  # what is compiled is not checked
    assert checked["nested"] == pytest.approx(checked["padded"])
    for contender in contenders.values():
        losses = [contender(0).item() for _ in range(5)]
        assert losses[-1] < losses[0]
    assert set(compiled) == {("BertLayer", True), ("BertLayer", False)}
    assert len(compiled) == 2 * TINY.num_layers


def test_what_fails_has_its_reason_and_is_freed_before_the_next(monkeypatch, make, data):
    baselines = []

    def make_noted():
        compiled = [number for number, name in enumerate(BASELINES) if name.endswith("compiled")]
        assert all(baselines[number]() is None for number in compiled if number < len(baselines))
        other = make()
        baselines.append(weakref.ref(other))
        return other

    def fill(module, *, dynamic):
        def call(*arguments, **inputs):
            module(*arguments, **inputs)
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

        if not dynamic:  # padded to the maximum
            raise RuntimeError("no kernel\nand a stack")
        return call

    monkeypatch.setattr(torch, "compile", fill)
    contenders, reasons = others(make_noted, data)
    assert reasons["sorted_compiled"] == "out of memory (tried to allocate 9 GiB)"
    assert reasons["padded_compiled"] == "RuntimeError: no kernel"
    assert len(baselines) == len(BASELINES) and "nested" in contenders


def test_another_model_is_no_reason_but_an_error(make, data):
    def refuse(*_):
        raise ConfigError("bench transformers", "another model", "use this one")

    with pytest.raises(ConfigError, match="another model"):
        others(make, data, check=refuse)


@pytest.mark.parametrize(
    ("packages", "device", "precision", "reason"),
    [
        ({"kernels"}, "cpu", "bf16", "its attention kernels need CUDA, and this run uses cpu"),
        ({"kernels"}, "cuda", "fp32", "its attention kernels need bf16, and this run uses fp32"),
        (
            set(),
            "cuda",
            "bf16",
            "neither of the packages flash-attn and kernels is installed",
        ),
        ({"kernels"}, "cuda", "bf16", None),
        ({"flash_attn"}, "cuda", "fp8", None),
    ],
)
def test_why_there_is_no_padding_free_side(monkeypatch, packages, device, precision, reason):
    monkeypatch.setattr(padding_free, "find_spec", lambda name: name if name in packages else None)
    assert padding_free.why_not(torch.device(device), precision) == reason


@pytest.mark.longest
def test_the_librarys_own_way_fails_with_its_reason_without_its_packages(make, data, monkeypatch):
    monkeypatch.setattr(padding_free, "implementation", lambda: padding_free.INSTALLED)
    contenders, reasons = others(make, data, compiled="by layer")
    assert "padding_free" not in contenders and "FlashAttention2" in reasons["padding_free"]

"""Products in FP8: casts, scales one step behind, bounds, what is not finite; models of them."""

from dataclasses import replace

import pytest
import torch

from fp8_cases import E4M3, E5M2, SHAPES, Case, make_scales, step_of, values_of
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.fp8 import (
    DTYPES,
    FIRST_MAXIMA,
    GRADIENT,
    HEADROOM,
    INPUT,
    cast,
    check_fp8,
)
from mlperf_bert.model.fp8_cast import COLUMNS_MULTIPLE, Target
from model_cases import CPU, TINY, our_loss, ragged_batch

LIMITS = torch.tensor([torch.finfo(dtype).max for dtype in DTYPES])
FP8_TINY = replace(TINY, precision="fp8", initializer_range=0.1)
BATCH = ragged_batch((9, 20, 5))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cast_takes_the_nearest_value(shape, dtype):
    x = values_of(shape)
    unit, maximum = torch.tensor(0.25), torch.tensor(0.5)
    found = cast((x,), 0, Target(dtype, unit, maximum), transpose=True)
    all_values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    all_values = all_values[all_values.isfinite()] * unit
    is_finite = x.isfinite()
    exact = x.double().masked_fill(~is_finite, 0.0)
    least_error = (exact[..., None] - all_values).abs().amin(dim=-1)
    values = found.rows.double() * unit
    assert torch.equal(values.isnan(), ~is_finite)  # no infinity either, and none is hidden
    assert torch.equal((values - exact).abs()[is_finite], least_error[is_finite])
    largest = exact.abs().max()
    assert maximum == largest
    cast((x / 2,), 0, Target(dtype, unit, maximum), transpose=False)
    assert maximum == largest  # it is raised only
    assert found.transposed is not None
    width = found.transposed.shape[1]
    assert width % COLUMNS_MULTIPLE == 0 and width - shape[0] < COLUMNS_MULTIPLE
    columns = found.transposed[:, : shape[0]].double() * unit
    assert torch.equal(columns.t().nan_to_num(), values.nan_to_num())
    assert not found.transposed[:, shape[0] :].float().any()


@pytest.mark.parametrize("rows", [1, 17, 48])
def test_a_product_is_within_the_bounds_of_its_rounding(rows):
    (scales, (own,)), case = make_scales("cpu"), Case(rows, "cpu")
    for number in (1, 2, 3):
        scales.follow(step_of(number, "cpu"))
        case.run(own)
        case.check(own)


def test_a_product_may_have_no_biases():
    found = []
    for has_biases in (True, False):
        (_, (own,)), case = make_scales("cpu"), Case(17, "cpu")
        case.biases = [torch.zeros_like(each) for each in case.biases] if has_biases else []
        case.run(own)
        found.append([case.y, case.x.grad, *(weight.grad for weight in case.weights)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_scales_follow_the_maxima_one_step_later():
    scales, (own, _) = make_scales("cpu", 2)
    units, maxima = scales.state
    assert_fits(units[0], torch.tensor(FIRST_MAXIMA))
    before = units.clone()
    case = Case(16, "cpu")
    scales.follow(step_of(1, "cpu"))
    case.run(own)
    seen = [case.x, torch.cat(case.weights), torch.cat(case.gradients, dim=1)]
    expected = torch.stack([each.detach().abs().max() for each in seen])
    assert torch.equal(maxima[0], expected) and torch.equal(units, before)
    scales.follow(step_of(1, "cpu"))  # another forward of the same update
    assert torch.equal(maxima[0], expected) and torch.equal(units, before)
    scales.follow(step_of(2, "cpu"))
    assert not maxima.any()
    assert_fits(units[0], expected)
    assert torch.equal(units[1], before[1])  # of this product nothing was seen


def assert_fits(units, maxima):
    mantissas, _ = torch.frexp(units)
    assert (mantissas == 0.5).all()  # powers of two
    at = maxima / units / LIMITS * torch.tensor(HEADROOM)
    assert (at >= 1).all() and (at < 2).all()


@pytest.mark.parametrize("maximum", [1e-30, 1e30])
def test_units_stay_where_two_of_them_can_be_multiplied(maximum):
    scales, _ = make_scales("cpu")
    scales.state[1] = maximum
    scales.follow(step_of(1, "cpu"))
    both = scales.state[0, 0, INPUT] * scales.state[0, 0, GRADIENT]
    assert both >= torch.finfo(torch.float32).smallest_normal and both.isfinite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["x", "weights", "gradients"])
def test_what_is_not_finite_stays_visible(where, value):
    (scales, (own,)), case = make_scales("cpu"), Case(16, "cpu")
    case.run(own)
    target = case.x if where == "x" else getattr(case, where)[1]
    with torch.no_grad():
        target[3, 2] = value
    scales.follow(step_of(2, "cpu"))
    units = scales.state[0].clone()
    case.run(own)
    results = {"y": case.y, "x": case.x.grad, "weights": case.weights[1].grad}
    expected = {"x": ("y", "weights"), "weights": ("y", "x"), "gradients": ("x", "weights")}
    for name in expected[where]:
        assert not results[name].isfinite().all(), name
    # The next units are those of the other values.
    scales.follow(step_of(3, "cpu"))
    assert torch.equal(scales.state[0], units)


def make_model():
    return BertForPretraining(FP8_TINY, CPU).to(torch.bfloat16)


def train_step(model, number):
    """An update that changes the scales alone."""
    model.step.fill_(number)
    our_loss(model, BATCH).backward()


def test_every_product_of_the_encoder_has_its_own_scales():
    model = make_model()
    train_step(model, 1)
    assert model.fp8 is not None
    maxima = model.fp8.state[1].clone()
    assert (maxima > 0).all()
    weights = model.bert.encoder.layer[1].output.dense.weight
    assert maxima[-1, 1] == weights.abs().max()
    with torch.no_grad():
        weights.mul_(2.0)
    train_step(model, 2)
    changed = model.fp8.state[1, :, 1] / maxima[:, 1]
    assert changed.tolist() == [*[1.0] * 7, 2.0]


def test_evaluation_changes_no_scale_and_other_precisions_have_none():
    model = make_model()
    train_step(model, 1)
    before = {name: tensor.clone() for name, tensor in model.fp8_state().items()}
    model.step.fill_(2)
    model.eval()
    with torch.inference_mode():
        our_loss(model, BATCH)
    for name, tensor in model.fp8_state().items():
        assert torch.equal(tensor, before[name])
    other = BertForPretraining(TINY, CPU)
    assert other.fp8 is None and other.fp8_state() == {}


def test_sizes_and_devices_must_suit_fp8(monkeypatch):
    for name in ("hidden_size", "intermediate_size"):
        unfit = replace(FP8_TINY, **{name: COLUMNS_MULTIPLE * 5 // 2})
        with pytest.raises(ConfigError, match=f"model.{name}"):
            BertForPretraining(unfit, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=r"model\.precision.*A100"):
        check_fp8(FP8_TINY, torch.device("cuda"))

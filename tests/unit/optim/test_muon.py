"""Muon: against singular values and torch's, the dealing of matrices, a whole model.

Its kernels are tested in `test_flat_kernels.py`, its shards in `test_sharded_optimizer.py`.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from mlperf_bert.config.sections import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim import muon_plan
from mlperf_bert.optim.flat_optimizer import MUON_MOMENTUM, is_exempt
from mlperf_bert.optim.muon import (
    COEFFICIENTS,
    muon_update,
    orthogonalize,
    orthogonalize_stack,
)
from mlperf_bert.optim.muon_plan import (
    assign_matrices,
    newton_schulz_flops,
)
from mlperf_bert.optim.optimizers import adamw_update, make_optimizer_alone
from model_cases import MODERN, TINY

SHAPES = [(64, 64), (96, 32), (32, 96), (1, 7)]
RATE, DECAY, MOMENTUM = 0.02, 0.1, 0.95
BF16_UNIT = 2.0**-8  # largest relative error of rounding to bfloat16


def random(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_singular_values(matrix):
    """The polynomial on each singular value, five times, of the matrix over its Frobenius norm."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_torchs_bit_for_bit(shape):
    ours = random(*shape, dtype=torch.float32)
    parameter, buffer = nn.Parameter(ours.clone()), torch.zeros_like(ours)
    theirs = torch.optim.Muon(
        [parameter],
        lr=RATE,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(5):
        gradient = random(*shape, seed=step, dtype=torch.float32)
        parameter.grad = gradient.clone()
        theirs.step()
        muon_update(ours, gradient, buffer, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        assert torch.equal(ours, parameter.detach())


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_the_polynomial_of_singular_values(shape):
    matrix = random(*shape)
    expected = by_singular_values(matrix)
    for found in (orthogonalize(matrix), orthogonalize_stack(matrix[None])[0]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    values = torch.linalg.svdvals(expected)
    assert float(values.median()) > 0.65 and float(values.max()) < 1.25


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_stack_in_bfloat16_is_as_near_as_its_roundings(shape):
    """Three products a step and the norm are rounded; errors add up like independent ones."""
    stack = random(5, *shape, dtype=torch.bfloat16)
    found = orthogonalize_stack(stack).double()
    for matrix, update in zip(stack, found, strict=True):
        reference = orthogonalize(matrix).double()
        largest = (3 * muon_plan.NEWTON_SCHULZ_STEPS + 1) * BF16_UNIT * reference.norm()
        assert float((update - reference).norm()) <= float(largest)
        exact = orthogonalize(matrix.double())
        assert float((reference - exact).norm()) <= float(largest)


def test_no_gradient_gives_no_update():
    assert not orthogonalize(torch.zeros(4, 8)).any()
    assert not orthogonalize_stack(torch.zeros(2, 8, 4)).any()


ODD = replace(TINY, hidden_size=20, intermediate_size=52)  # matrices fill no block of the buffers
OF_BERT = {
    *(f"attention.self.{each}.weight" for each in ("query", "key", "value")),
    *("attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight"),
}
JOINED = {"attn.Wqkv.weight": 3, "mlp.Wi.weight": 2}
MATRICES = {"bert": OF_BERT, "modern": {*JOINED, "attn.Wo.weight", "mlp.Wo.weight"}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stack_elements", [2**25, 3 * 20 * 20])
@pytest.mark.parametrize("config", [ODD, MODERN], ids=["bert", "modern"])
def test_a_models_update_is_the_readable_ones(config, dtype, stack_elements, monkeypatch):
    """Matrix by matrix: of ModernBERT three, or two, in one parameter. One step is skipped."""
    monkeypatch.setattr(muon_plan, "STACK_ELEMENTS", stack_elements)
    model = BertForPretraining(config, torch.device("cpu"), seed=3).to(dtype)
    rule = OptimSection(name="muon", learning_rate=RATE, weight_decay=DECAY)
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    state = {name: torch.zeros(2, *each.shape, dtype=dtype) for name, each in expected.items()}
    optimizer, matrices, number = make_optimizer_alone(rule, model), set(), 0
    for skip in (0.0, 0.0, 1.0, 0.0, 0.0):
        optimizer.zero_grad()
        for seed, parameter in enumerate(model.parameters(), 100 * number):
            parameter.grad = random(*parameter.shape, seed=seed, dtype=dtype)
        number += skip == 0.0
        for name, parameter in model.named_parameters() if skip == 0.0 else ():
            gradient, weight = parameter.grad.clone(), expected[name]
            kind = re.sub(r".*\.layers?\.\d+\.", "", name)
            if kind in MATRICES[config.architecture]:
                matrices.add(kind)
                constants = {"lr": RATE, "momentum": MUON_MOMENTUM, "weight_decay": DECAY}
                of_each = [x.chunk(JOINED.get(kind, 1)) for x in (weight, gradient, state[name][0])]
                for each in zip(*of_each, strict=True):
                    muon_update(*each, **constants, products=dtype)
                continue
            decay = 0.0 if is_exempt(name) else DECAY
            constants = {name: getattr(rule, name) for name in ("beta_1", "beta_2", "epsilon")}
            constants |= {"lr": RATE, "weight_decay": decay}
            adamw_update(weight, gradient, *state[name], number, **constants)
        rate = torch.tensor(RATE, dtype=torch.float64)
        optimizer.step(rate, torch.ones(()), torch.tensor(skip))
    assert matrices == MATRICES[config.architecture]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=tolerance)
    for segment in optimizer.segments():
        found = optimizer.shard.exp_avg_sq[segment.in_shard]
        kept = state[segment.tensor.name][1].reshape(-1)
        torch.testing.assert_close(found, kept, rtol=0, atol=tolerance)


def test_joined_matrices_that_begin_inside_a_block_are_refused():
    rule = OptimSection(name="muon", learning_rate=RATE)
    for sizes in ({"hidden_size": 40}, {"intermediate_size": 40}):
        model = BertForPretraining(replace(MODERN, **sizes), torch.device("cpu"))
        with pytest.raises(ConfigError, match=r"model\.hidden_size: each of .* multiples of 32"):
            make_optimizer_alone(rule, model)


def test_the_cost_is_counted_and_dealt_evenly():
    """Products of [D, D] take 2 + 2 + 2 times D^3, those of [D, 4 D] 8 + 2 + 8."""
    matrices = 24 * [*4 * [(1024, 1024)], (4096, 1024), (1024, 4096)]
    by_hand = 5 * (24 * 4 * 6 * 1024**3 + 24 * 2 * 18 * 1024**3)
    assert sum(map(newton_schulz_flops, matrices)) == by_hand
    assert by_hand == pytest.approx(7.7e12, rel=0.01)
    assert assign_matrices(matrices, 1) == [0] * len(matrices)
    shares = [0] * 8
    for owner, shape in zip(assign_matrices(matrices, 8), matrices, strict=True):
        shares[owner] += newton_schulz_flops(shape)
    assert shares == [by_hand / 8] * 8
    assert max(Counter(assign_matrices(matrices, 1024)).values()) == 1
    assert assign_matrices([(8, 8)] * 9, 8) == [*range(8), 0]

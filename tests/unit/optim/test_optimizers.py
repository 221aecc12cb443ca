"""Optimizers against float64 arithmetic from the papers' formulas; their groups, and refusals.

That `adamw_update` and `lamb_update` say the same, `test_flat_kernels.py` shows.
"""

import numpy as np
import pytest
import torch
from torch import nn

from mlperf_bert.config.sections import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim import optimizers
from mlperf_bert.optim.optimizers import make_optimizer_alone, param_groups, trust_ratio

BETA_1, BETA_2, EPSILON, DECAY = 0.86, 0.975, 1e-6, 0.01
RATES = [0.004, 0.01, 0.02, 0.013, 0.005, 0.001]


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(19, 23)
        self.LayerNorm = nn.LayerNorm(23)


def lamb(x, mean, variance, rate, adapts):
    """You et al., arXiv 1904.00962, algorithm 2."""
    update = mean / (np.sqrt(variance) + EPSILON) + (DECAY * x if adapts else 0)
    norms = np.linalg.norm(x), np.linalg.norm(update)
    ratio = norms[0] / norms[1] if adapts and min(norms) > 0 else 1.0
    return x - rate * ratio * update


def adamw(x, mean, variance, rate, decays):
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, decay scaled by the rate."""
    step = mean / (np.sqrt(variance) + EPSILON) + (DECAY * x if decays else 0)
    return x - rate * step


RULES = {"lamb": lamb, "adamw": adamw}


def test_training_on_cuda_says_that_it_needs_triton(monkeypatch):
    monkeypatch.setattr(optimizers, "why_triton_cannot_compile", lambda: "there is no C compiler")
    with pytest.raises(ConfigError, match="needs Triton, but there is no C compiler; install what"):
        optimizers._kernels_for(torch.device("cuda"))


def _gradients(x, step):
    return np.random.default_rng([step, x.size]).normal(0.3, 1.0, x.shape)


def _by_formula(x, rule, decays):
    first, second = np.zeros_like(x), np.zeros_like(x)
    for step, rate in enumerate(RATES, start=1):
        gradient = _gradients(x, step)
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = BETA_2 * second + (1 - BETA_2) * gradient**2
        mean, variance = first / (1 - BETA_1**step), second / (1 - BETA_2**step)
        x = rule(x, mean, variance, rate, decays)
    return x


def _start(dtype):
    torch.manual_seed(5)
    return _Layer().to(dtype)


def _by_optimizer(name, dtype):
    layer = _start(dtype)
    constants = {"beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON, "weight_decay": DECAY}
    section = OptimSection(name=name, learning_rate=RATES[0], **constants)
    optimizer = make_optimizer_alone(section, layer)
    for step, rate in enumerate(RATES, start=1):
        optimizer.zero_grad()
        for parameter in layer.parameters():
            shape = np.empty(parameter.shape)
            parameter.grad = torch.from_numpy(_gradients(shape, step)).to(dtype)
        optimizer.step(torch.tensor(rate, dtype=torch.float64), torch.ones(()), torch.zeros(()))
    return layer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("name", RULES)
def test_optimizer_is_the_papers(name, dtype, tolerance):
    trained, again = (dict(_by_optimizer(name, dtype).named_parameters()) for _ in range(2))
    for key, parameter in _start(dtype).named_parameters():
        decays = key == "dense.weight"  # neither biases nor LayerNorm
        x = parameter.detach().double().numpy()
        expected = _by_formula(x, RULES[name], decays)
        moved = np.abs(expected - x).max()
        np.testing.assert_allclose(trained[key].detach(), expected, rtol=0, atol=tolerance)
        assert moved > 1e-2
        assert torch.equal(trained[key], again[key])


def test_trust_ratio_is_one_where_a_norm_is_zero():
    ratios = trust_ratio(torch.tensor([0.0, 2.0, 3.0, 0.0]), torch.tensor([1.0, 0.0, 2.0, 0.0]))
    assert ratios.tolist() == [1.0, 1.0, 1.5, 1.0]


def test_biases_and_layer_norm_are_exempt_and_frozen_parameters_left_out():
    model = _Layer()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    decayed, exempt = param_groups(model, 0.25)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [[names[id(each)] for each in group["params"]] for group in (decayed, exempt)]
    assert found == [["dense.weight"], ["dense.bias", "LayerNorm.weight", "LayerNorm.bias"]]
    assert (decayed["weight_decay"], decayed["layer_adaptation"]) == (0.25, True)
    assert (exempt["weight_decay"], exempt["layer_adaptation"]) == (0.0, False)
    shard = make_optimizer_alone(OptimSection(name="lamb", learning_rate=0.01), model).shard
    assert shard.adapted.tolist() == (shard.weight_decay > 0).tolist() == [True, *[False] * 3]

"""Every optimizer: agrees with its reference, repeats bit for bit, and learns a toy problem."""

import pytest
import torch
from torch import Tensor, nn

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import (
    OPTIMIZERS,
    adamw_update,
    lamb_update,
    make_optimizer_alone,
    param_groups,
    trust_ratio,
)

CONSTANTS = {"beta_1": 0.8, "beta_2": 0.817, "epsilon": 1e-9, "weight_decay": 0.1}
RATES = [0.01, 0.03, 0.02, 0.005]


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 5)
        self.LayerNorm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.LayerNorm(self.dense(inputs).tanh()))


def _toy() -> _Toy:
    torch.manual_seed(3)
    return _Toy()


def _config(name: str, **changes: object) -> OptimSection:
    return OptimSection(**{"name": name, "learning_rate": 0.01, **CONSTANTS, **changes})


def _set_grads(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _step(optimizer: FlatOptimizer, rate: float = 0.01) -> None:
    learning_rate = torch.tensor(rate, dtype=torch.float64)
    optimizer.step(learning_rate, gradient_factor=torch.ones(()), skip=torch.zeros(()))


def _train(name: str) -> nn.Module:
    """Steps with random gradients and a moving learning rate."""
    model = _toy()
    optimizer = make_optimizer_alone(_config(name), model)
    for step, rate in enumerate(RATES, start=1):
        optimizer.zero_grad()
        _set_grads(model, step)
        _step(optimizer, rate)
    return model


def _train_by_reference(name: str) -> nn.Module:
    model = _toy()
    groups = param_groups(model, CONSTANTS["weight_decay"])
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for step, rate in enumerate(RATES, start=1):
        _set_grads(model, step)
        for group in groups:
            constants = {**CONSTANTS, "weight_decay": group["weight_decay"], "lr": rate}
            for param in group["params"]:
                args = (param.data, param.grad, *moments[param], step)
                if name == "lamb":
                    adapt = group["layer_adaptation"]
                    lamb_update(*args, **constants, layer_adaptation=adapt)
                else:
                    adamw_update(*args, **constants)
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_class_agrees_with_the_reference(name: str) -> None:
    start, ours, reference = _toy(), _train(name), _train_by_reference(name)
    for before, fast, slow in zip(
        start.parameters(), ours.parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(fast, slow, rtol=2e-6, atol=2e-7)
        assert not torch.equal(before, fast)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_repeats_bit_for_bit(name: str) -> None:
    for first, second in zip(_train(name).parameters(), _train(name).parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learns_a_toy_problem(name: str) -> None:
    model = _toy()
    config = _config(name, beta_1=0.9, beta_2=0.99, epsilon=1e-6, weight_decay=0.0)
    optimizer = make_optimizer_alone(config, model)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        _step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_adamw_first_step_by_hand() -> None:
    param, grad = torch.tensor([2.0]), torch.tensor([-0.5])
    moments = torch.zeros(1), torch.zeros(1)
    adamw_update(
        param, grad, *moments, 1, lr=0.1, beta_1=0.9, beta_2=0.99, epsilon=0.5, weight_decay=0.2
    )
    # Bias correction gives back mean -0.5 and variance 0.25: 2 * (1 - 0.02) + 0.1 * 0.5 / 1.0.
    assert float(param) == pytest.approx(1.96 + 0.05, rel=1e-6)


def _lamb_by_hand(*, adaptation: bool) -> list[float]:
    param = torch.tensor([3.0, 4.0])
    moments = torch.zeros(2), torch.zeros(2)
    constants = {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 0.0, "weight_decay": 0.5}
    grad = torch.tensor([0.1, -0.1])
    lamb_update(param, grad, *moments, 1, lr=0.1, **constants, layer_adaptation=adaptation)
    return param.tolist()


def test_lamb_first_step_by_hand() -> None:
    # The bias-corrected step is (1, -1); with decay 0.5 * (3, 4) the update is (2.5, 1).
    ratio = 5 / (2.5**2 + 1) ** 0.5
    adapted = [3 - 0.1 * ratio * 2.5, 4 - 0.1 * ratio]
    assert _lamb_by_hand(adaptation=True) == pytest.approx(adapted, rel=1e-5)
    assert _lamb_by_hand(adaptation=False) == pytest.approx([2.75, 3.9], rel=1e-5)


def test_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    ratios = trust_ratio(torch.tensor([0.0, 2.0, 3.0, 0.0]), torch.tensor([1.0, 0.0, 2.0, 0.0]))
    assert ratios.tolist() == [1.0, 1.0, 1.5, 1.0]


def test_lamb_moves_a_tensor_that_starts_at_zero() -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer_alone(_config("lamb", weight_decay=0.0), model)
    model.weight.grad = torch.ones_like(model.weight)
    _step(optimizer, 0.1)
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), -0.1))


def test_registry_names_the_known_optimizers() -> None:
    config = _config("adamw")
    object.__setattr__(config, "name", "sgd")
    with pytest.raises(ConfigError, match="adamw, lamb"):
        make_optimizer_alone(config, _toy())


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(2, 2)
        self.key = nn.Linear(2, 2)
        self.LayerNorm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_biases_and_layer_norm_are_exempt_and_frozen_parameters_left_out() -> None:
    model = _Block()
    decayed, exempt = param_groups(model, 0.25)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["query.weight", "key.weight"]
    assert [names[id(p)] for p in exempt["params"]] == [
        "query.bias",
        "key.bias",
        "LayerNorm.weight",
        "LayerNorm.bias",
    ]
    assert (decayed["weight_decay"], decayed["layer_adaptation"]) == (0.25, True)
    assert (exempt["weight_decay"], exempt["layer_adaptation"]) == (0.0, False)

"""Every optimizer: agrees with its reference, repeats bit for bit, and learns a toy problem."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mlperf_bert.config import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.adamw import AdamW, adamw_update
from mlperf_bert.optim.lamb import LAMB, lamb_update, trust_ratio
from mlperf_bert.optim.param_groups import param_groups
from mlperf_bert.optim.registry import OPTIMIZERS, make_optimizer

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


def _train(name: str) -> nn.Module:
    """Steps with random gradients and a moving learning rate."""
    model = _toy()
    optimizer = make_optimizer(model, _config(name))
    for step, rate in enumerate(RATES, start=1):
        _set_grads(model, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
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
    optimizer = make_optimizer(
        model, _config(name, beta_1=0.9, beta_2=0.99, epsilon=1e-6, weight_decay=0.0)
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_survives_a_round_trip(name: str) -> None:
    model = _toy()
    optimizer = make_optimizer(model, _config(name))
    _set_grads(model, 1)
    optimizer.step()
    twin = copy.deepcopy(model)
    resumed = make_optimizer(twin, _config(name))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((model, optimizer), (twin, resumed)):
        _set_grads(each, 2)
        its_optimizer.step()
    for first, second in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(first, second)
    for state in optimizer.state.values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(isinstance(value, Tensor) for value in state.values())
        assert float(state["step"]) == 2


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
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    LAMB([param], lr=0.1, **CONSTANTS).step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.1))


@pytest.mark.parametrize("kind", [AdamW, LAMB])
def test_a_parameter_without_gradient_is_left_alone(kind: type[AdamW] | type[LAMB]) -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    kind([used, unused], lr=0.1, **CONSTANTS).step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))


def test_registry_names_the_known_optimizers() -> None:
    config = _config("adamw")
    object.__setattr__(config, "name", "sgd")
    with pytest.raises(ConfigError, match="adamw, lamb"):
        make_optimizer(_toy(), config)

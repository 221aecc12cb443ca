"""Apex's optimizers, by a stand-in with its interface: same updates, skips and checkpoints as ours.

The stand-in is written from apex's documentation and pull requests 819, 1237 and 1560; nothing here
runs apex itself.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graph_cases import CPU, ONE_RANK
from mlperf_bert.checkpoint.load import read_shards
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.checkpoint.writer import shard_tensors
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, copy_to_host
from mlperf_bert.optim.optimizers import BY_APEX, adamw_update, lamb_update, make_optimizer_alone
from mlperf_bert.parts.build import build_step, make_model
from mlperf_bert.step.warm_up import synthetic_batch, warm_up

RATES = [0.01, 0.03, 0.02, 0.005, 0.01]
CLOSE = {"rtol": 5e-6, "atol": 5e-7}


class _Fused(torch.optim.Optimizer):
    """What apex's two have in common: the skip buffer, and what a grad scaler is asked for."""

    def __init__(self, params: Iterable[Tensor], lr: float, **defaults: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(lr, dtype=torch.float32), **defaults})
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)

    def _ask(self, grad_scaler: Any) -> tuple[bool, Tensor]:
        """Whether the kernels do nothing, and the scale of the gradients."""
        found_inf = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
        scale = grad_scaler._get_scale_async()
        assert found_inf.dtype == scale.dtype == torch.float32
        self._dummy_overflow_buf.copy_(found_inf)
        return bool(self._dummy_overflow_buf == 1), scale

    def _constants(self, group: dict[str, Any]) -> dict[str, float]:
        """What the kernels read: float32 and int32 tensors, on the device."""
        assert group["lr"].dtype == torch.float32
        assert group["step"].dtype == torch.int32
        beta_1, beta_2 = group["betas"]
        rest = {"epsilon": group["eps"], "weight_decay": group["weight_decay"]}
        return {"lr": float(group["lr"]), "beta_1": beta_1, "beta_2": beta_2, **rest}


class FusedAdam(_Fused):
    """Counts a step before it knows whether to skip it, by what the buffer has of the last one."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert capturable and adam_w_mode and bias_correction
        assert not amsgrad and not master_weights
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def step(self, closure: None = None, *_: None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", torch.zeros(1, dtype=torch.int32))
            group["step"] += (self._dummy_overflow_buf != 1).int()
            is_skipped, scale = self._ask(grad_scaler)
            constants = self._constants(group)
            for each in () if is_skipped else group["params"]:
                each.grad.div_(scale)
                moments = self.state[each]["exp_avg"], self.state[each]["exp_avg_sq"]
                adamw_update(each.data, each.grad, *moments, int(group["step"]), **constants)


class FusedMixedPrecisionLamb(_Fused):
    """Limits the norm of all its gradients; adapts what decays, or everything as NVLAMB."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        assert bias_correction and adam_w_mode and grad_averaging
        assert not amsgrad and reduced_precision_dtype is None
        first = torch.tensor([step], dtype=torch.int32)
        defaults = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "step": first}
        super().__init__(params, lr, **defaults)
        self._max_grad_norm, self._use_nvlamb = max_grad_norm, use_nvlamb

    def step(self, closure: None = None, grad_scaler: Any = None) -> None:
        is_skipped, scale = self._ask(grad_scaler)
        every = [each.grad for group in self.param_groups for each in group["params"]]
        norm, limit = torch.cat([each.flatten() for each in every]).norm(), self._max_grad_norm
        clip = norm / (limit * scale) if norm > limit * scale else torch.ones(())
        for group in self.param_groups:
            group["step"] += (self._dummy_overflow_buf != 1).int()
            constants = self._constants(group)
            adapt = self._use_nvlamb or constants["weight_decay"] != 0
            for each in () if is_skipped else group["params"]:
                each.grad.div_(scale * clip)
                moments = self.state[each]["exp_avg"], self.state[each]["exp_avg_sq"]
                args = (each.data, each.grad, *moments, int(group["step"]))
                lamb_update(*args, **constants, layer_adaptation=adapt)
                each.grad.fill_(7.0)  # apex keeps the update there


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`apex.optimizers`, as if installed."""
    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    optimizers.FusedMixedPrecisionLamb = FusedMixedPrecisionLamb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return optimizers


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(6, 5)
        self.LayerNorm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)


def _make(name: str, implementation: str, **changes: Any) -> tuple[nn.Module, FlatOptimizer]:
    settings = {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-6, "weight_decay": 0.1, **changes}
    model = _Toy()
    config = OptimSection(name=name, implementation=implementation, learning_rate=0.01, **settings)
    return model, make_optimizer_alone(config, model)


def _train(
    model: nn.Module, optimizer: FlatOptimizer, steps: Iterable[int], skipped: Iterable[int]
) -> None:
    """Gradients lie elsewhere, as DDP's do, and are larger by 8 than they should be."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = 8 * torch.randn(parameter.shape, generator=generator)
            if step in skipped:
                parameter.grad.view(-1)[0] = torch.nan
        skip = torch.tensor(float(step in skipped))
        factor = torch.tensor(torch.nan if step in skipped else 0.125)
        rate = torch.tensor(RATES[step - 1], dtype=torch.float64)
        optimizer.step(rate, gradient_factor=factor, skip=skip)


def _state(optimizer: FlatOptimizer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optimizer.changed_by_step().items()}


@pytest.mark.parametrize("name", BY_APEX)
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("skipped", [(), (1,), (2, 4)])
@pytest.mark.usefixtures("apex")
def test_same_updates_as_ours(name: str, weight_decay: float, skipped: tuple[int, ...]) -> None:
    results = {}
    for implementation in ("ours", "apex"):
        model, optimizer = _make(name, implementation, weight_decay=weight_decay)
        _train(model, optimizer, range(1, 6), skipped)
        results[implementation] = {**_state(optimizer), **dict(model.named_parameters())}
    for key, ours in results["ours"].items():
        torch.testing.assert_close(results["apex"][key], ours, **CLOSE)
    assert results["apex"]["updates"] == 5 - len(skipped)


@pytest.mark.parametrize("name", BY_APEX)
@pytest.mark.parametrize("last", [2, 3])
@pytest.mark.usefixtures("apex")
def test_continues_from_a_checkpoint(name: str, last: int, tmp_path: Path) -> None:
    """To the bit from its own, also after a skipped step (2), and closely from one of ours."""
    model, whole = _make(name, "apex")
    _train(model, whole, range(1, 6), [2])
    for implementation in ("apex", "ours"):
        model, written = _make(name, implementation)
        _train(model, written, [1], [])
        before = _state(written)
        _train(model, written, [2], [2])  # changes no bit
        assert all(torch.equal(each, before[key]) for key, each in _state(written).items())
        _train(model, written, range(3, last + 1), [])
        path = tmp_path / f"{implementation}.safetensors"
        write_tensors(path, *shard_tensors(written, copy_to_host))
        model, read = _make(name, "apex")
        read_shards(read, [path])
        read.set_weights(written.exact_weights())
        _train(model, read, range(last + 1, 6), [])
        tolerance = {"rtol": 0, "atol": 0} if implementation == "apex" else CLOSE
        for key, value in whole.exact_weights().items():
            torch.testing.assert_close(read.exact_weights()[key], value, **tolerance)


@pytest.mark.usefixtures("apex")
def test_drives_the_step_of_a_config(tiny_config: Path) -> None:
    weights = {}
    for implementation in ("ours", "apex"):
        changes = ["run.device=cuda", f"optim.implementation={implementation}"]
        config = load_config(tiny_config, changes)
        model = make_model(config, 1, CPU)
        optimizer, step = build_step(model, config, ONE_RANK, CPU)
        warm_up(config, step, model, optimizer, CPU)
        for number in range(1, 5):
            step(number, (synthetic_batch(config),))
        weights[implementation] = optimizer.exact_weights()
    for name, ours in weights["ours"].items():
        torch.testing.assert_close(weights["apex"][name], ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.device=auto", "'auto'"),
        ("model.precision=bf16", "'bf16'; set .*'bf16_autocast'"),
        ("parallel.data_parallel=flat", "'flat'; set .*'ddp'"),
    ],
)
def test_settings_that_apex_cannot_serve(tiny_config: Path, override: str, words: str) -> None:
    overrides = ["run.device=cuda", "optim.implementation=apex", "model.precision=bf16_autocast"]
    assert load_config(tiny_config, overrides).optim.implementation == "apex"
    with pytest.raises(ConfigError, match=f"'apex' with .*{words}"):
        load_config(tiny_config, [*overrides, override])


def test_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("apex", "apex.optimizers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="'apex' and apex is not installed"):
        _make("adamw", "apex")


def test_apex_that_is_too_old_or_has_no_kernels(
    apex: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("requires\ncuda extensions")

    monkeypatch.delattr(apex, "FusedMixedPrecisionLamb")
    with pytest.raises(ConfigError, match="no attribute 'FusedMixedPrecisionLamb'"):
        _make("lamb", "apex")
    monkeypatch.setattr(apex, "FusedAdam", refuse)
    with pytest.raises(ConfigError, match=r"refuses \(requires cuda extensions\)"):
        _make("adamw", "apex")

"""Apex's optimizers, by a stand-in with its interface: same updates, skips and checkpoints as ours.

The stand-in is written from apex's interface and its pull requests 819, 1237, 1439 and 1560;
nothing here runs apex itself.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dali_stand_in
from graph_cases import CPU, ONE_RANK
from mlperf_bert.checkpoint.load import read_shards
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.checkpoint.writer import shard_tensors
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.distributed import session
from mlperf_bert.distributed.bucket_plan import plan_layout
from mlperf_bert.distributed.flat_reducer import FlatBuffers, ShardGroup, flat_weights
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.flat_optimizer import copy_to_host
from mlperf_bert.optim.optimizers import (
    BY_APEX,
    adamw_update,
    lamb_update,
    make_optimizer,
    trust_ratio,
)
from resume_cases import MISSED, run_train, weights
from support import CONFIGS, metrics_losses

RATES = [0.01, 0.03, 0.02, 0.005, 0.01]
CLOSE = {"rtol": 5e-6, "atol": 5e-7}


# The settings of both and their defaults.
IN_GROUPS = ("betas", "eps", "weight_decay")
FUSED_ADAM = {
    **{"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True},
    **{"weight_decay": 0.0, "amsgrad": False, "set_grad_none": True, "capturable": False},
    "master_weights": False,
}
FUSED_LAMB = {
    **{"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    **{"amsgrad": False, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0},
    **{"use_nvlamb": False, "reduced_precision_dtype": None},
}


class _Fused(torch.optim.Optimizer):
    """The common part of apex's two optimizers: the skip buffer and the use of a grad scaler."""

    def __init__(self, params, lr, **defaults):
        super().__init__(params, {"lr": torch.tensor(lr, dtype=torch.float32), **defaults})
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)

    def _ask(self, grad_scaler):
        """Whether the kernels do nothing, and the scale of the gradients."""
        found_inf = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
        scale = grad_scaler._get_scale_async()
        assert found_inf.dtype == scale.dtype == torch.float32
        self._dummy_overflow_buf.copy_(found_inf)
        return bool(self._dummy_overflow_buf == 1), scale

    def _constants(self, group):
        """The constants that the kernels read: float32 and int32 tensors on the device."""
        assert group["lr"].dtype == torch.float32
        assert group["step"].dtype == torch.int32
        beta_1, beta_2 = group["betas"]
        rest = {"epsilon": group["eps"], "weight_decay": group["weight_decay"]}
        return {"lr": float(group["lr"]), "beta_1": beta_1, "beta_2": beta_2, **rest}


class FusedAdam(_Fused):
    """Counts a step before it knows whether to skip it, by what the buffer has of the last one."""

    def __init__(self, params, lr=1e-3, **settings):
        given = FUSED_ADAM | settings
        assert given.keys() == FUSED_ADAM.keys()
        assert given["capturable"] and given["adam_w_mode"] and given["bias_correction"]
        super().__init__(params, lr, **{name: given[name] for name in IN_GROUPS})

    def step(self, closure=None, *_, grad_scaler=None):
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

    def __init__(self, params, lr=1e-3, step=0, **settings):
        given = FUSED_LAMB | settings
        assert given.keys() == FUSED_LAMB.keys()
        assert given["bias_correction"] and given["adam_w_mode"] and given["grad_averaging"]
        first = torch.tensor([step], dtype=torch.int32)
        super().__init__(params, lr, step=first, **{name: given[name] for name in IN_GROUPS})
        self._max_grad_norm, self._use_nvlamb = given["max_grad_norm"], given["use_nvlamb"]
        self.reduced_precision_dtype = given["reduced_precision_dtype"]
        self.param_groups_full_precision = []

    def step(self, closure=None, grad_scaler=None):
        is_skipped, scale = self._ask(grad_scaler)
        every = [each for group in self.param_groups for each in group["params"]]
        if not self.param_groups_full_precision:  # copies of the parameters that are reduced
            self.param_groups_full_precision = [
                {"params": [self._copied(each) for each in group["params"]]}
                for group in self.param_groups
            ]
        norm = torch.cat([each.grad.flatten().float() for each in every]).norm()
        limit = self._max_grad_norm
        clip = norm / (limit * scale) if norm > limit * scale else torch.ones(())
        for group, full in zip(self.param_groups, self.param_groups_full_precision, strict=True):
            group["step"] += (self._dummy_overflow_buf != 1).int()
            constants = self._constants(group)
            adapt = self._use_nvlamb or constants["weight_decay"] != 0
            tensors = zip(group["params"], full["params"], strict=True)
            for each, master in () if is_skipped else tensors:
                exact = each.data if master is None else master
                moments = self.state[each]["exp_avg"], self.state[each]["exp_avg_sq"]
                assert each.grad.dtype == each.dtype and moments[0].dtype == exact.dtype
                args = (each.grad.float() / (scale * clip), *moments, int(group["step"]))
                moved, at_rate_1 = exact.clone(), {**constants, "lr": 1.0}
                lamb_update(moved, *args, **at_rate_1, layer_adaptation=False)
                update = each.grad.copy_(exact - moved).float()  # apex keeps it there
                ratio = trust_ratio(exact.norm(), update.norm()) if adapt else 1.0
                each.data.copy_(exact.sub_(constants["lr"] * ratio * update))

    def _copied(self, parameter):
        return parameter.float() if parameter.dtype == self.reduced_precision_dtype else None


@pytest.fixture
def apex(monkeypatch):
    """`apex.optimizers`, as if installed."""
    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    optimizers.FusedMixedPrecisionLamb = FusedMixedPrecisionLamb
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    return optimizers


class _Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(6, 5)
        self.LayerNorm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)


def _make(name, implementation, dtype=torch.float32, **changes):
    """Weights of `dtype` are rounded from float32, in which the optimizer has them."""
    settings = {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-6, "weight_decay": 0.1, **changes}
    model = _Toy()
    config = OptimSection(name=name, implementation=implementation, learning_rate=0.01, **settings)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    layout = plan_layout(shapes, [list(shapes)], num_shards=1)
    exact = flat_weights(model, layout)
    buffers = FlatBuffers(model, layout, exact.to(dtype))
    others = exact, buffers.gradients, ShardGroup(ONE_RANK, 1, CPU)
    return model, make_optimizer(config, buffers, *others)


def _train(model, optimizer, steps, skipped):
    """Gradients lie elsewhere, as DDP's do, and are larger by 8 than they should be."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for parameter in model.parameters():
            gradient = 8 * torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
            if step in skipped:
                parameter.grad.view(-1)[0] = torch.nan
        skip = torch.tensor(float(step in skipped))
        factor = torch.tensor(torch.nan if step in skipped else 0.125)
        rate = torch.tensor(RATES[step - 1], dtype=torch.float64)
        optimizer.step(rate, gradient_factor=factor, skip=skip)


def _state(optimizer):
    return {name: value.clone() for name, value in optimizer.changed_by_step().items()}


@pytest.mark.parametrize("name", BY_APEX)
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("skipped", [(), (1,), (2, 4)])
@pytest.mark.usefixtures("apex")
def test_same_updates_as_ours(name, weight_decay, skipped):
    results = {}
    for implementation in ("ours", "apex"):
        model, optimizer = _make(name, implementation, weight_decay=weight_decay)
        _train(model, optimizer, range(1, 6), skipped)
        results[implementation] = {**_state(optimizer), **dict(model.named_parameters())}
    for key, ours in results["ours"].items():
        torch.testing.assert_close(results["apex"][key], ours, **CLOSE)
    assert results["apex"]["updates"] == 5 - len(skipped)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in BY_APEX), ("lamb", torch.bfloat16)],
)
@pytest.mark.parametrize("last", [2, 3])
@pytest.mark.usefixtures("apex")
def test_continues_from_a_checkpoint(name, last, dtype, tmp_path):
    """To the bit from its own, also after a skipped step (2), and closely from one of ours."""
    model, whole = _make(name, "apex", dtype)
    _train(model, whole, range(1, 6), [2])
    for implementation in ("apex", "ours"):
        model, written = _make(name, implementation, dtype)
        _train(model, written, [1], [])
        before = _state(written)
        _train(model, written, [2], [2])  # changes no bit
        assert all(torch.equal(each, before[key]) for key, each in _state(written).items())
        _train(model, written, range(3, last + 1), [])
        path = tmp_path / f"{implementation}.safetensors"
        write_tensors(path, *shard_tensors(written, copy_to_host))
        model, read = _make(name, "apex", dtype)
        read_shards(read, [path])
        read.set_weights(written.exact_weights())
        _train(model, read, range(last + 1, 6), [])
        for key, parameter in model.named_parameters():  # rounded masters
            assert torch.equal(parameter, read.exact_weights()[key].to(dtype))
        tolerance = {"rtol": 0, "atol": 0}
        if implementation == "ours":
            tolerance = CLOSE if dtype == torch.float32 else {"rtol": 0, "atol": 2e-4}
        for key, value in whole.exact_weights().items():
            torch.testing.assert_close(read.exact_weights()[key], value, **tolerance)


BOTH = ("data.loader=dali", "optim.implementation=apex")
# Of a shipped config what the made-up words and one CPU want otherwise.
SMALL = (
    *("model.vocab_size=69", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.intermediate_size=64", "model.max_position_embeddings=32", "data.max_seq_length=32"),
    *("data.max_predictions=5", "model.initializer_range=0.2"),
    *("parallel.ranks_per_node=1", "parallel.local_batch_size=16", "optim.learning_rate=0.02"),
    *("run.max_steps=20", "run.seed=3", "run.log_interval_steps=1", "eval.interval_samples=320"),
    *("mlperf.division=open", "mlperf.enforce_rules=false"),
)


def test_a_shipped_config_trains_with_both_and_goes_on(apex, monkeypatch, synthetic_data, tmp_path):
    """Captured steps, bf16, a balance policy and the flat reducer in a process group of one."""

    def join(*_, **__):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    dali_stand_in.install(monkeypatch)
    monkeypatch.setattr(session, "choose_device", lambda *_: CPU)
    monkeypatch.setattr(session, "init_process_group", join)
    losses, micro_batches = {}, []

    def train(name, *more, resume=None):
        before = dali_stand_in.Pipeline.runs
        shipped = CONFIGS / "dgxa100_1x8x56x1.toml"
        done = run_train(shipped, synthetic_data, tmp_path / name, *SMALL, *more, resume=resume)
        assert done == MISSED
        losses[name] = metrics_losses(tmp_path / name)
        micro_batches.append(dali_stand_in.Pipeline.runs - before)

    train("plain")
    train("dali", BOTH[0])
    train("both", *BOTH, "checkpoint.interval_steps=12", "checkpoint.keep_last=2")
    train("on", *BOTH, resume=tmp_path / "both/run_0/checkpoints/step_00000012")
    assert losses["dali"] == losses["plain"] and micro_batches[0] == 0
    assert len(losses["both"]) == 20 and min(micro_batches[1:3]) >= 20
    assert losses["both"] != losses["plain"]
    assert losses["both"] == pytest.approx(losses["plain"], abs=0.02)
    assert losses["plain"][0] - losses["plain"][-1] > 0.2
    assert losses["on"] == losses["both"][12:]
    assert weights(tmp_path / "on") == weights(tmp_path / "both")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.device=auto", "'auto'"),
        ("model.precision=fp8", "'fp8'; set .*'bf16_autocast'"),
        ("model.precision=bf16", "'bf16'; set .*'bf16_autocast', optim.name to 'lamb'"),
        ("parallel.data_parallel=zero1", "'zero1'; .*set .*'flat'"),
        ("parallel.data_parallel=flat parallel.allreduce_dtype=bf16", "'bf16'; set .*gradients"),
    ],
)
def test_settings_that_apex_cannot_serve(tiny_config, override, words):
    overrides = ["run.device=cuda", "optim.implementation=apex", "model.precision=bf16_autocast"]
    assert load_config(tiny_config, overrides).optim.implementation == "apex"
    with pytest.raises(ConfigError, match=f"'apex' does not work with .*{words}"):
        load_config(tiny_config, [*overrides, *override.split()])


def test_apex_that_is_missing_too_old_or_without_kernels(apex, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("requires\ncuda extensions")

    monkeypatch.delattr(apex, "FusedMixedPrecisionLamb")
    with pytest.raises(ConfigError, match="no attribute 'FusedMixedPrecisionLamb'"):
        _make("lamb", "apex")
    monkeypatch.setattr(apex, "FusedAdam", refuse)
    with pytest.raises(ConfigError, match=r"cannot create FusedAdam \(requires cuda extensions\)"):
        _make("adamw", "apex")
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    with pytest.raises(ConfigError, match="FusedAdam from NVIDIA apex, which is not installed"):
        _make("adamw", "apex")

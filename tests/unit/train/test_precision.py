"""Precisions: losses beside those of more bits, exact masters; steps without a host sync."""

import json
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from graph_cases import CPU, ONE_RANK
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.load import load_checkpoint
from mlperf_bert.checkpoint.manifest import read_state
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import TARGET_MISSED
from mlperf_bert.model import blocks
from mlperf_bert.model.bert import make_model
from mlperf_bert.step.captured import synthetic_batch
from mlperf_bert.step.eager import weights_dtype
from resume_cases import run_train
from step_cases import make_step
from support import metrics_losses, metrics_records

STEPS = 50
# Of a precision: the one whose losses it follows, and how near; losses near 4.2 or 5 fall by much
# more. A CPU multiplies FP8 matrices a number at a time, so those runs are short.
FP8_STEPS = ("run.max_steps=12", "schedule.decay_steps=12", "parallel.local_batch_size=8")
BESIDE = {
    "bf16": ("fp32", 0.02, ()),
    "bf16_autocast": ("fp32", 0.02, ()),
    "fp8": ("bf16", 0.01, FP8_STEPS),
}
SYNCS = (
    *(torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default),
    *(torch.ops.aten.nonzero.default, torch.ops.aten.equal.default),
)


@pytest.fixture(scope="module")
def run(tiny_config, synthetic_data, tmp_path_factory):
    """Run `mlperf_bert train` in this process, once for each choice of options; its directory."""
    directories = {}

    def train(*overrides):
        if overrides not in directories:
            options = (
                *(f"run.max_steps={STEPS}", f"schedule.decay_steps={STEPS}", "run.warm_up_steps=1"),
                *("model.initializer_range=0.1", "eval.interval_samples=10000", *overrides),
            )
            made = tmp_path_factory.mktemp("precision") / "run"
            assert run_train(tiny_config, synthetic_data, made, *options) == TARGET_MISSED
            directories[overrides] = made
        return directories[overrides]

    return train


@pytest.mark.parametrize("precision", BESIDE)
def test_losses_follow_those_of_more_bits(run, precision):
    other, tolerance, settings = BESIDE[precision]
    expected, found = (
        metrics_losses(run(f"model.precision={each}", *settings)) for each in (other, precision)
    )
    assert len(expected) == (12 if settings else STEPS) and found != expected
    assert found == pytest.approx(expected, abs=tolerance)
    assert expected[0] - min(expected) > 5 * tolerance  # a run that stood still would not pass
    of_run = metrics_records(run(f"model.precision={precision}", *settings))
    assert sum(record["skipped_steps"] for record in of_run) == 0


def test_a_checkpoint_has_the_masters_and_goes_over_to_another_precision(run, tiny_config):
    (found,) = run("model.precision=bf16").glob("run_0/checkpoints/step_*")
    weights = load_file(found / "model.safetensors")
    words = read_state(found).vocabulary_sha256
    assert {each.dtype for each in weights.values()} == {torch.float32}
    matrices = [each for each in weights.values() if each.dim() == 2]
    assert not any(torch.equal(each, each.bfloat16().float()) for each in matrices)
    for other in ("fp32", "bf16"):
        config = load_config(tiny_config, (f"model.precision={other}",))
        model = make_model(config, 1, CPU)
        optimizer, _ = make_step(model, config, ONE_RANK, CPU)
        load_checkpoint(optimizer, found, words, ONE_RANK)
        for name, weight in weights.items():
            assert torch.equal(model.get_parameter(name), weight.to(weights_dtype(other)))
        assert optimizer.scalar_state()["updates"] == STEPS


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast", "fp8"])
def test_a_checkpoint_is_evaluated_as_the_run_was(run, precision, synthetic_data, capsys):
    # A CPU multiplies FP8 matrices a number at a time: the smallest that it takes, few times.
    few = ("run.max_steps=6", "model.hidden_size=16", "model.intermediate_size=16")
    few = few if precision == "fp8" else ()
    found = run(f"model.precision={precision}", *few)
    capsys.readouterr()
    options = ["--checkpoint", str(found / "run_0/checkpoints"), "--data", str(synthetic_data)]
    assert main(["evaluate", *options, "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["mlm_accuracy"]
    assert accuracy == metrics_records(found)[-1]["mlm_accuracy"]


class NoSync(TorchDispatchMode):
    """Every operation by which the host reads a tensor raises."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        assert func not in SYNCS, f"the host waits for {func}"
        return func(*args, **(kwargs or {}))


def loss_on_a_gpu(hidden, weight, bias, labels, _):
    return blocks.cross_entropy_sum(F.linear(hidden, weight, bias), labels)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_autocast", "fp8"])
@pytest.mark.parametrize("policy", ["none", "after_allreduce", "bucket_before_allreduce"])
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_a_step_reads_nothing_back(tiny_config, rule, policy, precision, monkeypatch):
    options = (f"optim.name={rule}", f"clip.policy={policy}", f"model.precision={precision}")
    sizes = ("model.num_layers=1", "parallel.local_batch_size=2", "parallel.grad_accum_steps=2")
    config = load_config(tiny_config, (*options, *sizes, "model.attention=grouped"))
    model = make_model(config, 1, CPU)
    optimizer, step = make_step(model, config, ONE_RANK, CPU)
    batches = (synthetic_batch(config),) * 2
    # The CPU's kernels and its loss read numbers: there is no device to wait for.
    monkeypatch.setattr(blocks._MaskedLmLoss, "apply", loss_on_a_gpu)
    norms = torch.ones(len(optimizer.shard.adapted), 2)
    optimizer.kernels = Mock(lamb_norms=lambda *_: norms)
    with NoSync() as mode:
        step(1, batches)
        assert mode.num_operations > 100
        with pytest.raises(AssertionError, match="the host waits"):
            torch.ones(()).item()

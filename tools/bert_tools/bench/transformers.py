"""The measurement of `bench transformers`, which compares our training step with that library's.

Our step and the baselines train the same model on sequences of the same lengths. The baselines are
several ways of training with `transformers`. The main result compares our step with the fastest
baseline on this machine.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_tools.bench.baseline import (
    BASELINES,
    CLIP,
    OPTIM,
    OPTIMIZER_IN_WORDS,
    Compiled,
    Data,
    import_transformers,
    loss_function,
    make_baseline,
    masked_inputs,
    padded_inputs,
    prepare_baselines,
)
from bert_tools.bench.timing import InterleavedTimes
from bert_tools.bench.train import surroundings
from bert_tools.bench.training_run import (
    Update,
    own_stream,
    run_of_model,
    updates_of_lengths,
)
from bert_tools.common.length_histogram import real_lengths, run_shapes
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection, ScheduleSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.layers import pretraining_loss
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.eager import training_loss_sums

NUM_BATCHES = 4  # distinct batches, each of which is measured several times
WINDOW = 50  # batches that baselines sort at once, as group_by_length of `transformers` does
LARGEST_LOSS_DIFFERENCE = 1e-5
LARGEST_CUDA_DIFFERENCE = 1e-4  # also in fp32, but CUDA sums products in a different order
LARGEST_ROUNDED_DIFFERENCE = 0.05  # of a loss near 10, computed in 16 bits or fewer


def measure(
    config: RunConfig,
    device: torch.device,
    progress: ProgressLines,
    *,
    steps: int,
    seconds: float,
    compile: bool,
    by_layer: bool,
) -> dict[str, Any]:
    """Measure our step and the baselines, and return the JSON object of `bench transformers`.

    In precisions other than fp32, the baselines keep fp32 weights and run under autocast.

    Args:
        config: the config to measure, on one rank.
        device: the device to measure.
        progress: shows the user what is being measured.
        steps: largest number of steps to measure, of ours and of each baseline.
        seconds: time after which no new step starts, if every batch was measured at least once.
        compile: whether to also measure the baselines with torch.compile.
        by_layer: whether to compile each layer separately instead of the whole model.

    Raises:
        ConfigError: transformers is not installed, or its losses differ from ours.
    """
    progress.line("loading transformers")
    version = import_transformers().__version__
    config = as_both_train(config)
    compiled: Compiled = ("by layer" if by_layer else "whole") if compile else "no"
    with own_stream(device):
        return {
            "schema_version": 3,
            **_compared(config, compiled, device, progress, steps, seconds),
            **surroundings(config, device),
            "optimizer": OPTIMIZER_IN_WORDS,
            "compiled": compiled,
            "transformers": version,
        }


def _compared(
    config: RunConfig,
    compiled: Compiled,
    device: torch.device,
    progress: ProgressLines,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Check that the models have the same loss, measure their steps, and return the results."""
    progress.line(f"building our model and that of transformers on {device}")
    model, seed = config.model, int(config.run.seed)
    updates, by_length = mixed_and_sorted(config, min(NUM_BATCHES, steps))
    data = make_data(config, updates, by_length, device)
    exact = make_ours(exact_model(model), seed, device)
    loss_difference = check_same_loss(exact, make_baseline(exact, model, device), data)
    progress.line(
        "with equal weights, our model and that of transformers have the same loss "
        f"(difference {loss_difference:.1e})"
    )
    expected = {name: expected_loss(exact, name, data) for name in ("ours", *BASELINES)}
    ours = exact if model.precision == "fp32" else make_ours(model, seed, device)
    # The baselines are prepared before ours is trained, because they get its initial weights.
    torch.manual_seed(derive_seed(seed, "dropout"))
    contenders, reasons = prepare_baselines(
        partial(make_baseline, exact, model, device),
        data,
        model,
        device=device,
        compiled=compiled,
        check=lambda name, loss: check_loss(loss, expected[name], model),
        progress=progress,
    )
    progress.line(f"preparing our training step (step {config.run.step_mode})")
    del exact
    shapes = run_shapes(config) if config.run.step_mode == "captured" else ()
    with run_of_model(ours, config, updates, shapes) as run:
        check_loss(expected_loss(ours, "ours", data), expected["ours"], model)
        times = InterleavedTimes({"ours": run, **contenders}, len(updates), may_fail=BASELINES)
        contenders.clear()  # so that a baseline that runs out of memory can be freed
        times.run_once(progress)
        times.measure(num_steps=steps, seconds=seconds, progress=progress)
        lengths = [length for batch in data.batches for length in batch.lengths]
        return {
            **_measured(times, reasons | times.reasons, config.parallel.local_batch_size),
            "mean_length": sum(lengths) / len(lengths),
            "steps": times.num_steps,
            "loss_difference": loss_difference,
            "ours_attention": ours.attention.name,
            "ours_padding_share": run.padding_share,
        }


def as_both_train(config: RunConfig) -> RunConfig:
    """Return the config, changed to the training settings that the baselines use.

    The changed settings are the optimizer, a constant learning rate, gradient clipping, one
    micro-batch per update, and batches of mixed lengths.
    """
    return replace(
        config,
        data=replace(config.data, sampler="uniform", balance="none"),
        parallel=replace(config.parallel, grad_accum_steps=1),
        optim=OPTIM,
        schedule=ScheduleSection(
            decay_steps=config.max_steps, end_learning_rate=OPTIM.learning_rate
        ),
        clip=CLIP,
        mlperf=replace(config.mlperf, enforce_rules=False),
    )


def mixed_and_sorted(config: RunConfig, count: int) -> tuple[list[Update], list[Update]]:
    """Return `count` updates of mixed lengths, and `count` updates of similar lengths.

    Published lengths for WINDOW batches are sorted and cut into batches, of which `count` evenly
    spaced ones become the updates of similar lengths. For the mixed updates, the lengths of these
    batches are shuffled. Each update has one micro-batch. The two lists contain different words,
    but the same lengths.
    """
    size, seed = config.parallel.local_batch_size, int(config.run.seed)
    longest = config.data.max_seq_length
    lengths = real_lengths(WINDOW * size, longest, derive_seed(seed, "lengths"))
    chosen = (2 * np.arange(count) + 1) * WINDOW // (2 * count)
    by_length = np.sort(lengths).reshape(WINDOW, size)[chosen]
    mixed = np.random.default_rng(derive_seed(seed, "order")).permutation(by_length.ravel())
    shape = (count, 1, size)
    return (
        updates_of_lengths(config, mixed.reshape(shape)),
        updates_of_lengths(config, by_length.reshape(shape)),
    )


def make_data(
    config: RunConfig, updates: list[Update], by_length: list[Update], device: torch.device
) -> Data:
    """Copy the batches of `mixed_and_sorted` to the device, and add the baselines' inputs."""
    batches = [batch.to(device) for (batch,) in updates]
    sorted_batches = [batch.to(device) for (batch,) in by_length]
    architecture, length = config.model.architecture, config.data.max_seq_length
    return Data(
        batches=batches,
        by_length=sorted_batches,
        padded=[padded_inputs(batch, length, architecture) for batch in batches],
        sorted=[masked_inputs(batch, architecture) for batch in sorted_batches],
    )


def _measured(times: InterleavedTimes, reasons: dict[str, str], batch_size: int) -> dict[str, Any]:
    """Return the speed of our step and of each baseline, and the ratios of our speed to theirs.

    A baseline that did not run has None for its values, and the reason. A ratio of 2 means that our
    step is twice as fast. The range of a ratio consists of its lowest, median and highest value
    over several passes, and shows how much the machine's speed varied.
    """
    rates = {name: batch_size / times.seconds_per_batch(name) for name in times.names}
    others = {name: rate for name, rate in rates.items() if name != "ours"}
    strongest = max(others, key=others.__getitem__, default=None)
    found: dict[str, Any] = {"strongest": strongest, "ours_samples_per_s": rates["ours"]}
    for name in BASELINES:
        rate = rates.get(name)
        found[f"{name}_samples_per_s"] = rate
        found[f"{name}_reason"] = reasons.get(name)
        found[f"ratio_{name}"] = None if rate is None else rates["ours"] / rate
        if rate is not None:
            found[f"ratio_{name}_range"] = times.range_of_ratios(name, "ours")
    found["ratio_strongest"] = None if strongest is None else found[f"ratio_{strongest}"]
    return found


def make_ours(model: ModelSection, seed: int, device: torch.device) -> BertForPretraining:
    """Build our model in training mode, with weights for which the loss depends on attention.

    With BERT's own initializer range of 0.02, attention is nearly uniform, so the loss would not
    reveal wrong attention. With a range of hidden ** -0.5, it does. The padding rows of the word
    embedding, which the baselines lack, get a bias that makes their probability zero.
    """
    model = replace(model, initializer_range=model.hidden_size**-0.5)
    ours = BertForPretraining(model, device, seed=derive_seed(seed, "weights"))
    ours.dropout_seed = derive_seed(seed, "dropout")
    with torch.no_grad():
        ours.decoder_bias[model.vocab_size :] = -1e4
    return ours


def exact_model(model: ModelSection) -> ModelSection:
    """Return the model's settings with fp32 precision.

    The check of equal losses uses fp32, because rounding in other precisions would hide differences
    between the models.
    """
    if model.precision == "fp32":
        return model
    return replace(model, precision="fp32", attention="reference", kernels="reference")


@torch.no_grad()
def expected_loss(ours: BertForPretraining, name: str, data: Data) -> Tensor:
    """Compute our model's loss, without dropout, on the first batch of the contender `name`."""
    batch = data.by_length[0] if name.startswith("sorted") else data.batches[0]
    ours.eval()
    loss = pretraining_loss(training_loss_sums(ours, batch, ours.config.precision), batch)
    ours.train()
    return loss


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, baseline: Any, data: Data) -> float:
    """Return the largest difference between the losses of the two models, in nats.

    The losses are computed without dropout, on the first batch of two baselines. One of them
    computes logits for all positions, the other for the masked positions only. Raises ConfigError
    if `check_loss` finds that the losses differ, because times of different models cannot be
    compared.
    """
    baseline.eval()
    differences = [
        check_loss(
            loss_function(name, baseline, data)(0), expected_loss(ours, name, data), ours.config
        )
        for name in ("padded", "sorted")
    ]
    baseline.train()
    return max(differences)


def check_loss(loss: Tensor, expected: Tensor, model: ModelSection) -> float:
    """Return the absolute difference between two losses, in nats.

    Raises ConfigError if the difference is larger than rounding explains, in this model's precision
    and on this device.
    """
    limit = LARGEST_LOSS_DIFFERENCE if loss.device.type == "cpu" else LARGEST_CUDA_DIFFERENCE
    if model.precision != "fp32":
        limit = LARGEST_ROUNDED_DIFFERENCE
    difference = float((loss - expected).abs())
    if not difference <= limit:
        raise ConfigError(
            "bench transformers",
            f"the losses differ by {difference:.1e} although the weights are equal, so the times "
            "cannot be compared",
            "run tools/venv.sh dev to install the version of transformers that was tested",
        )
    return difference

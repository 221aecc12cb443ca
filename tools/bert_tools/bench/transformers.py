"""`bench transformers`: our training step and that of `transformers`, on the same lengths.

The headline compares ours with the strongest of the others on this machine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_tools.bench.baseline import (
    CLIP,
    OPPONENTS,
    OPTIM,
    OPTIMIZER_IN_WORDS,
    Compiled,
    Data,
    import_transformers,
    loss_function,
    make_baseline,
    make_opponents,
    masked_inputs,
    padded_inputs,
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
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.eager import training_loss_sums

NUM_BATCHES = 4  # distinct ones; each is measured several times
WINDOW = 50  # batches within which the other side sorts, as `transformers` does (group_by_length)
LARGEST_LOSS_DIFFERENCE = 1e-5
LARGEST_CUDA_DIFFERENCE = 1e-4  # fp32 too, but products are summed in other orders
LARGEST_ROUNDED_DIFFERENCE = 0.05  # difference of a loss near 10, in 16 bits or fewer


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    compile: bool,
    by_layer: bool,
) -> dict[str, Any]:
    """The JSON object of `bench transformers`, from at most `steps` steps per side.

    Once every batch was measured, no further step begins after `seconds`. The other side also goes
    through torch.compile, whole or `by_layer`, unless `compile` is false; in precisions other than
    fp32 it keeps fp32 weights and runs under autocast. Raises ConfigError if transformers is
    missing, or the two sides' losses differ.
    """
    version = import_transformers().__version__
    config = as_both_train(config)
    compiled: Compiled = ("by layer" if by_layer else "whole") if compile else "no"
    with own_stream(device):
        return {
            "schema_version": 3,
            **_compared(config, compiled, device, report, steps, seconds),
            **surroundings(config, device),
            "optimizer": OPTIMIZER_IN_WORDS,
            "compiled": compiled,
            "transformers": version,
        }


def _compared(
    config: RunConfig,
    compiled: Compiled,
    device: torch.device,
    report: Callable[[str], None],
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    model, seed = config.model, int(config.run.seed)
    updates, by_length = mixed_and_sorted(config, min(NUM_BATCHES, steps))
    data = make_data(config, updates, by_length, device)
    exact = make_ours(exact_model(model), seed, device)
    loss_difference = check_same_loss(exact, make_baseline(exact, model, device), data)
    report(f"equal weights, same samples, no dropout: losses differ by {loss_difference:.1e}")
    expected = {name: expected_loss(exact, name, data) for name in ("ours", *OPPONENTS)}
    ours = exact if model.precision == "fp32" else make_ours(model, seed, device)
    # Before ours is trained, as all get its weights.
    torch.manual_seed(derive_seed(seed, "dropout"))
    contenders, reasons = make_opponents(
        partial(make_baseline, exact, model, device),
        data,
        model,
        device=device,
        compiled=compiled,
        check=lambda name, loss: check_loss(loss, expected[name], model),
        report=report,
    )
    del exact
    shapes = run_shapes(config) if config.run.step_mode == "captured" else ()
    with run_of_model(ours, config, updates, shapes) as run:
        check_loss(expected_loss(ours, "ours", data), expected["ours"], model)
        report("measuring")
        times = InterleavedTimes({"ours": run, **contenders}, len(updates), may_fail=OPPONENTS)
        contenders.clear()  # one out of memory is freed, so nothing else may hold it
        times.run_once()
        times.measure(num_steps=steps, seconds=seconds, report=report)
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
    """The config with settings that both sides have: optimizer, clipping, rate, one micro-batch."""
    return replace(
        config,
        parallel=replace(config.parallel, grad_accum_steps=1),
        optim=OPTIM,
        schedule=ScheduleSection(
            decay_steps=config.max_steps, end_learning_rate=OPTIM.learning_rate
        ),
        clip=CLIP,
        mlperf=replace(config.mlperf, enforce_rules=False),
    )


def mixed_and_sorted(config: RunConfig, count: int) -> tuple[list[Update], list[Update]]:
    """`count` updates of one micro-batch, and as many of the same lengths, dealt by length.

    The published lengths of WINDOW batches are sorted and cut into batches. `count` evenly spread
    ones are taken, and their lengths are mixed for the first updates. Words differ.
    """
    size, seed = config.parallel.local_batch_size, int(config.run.seed)
    longest = config.data.max_seq_length
    lengths = real_lengths(WINDOW * size, longest, derive_seed(seed, "lengths"))
    evenly = (2 * np.arange(count) + 1) * WINDOW // (2 * count)
    by_length = np.sort(lengths).reshape(WINDOW, size)[evenly]
    mixed = np.random.default_rng(derive_seed(seed, "order")).permutation(by_length.ravel())
    shape = (count, 1, size)
    return (
        updates_of_lengths(config, mixed.reshape(shape)),
        updates_of_lengths(config, by_length.reshape(shape)),
    )


def make_data(
    config: RunConfig, updates: list[Update], by_length: list[Update], device: torch.device
) -> Data:
    """The batches of `mixed_and_sorted`, on the device, for both sides."""
    batches = [batch.to(device) for (batch,) in updates]
    in_order = [batch.to(device) for (batch,) in by_length]
    kind = config.model.architecture
    return Data(
        batches=batches,
        by_length=in_order,
        padded=[padded_inputs(batch, config.data.max_seq_length, kind) for batch in batches],
        sorted=[masked_inputs(batch, kind) for batch in in_order],
    )


def _measured(times: InterleavedTimes, reasons: dict[str, str], batch_size: int) -> dict[str, Any]:
    """Rates, ratios and reasons; None for opponents that do not run.

    A ratio is the number of our samples per sample of the other side; its range, the lowest, median
    and highest over visits of all batches, shows how steady the machine was.
    """
    rates = {name: batch_size / times.seconds_per_batch(name) for name in times.names}
    others = {name: rate for name, rate in rates.items() if name != "ours"}
    strongest = max(others, key=others.__getitem__, default=None)
    found: dict[str, Any] = {"strongest": strongest, "ours_samples_per_s": rates["ours"]}
    for name in OPPONENTS:
        rate = rates.get(name)
        found[f"{name}_samples_per_s"] = rate
        found[f"{name}_reason"] = reasons.get(name)
        found[f"ratio_{name}"] = None if rate is None else rates["ours"] / rate
        if rate is not None:
            found[f"ratio_{name}_range"] = times.range_of_ratios(name, "ours")
    found["ratio_strongest"] = None if strongest is None else found[f"ratio_{strongest}"]
    return found


def make_ours(model: ModelSection, seed: int, device: torch.device) -> BertForPretraining:
    """Our model in training mode. Its padded words, which the other side lacks, get no weight.

    At BERT's own initializer range of 0.02 attention is nearly uniform, and the losses would not
    reveal a wrong attention; at hidden ** -0.5 they do.
    """
    model = replace(model, initializer_range=model.hidden_size**-0.5)
    ours = BertForPretraining(model, device, seed=derive_seed(seed, "weights"))
    ours.dropout_seed = derive_seed(seed, "dropout")
    with torch.no_grad():
        ours.decoder_bias[model.vocab_size :] = -1e4
    return ours


def exact_model(model: ModelSection) -> ModelSection:
    """The model in fp32, which shows whether two models are equal; unchanged if already fp32."""
    if model.precision == "fp32":
        return model
    return replace(model, precision="fp32", attention="reference", kernels="reference")


@torch.no_grad()
def expected_loss(ours: BertForPretraining, name: str, data: Data) -> Tensor:
    """Loss of our model without dropout, of the first batch of the opponent of this name."""
    batch = data.by_length[0] if name.startswith("sorted") else data.batches[0]
    ours.eval()
    loss = pretraining_loss(training_loss_sums(ours, batch, ours.config.precision), batch)
    ours.train()
    return loss


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, baseline: Any, data: Data) -> float:
    """Largest difference of the first batch's losses in nats, without dropout and in fp32.

    Compares all positions and masked ones. Raises ConfigError if they differ (`check_loss`): times
    of different models mean nothing.
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
    """Difference of two losses in nats.

    Raises ConfigError if it exceeds rounding in the model's precision on its device.
    """
    limit = LARGEST_LOSS_DIFFERENCE if loss.device.type == "cpu" else LARGEST_CUDA_DIFFERENCE
    if model.precision != "fp32":
        limit = LARGEST_ROUNDED_DIFFERENCE
    difference = float((loss - expected).abs())
    if not difference <= limit:
        raise ConfigError(
            "bench transformers",
            f"with equal weights the two losses differ by {difference:.1e}",
            "nothing is compared; use a version of transformers that the tests pass with",
        )
    return difference

"""`bench against`: our training step and `transformers`' on the same samples, and their ratios."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bert_tools.bench.contenders import (
    OPTIMIZER_IN_WORDS,
    Data,
    fastest_attention,
    make_contenders,
    make_data,
    run_config,
)
from bert_tools.bench.other_peers import BUILDERS, OtherPeers, make_other_peers
from bert_tools.bench.peer import autocast_dtype, import_transformers, make_peer
from bert_tools.bench.timing import InterleavedTimes
from bert_tools.bench.training_run import own_stream, run_of_model
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.sections import ModelSection, StepMode
from mlperf_bert.data.length_histogram import run_shapes
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.step.eager import training_loss_sums

NUM_BATCHES = 4  # distinct ones; each is measured several times
LARGEST_LOSS_DIFFERENCE = 1e-5
LARGEST_CUDA_DIFFERENCE = 1e-4  # fp32 too, but products are summed in other orders
LARGEST_ROUNDED_DIFFERENCE = 0.05  # of a loss near 10, in 16 bits or fewer
PEER_ATTENTIONS = ("sdpa", "eager")
RATIOS = {  # name: our contender, the other side's
    "ratio_padded": ("ours", "padded"),
    "ratio_padded_to_longest": ("ours", "padded_to_longest"),
    "ratio_encoder": ("ours_encoder", "padded_encoder"),
    **{f"ratio_{name}": ("ours", name) for name in BUILDERS},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is compared, and for how long.

    `model.max_position_embeddings` is the maximum length. `steps` are measured steps a side at
    most; no further one begins after `seconds`, once every batch was measured. In another precision
    than fp32 the other side keeps fp32 weights and runs under autocast.
    """

    model: ModelSection
    batch_size: int
    threads: int
    steps: int
    seconds: float
    seed: int
    step_mode: StepMode
    with_compile: bool


def compare(
    settings: Settings, device: torch.device, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure, and return the JSON object of `bench against`; `report` gets lines of progress.

    Raises ConfigError when transformers is missing, or when the two sides' losses differ.
    """
    import_transformers()
    torch.set_num_threads(settings.threads)
    with own_stream(device):
        data = make_data(
            settings.model,
            num_batches=min(NUM_BATCHES, settings.steps),
            batch_size=settings.batch_size,
            seed=settings.seed,
            device=device,
        )
        return _compare_on(data, settings, device, report)


def _compare_on(
    data: Data, settings: Settings, device: torch.device, report: Callable[[str], None]
) -> dict[str, Any]:
    model, autocast = settings.model, autocast_dtype(settings.model.precision)
    exact = make_ours(exact_model(model), settings.seed, device)
    peer = make_peer(exact, model, device)
    loss_difference = check_same_loss(exact, peer, data)
    report(f"equal weights, same samples, no dropout: losses differ by {loss_difference:.1e}")
    expected = loss_without_dropout(exact, data)
    ours = exact if model.precision == "fp32" else make_ours(model, settings.seed, device)
    # Before ours is trained: all get its weights.
    torch.manual_seed(derive_seed(settings.seed, "dropout"))
    others = make_other_peers(
        partial(make_peer, exact, model, device),
        data,
        model.precision,
        device=device,
        with_compile=settings.with_compile,
        check=lambda loss: check_loss(loss, expected, model),
        report=report,
    )
    del exact
    config = run_config(model, settings.batch_size, settings.seed, settings.step_mode)
    shapes = run_shapes(config) if settings.step_mode == "captured" else ()
    with run_of_model(ours, config, data.updates, shapes) as run:
        check_loss(loss_without_dropout(ours, data), expected, model)
        contenders = make_contenders(run, peer, data)
        report(f"trying each attention of transformers: {', '.join(PEER_ATTENTIONS)}")
        peer_attention = fastest_attention(peer, contenders["padded"], PEER_ATTENTIONS)
        report(f"fastest is {peer_attention}; measuring")
        all_of_them = contenders | others.contenders
        may_fail = all_of_them.keys() - {"ours"}
        times = InterleavedTimes(all_of_them, len(data.batches), may_fail=may_fail)
        # What runs out of memory is freed: here alone nothing else may hold it.
        del peer, contenders, all_of_them
        others.contenders.clear()
        times.run_once()
        times.measure(num_steps=settings.steps, seconds=settings.seconds, report=report)
        return {
            **_measured(times, others, settings),
            "mean_length": data.mean_length,
            **facts(settings),
            "device": device.type,
            "steps": times.num_steps,
            "distinct_batches": len(data.batches),
            "loss_difference": loss_difference,
            "ours_attention": attention_name(ours),
            "ours_step_mode": settings.step_mode,
            "ours_padding_share": run.padding_share,
            "padded_attention": peer_attention,
            "padded_autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "optimizer": OPTIMIZER_IN_WORDS,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
        }


def _measured(times: InterleavedTimes, others: OtherPeers, settings: Settings) -> dict[str, Any]:
    """Rates, ratios and reasons; None for what does not run."""
    rates = {
        f"{name}_samples_per_s": settings.batch_size / times.seconds_per_batch(name)
        for name in times.names
    }
    optional = {name for pair in RATIOS.values() for name in pair} - {"ours"}
    reasons = others.reasons | times.reasons
    ratios_found = ratios(rates)
    return {
        "schema_version": 1,
        **rates,
        **ratios_found,
        **ratio_ranges(times),
        **{f"{name}_samples_per_s": None for name in optional if name not in times.names},
        **{name: None for name in RATIOS if name not in ratios_found},
        **{f"{name}_reason": reasons.get(name) for name in optional},
    }


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """How many samples we do while the other side does one."""
    return {
        name: rates[f"{ours}_samples_per_s"] / rates[f"{theirs}_samples_per_s"]
        for name, (ours, theirs) in RATIOS.items()
        if {f"{ours}_samples_per_s", f"{theirs}_samples_per_s"} <= rates.keys()
    }


def ratio_ranges(times: InterleavedTimes) -> dict[str, list[float]]:
    """Lowest, median and highest ratio of two neighbours in time: how steady the machine was."""
    return {
        f"{name}_range": times.range_of_ratios(theirs, ours)
        for name, (ours, theirs) in RATIOS.items()
        if {ours, theirs} <= set(times.names)
    }


def facts(settings: Settings) -> dict[str, int | float | str]:
    """What was asked for, as the JSON object has it."""
    model = settings.model
    return {
        "max_length": model.max_position_embeddings,
        "batch": settings.batch_size,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "vocabulary": model.vocab_size,
        "dropout": model.hidden_dropout,
        "precision": model.precision,
        "threads": settings.threads,
        "seed": settings.seed,
    }


def make_ours(model: ModelSection, seed: int, device: torch.device) -> BertForPretraining:
    """Our model in training mode. Its padded words, which the other side lacks, get no chance.

    At BERT's own initializer range of 0.02 attention is nearly uniform, and the losses would not
    tell another attention; at hidden ** -0.5 they do.
    """
    model = replace(model, initializer_range=model.hidden_size**-0.5)
    ours = BertForPretraining(model, device, seed=derive_seed(seed, "weights"))
    ours.dropout_seed = derive_seed(seed, "dropout")
    with torch.no_grad():
        ours.cls.predictions.bias[model.vocab_size :] = -1e4
    return ours


def attention_name(ours: BertForPretraining) -> str:
    """The attention policy that our model runs."""
    return ours.attention.name


def exact_model(model: ModelSection) -> ModelSection:
    """The same in fp32, in which two models can be told from one: as it is where it is in fp32."""
    if model.precision == "fp32":
        return model
    return replace(model, precision="fp32", attention="reference", kernels="reference")


@torch.no_grad()
def loss_without_dropout(ours: BertForPretraining, data: Data) -> Tensor:
    """Of our model on the first batch."""
    batch = data.batches[0]
    ours.eval()
    loss = pretraining_loss(training_loss_sums(ours, batch, ours.config.precision), batch)
    ours.train()
    return loss


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, peer: Any, data: Data) -> float:
    """How far the losses of the first batch are apart in nats at most, without dropout.

    Every attention of the other side is held against ours, on both of its paddings, all in fp32.
    Raises ConfigError where they differ (`check_loss`): times of different models mean nothing.
    """
    our_loss = loss_without_dropout(ours, data)
    peer.eval()
    differences = []
    for attention in PEER_ATTENTIONS:
        peer.set_attn_implementation(attention)
        for inputs in (data.padded[0], data.padded_to_longest[0]):
            differences.append(check_loss(peer(**inputs).loss, our_loss, ours.config))
    peer.train()
    return max(differences)


def check_loss(loss: Tensor, expected: Tensor, model: ModelSection) -> float:
    """How far two losses are apart in nats.

    Raises ConfigError above what rounding can do, in the model's precision and on its device.
    """
    limit = LARGEST_LOSS_DIFFERENCE if loss.device.type == "cpu" else LARGEST_CUDA_DIFFERENCE
    if model.precision != "fp32":
        limit = LARGEST_ROUNDED_DIFFERENCE
    difference = float((loss - expected).abs())
    if not difference <= limit:
        raise ConfigError(
            "bench against",
            f"with equal weights the two losses differ by {difference:.1e}",
            "nothing is compared; use a version of transformers that the tests pass with",
        )
    return difference

"""`bench against`: our training step and `transformers`' on the same samples, and their ratios."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlperf_bert.bench.contenders import (
    OPTIMIZER_IN_WORDS,
    Data,
    fastest_attention,
    make_contenders,
    make_data,
)
from mlperf_bert.bench.peer import import_transformers, make_peer
from mlperf_bert.bench.timing import InterleavedTimes
from mlperf_bert.config import ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import loss_sums, pretraining_loss
from mlperf_bert.model.layers import SelfAttention
from mlperf_bert.seeds import derive_seed

NUM_BATCHES = 4  # distinct ones; each is measured several times
LARGEST_LOSS_DIFFERENCE = 1e-5
PEER_ATTENTIONS = ("sdpa", "eager")
RATIOS = {  # name: our contender, the other side's
    "ratio_padded": ("ours", "padded"),
    "ratio_padded_to_longest": ("ours", "padded_to_longest"),
    "ratio_encoder": ("ours_encoder", "padded_encoder"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is compared, and for how long.

    `model.max_position_embeddings` is the maximum length. `steps` are measured steps a side at
    most; no further one begins after `seconds`, once every batch was measured.
    """

    model: ModelSection
    batch_size: int
    threads: int
    steps: int
    seconds: float
    seed: int


def compare(
    settings: Settings, device: torch.device, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure, and return the JSON object of `bench against`; `report` gets lines of progress.

    Raises ConfigError when transformers is missing, or when the two sides' losses differ.
    """
    transformers = import_transformers()
    torch.set_num_threads(settings.threads)
    model = settings.model
    data = make_data(
        model,
        num_batches=min(NUM_BATCHES, settings.steps),
        batch_size=settings.batch_size,
        seed=settings.seed,
        device=device,
    )
    ours = make_ours(model, settings.seed, device)
    peer = make_peer(ours, model, device)
    loss_difference = check_same_loss(ours, peer, data)
    report(f"equal weights, same samples, no dropout: losses differ by {loss_difference:.1e}")

    torch.manual_seed(derive_seed(settings.seed, "dropout"))
    contenders = make_contenders(ours, peer, data)
    report(f"trying each attention of transformers: {', '.join(PEER_ATTENTIONS)}")
    peer_attention = fastest_attention(peer, contenders["padded"], PEER_ATTENTIONS)
    report(f"fastest is {peer_attention}; measuring")
    for run in contenders.values():  # warm-up
        run(0)
    times = InterleavedTimes(contenders, len(data.batches))
    times.measure(num_steps=settings.steps, seconds=settings.seconds, report=report)

    rates = {
        f"{name}_samples_per_s": settings.batch_size / times.seconds_per_batch(name)
        for name in contenders
    }
    return {
        "schema_version": 1,
        **rates,
        **ratios(rates),
        **ratio_ranges(times),
        "unpadded_peer_samples_per_s": None,
        "unpadded_peer_reason": "transformers runs without padding only through flash-attn on "
        f"CUDA; this run is on {device.type}",
        "mean_length": data.mean_length,
        **facts(settings),
        "device": device.type,
        "steps": times.num_steps,
        "distinct_batches": len(data.batches),
        "loss_difference": loss_difference,
        "ours_attention": attention_name(ours),
        "padded_attention": peer_attention,
        "optimizer": OPTIMIZER_IN_WORDS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """How many samples we do while the other side does one."""
    return {
        name: rates[f"{ours}_samples_per_s"] / rates[f"{theirs}_samples_per_s"]
        for name, (ours, theirs) in RATIOS.items()
    }


def ratio_ranges(times: InterleavedTimes) -> dict[str, list[float]]:
    """Lowest, median and highest ratio of two neighbours in time: how steady the machine was."""
    return {
        f"{name}_range": times.range_of_ratios(theirs, ours)
        for name, (ours, theirs) in RATIOS.items()
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
    with torch.no_grad():
        ours.cls.predictions.bias[model.vocab_size :] = -1e4
    return ours


def attention_name(ours: BertForPretraining) -> str:
    """The attention policy that our model runs."""
    first = next(module for module in ours.modules() if isinstance(module, SelfAttention))
    return first.attend.__name__


@torch.no_grad()
def check_same_loss(ours: BertForPretraining, peer: Any, data: Data) -> float:
    """How far the losses of the first batch are apart in nats at most, without dropout.

    Every attention of the other side is held against ours, on both of its paddings.
    Raises ConfigError above LARGEST_LOSS_DIFFERENCE: times of different models mean nothing.
    """
    batch = data.batches[0]
    ours.eval()
    peer.eval()
    our_loss = pretraining_loss(loss_sums(ours(batch), batch), batch)
    difference = 0.0
    for attention in PEER_ATTENTIONS:
        peer.set_attn_implementation(attention)
        for inputs in (data.padded[0], data.padded_to_longest[0]):
            difference = max(difference, float((our_loss - peer(**inputs).loss).abs()))
    ours.train()
    peer.train()
    if not difference <= LARGEST_LOSS_DIFFERENCE:
        raise ConfigError(
            "bench against",
            f"with equal weights the two losses differ by {difference:.1e}",
            "nothing is compared; use a version of transformers that the tests pass with",
        )
    return difference

"""What `bench against` times: batches for both sides, and a function for each measured thing.

Shape letters: B sequences, S padded length, T tokens, D hidden.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.bench.peer import PaddedStep, padded_inputs, usual_adamw
from mlperf_bert.bench.synthetic import SHORTEST, synthetic_samples
from mlperf_bert.bench.timing import Contender, seconds_of
from mlperf_bert.config import ClipSection, ModelSection, OptimSection
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.shards import IntArray
from mlperf_bert.distributed.clipping import make_clipping
from mlperf_bert.distributed.wire import plain_wire
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.registry import make_optimizer_alone
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step import EagerStep

MAX_PREDICTIONS = 76  # of a sample, as in MLPerf's data
OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
CLIP = ClipSection()
OPTIMIZER_IN_WORDS = f"fused AdamW after clipping to norm {CLIP.max_norm:g}, on both sides"


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The same samples for both sides, already on the device: no step waits for its batch."""

    batches: list[UnpaddedBatch]
    padded: list[dict[str, Tensor]]  # to the maximum length
    padded_to_longest: list[dict[str, Tensor]]  # to the longest of each batch
    mean_length: float


def make_data(
    model: ModelSection, *, num_batches: int, batch_size: int, seed: int, device: torch.device
) -> Data:
    """Distinct batches of published lengths, at most model.max_position_embeddings."""
    max_length = model.max_position_embeddings
    lengths = real_lengths(num_batches * batch_size, max_length, derive_seed(seed, "lengths"))
    batches = []
    for number, part in enumerate(np.split(lengths, num_batches)):
        samples = synthetic_samples(
            part,
            vocab_size=model.vocab_size,
            max_predictions=MAX_PREDICTIONS,
            seed=derive_seed(seed, "samples", number),
        )
        num_masked = int(samples.masked_counts.sum())
        ids = np.arange(number * batch_size, (number + 1) * batch_size)
        batch = make_batch(samples, ids, mlm_denominator=num_masked, nsp_denominator=batch_size)
        batches.append(batch.to(device))
    return Data(
        batches=batches,
        padded=[padded_inputs(batch, max_length) for batch in batches],
        padded_to_longest=[padded_inputs(batch, batch.max_seqlen) for batch in batches],
        mean_length=float(lengths.mean()),
    )


def real_lengths(count: int, max_length: int, seed: int) -> IntArray:
    """Published lengths, int64 [count]; for another maximum than theirs, in proportion."""
    published = wikipedia_lengths()
    scaled = published.draw_evenly(count, seed) * max_length
    return np.maximum(-(-scaled // published.max_length), SHORTEST)


def make_contenders(ours: BertForPretraining, peer: Any, data: Data) -> dict[str, Contender]:
    """Whole steps and encoders (forward and backward), by the name of what is timed."""
    device = next(ours.parameters()).device
    optimizer = make_optimizer_alone(OPTIM, ours)
    our_step = EagerStep(
        ours,
        optimizer,
        torch.tensor([0.0, OPTIM.learning_rate], dtype=torch.float64, device=device),
        make_clipping(CLIP, ours, plain_wire(device)),
        ours.step,
        ours.config.precision,
    )
    padded_step = PaddedStep(peer, usual_adamw(peer, OPTIM, "fused"), CLIP.max_norm)
    return {
        "ours": lambda number: our_step(1, (data.batches[number],)).loss,
        "padded": lambda number: padded_step(data.padded[number]),
        "padded_to_longest": lambda number: padded_step(data.padded_to_longest[number]),
        "ours_encoder": _our_encoder(ours, data),
        "padded_encoder": _padded_encoder(peer, data),
    }


def fastest_attention(peer: Any, step: Contender, names: tuple[str, ...]) -> str:
    """Set `peer` to that of its attention implementations whose step is fastest, and name it."""
    seconds = dict.fromkeys(names, float("inf"))
    for name in names * 2:  # the second time warmed up; the lower counts, as noise only adds
        peer.set_attn_implementation(name)
        seconds[name] = min(seconds[name], seconds_of(step, 0))
    fastest = min(seconds, key=seconds.__getitem__)
    peer.set_attn_implementation(fastest)
    return fastest


def _our_encoder(ours: BertForPretraining, data: Data) -> Contender:
    """Forward and backward of embeddings and all layers, every token's output computed."""
    hidden_size = ours.config.hidden_size
    gradients = [_random((len(batch.input_ids), hidden_size), batch) for batch in data.batches]

    def run(number: int) -> Tensor:
        ours.zero_grad()
        batch = data.batches[number]
        hidden: Tensor = ours.bert(batch, ours.dropout_keys(batch))
        torch.autograd.backward(hidden, gradients[number])
        return hidden.detach()[0, 0]

    return run


def _padded_encoder(peer: Any, data: Data) -> Contender:
    """The same of the other side, which computes padding too."""
    inputs = [
        {name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        for padded in data.padded
    ]
    gradients = [
        _random((*padded["input_ids"].shape, peer.config.hidden_size), batch)
        for padded, batch in zip(inputs, data.batches, strict=True)
    ]

    def run(number: int) -> Tensor:
        peer.zero_grad()
        hidden: Tensor = peer.bert(**inputs[number]).last_hidden_state
        torch.autograd.backward(hidden, gradients[number])
        return hidden.detach()[0, 0, 0]

    return run


def _random(shape: tuple[int, ...], batch: UnpaddedBatch) -> Tensor:
    return torch.randn(shape, device=batch.input_ids.device)

"""What `bench against` times: batches for both sides, and a function for each measured thing.

Shape letters: B sequences, S padded length, T tokens, D hidden.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_tools.bench.batches import Update, make_updates
from bert_tools.bench.out_of_memory import free_memory
from bert_tools.bench.peer import PeerStep, autocast, autocast_dtype, padded_inputs, usual_adamw
from bert_tools.bench.timing import Contender, seconds_of
from bert_tools.bench.training_run import TrainingRun
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import (
    MAX_PREDICTIONS,
    CheckpointSection,
    ClipSection,
    DataSection,
    EvalSection,
    MlperfSection,
    ModelSection,
    OptimSection,
    ParallelSection,
    Precision,
    RunSection,
    ScheduleSection,
    StepMode,
)
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.length_histogram import real_lengths
from mlperf_bert.model.bert import BertForPretraining

OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
CLIP = ClipSection()
OPTIMIZER_IN_WORDS = f"fused AdamW after clipping to norm {CLIP.max_norm:g}, on both sides"
_MOST_STEPS = 1000  # with a learning rate; a contender starts again behind them


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The same samples for both sides, already on the device: no step waits for its batch."""

    updates: list[Update]  # of one batch each, on the host
    batches: list[UnpaddedBatch]  # the same
    padded: list[dict[str, Tensor]]  # to the maximum length
    padded_to_longest: list[dict[str, Tensor]]  # to the longest of each batch
    mean_length: float


def run_config(model: ModelSection, batch_size: int, seed: int, step_mode: StepMode) -> RunConfig:
    """Our side as a run; the learning rate is constant, as the other side's."""
    return RunConfig(
        run=RunSection(max_steps=_MOST_STEPS, seed=seed, step_mode=step_mode),
        model=model,
        data=DataSection(
            max_seq_length=model.max_position_embeddings, max_predictions=MAX_PREDICTIONS
        ),
        parallel=ParallelSection(local_batch_size=batch_size),
        optim=OPTIM,
        schedule=ScheduleSection(decay_steps=_MOST_STEPS, power=0.0),
        clip=CLIP,
        eval=EvalSection(target_accuracy=0.72),
        mlperf=MlperfSection(),
        checkpoint=CheckpointSection(),
    )


def make_data(
    model: ModelSection, *, num_batches: int, batch_size: int, seed: int, device: torch.device
) -> Data:
    """Distinct batches of published lengths, at most model.max_position_embeddings."""
    max_length = model.max_position_embeddings
    lengths = real_lengths(num_batches * batch_size, max_length, derive_seed(seed, "lengths"))
    updates = make_updates(
        lengths,
        num_batches,
        forwards=1,
        vocab_size=model.vocab_size,
        max_predictions=MAX_PREDICTIONS,
        seed=seed,
    )
    batches = [batch.to(device) for (batch,) in updates]
    return Data(
        updates=updates,
        batches=batches,
        padded=[padded_inputs(batch, max_length) for batch in batches],
        padded_to_longest=[padded_inputs(batch, batch.max_seqlen) for batch in batches],
        mean_length=float(lengths.mean()),
    )


def make_contenders(ours: TrainingRun, peer: Any, data: Data) -> dict[str, Contender]:
    """Whole steps and encoders (forward and backward), by the name of what is timed."""
    precision = ours.config.model.precision
    step = peer_step(peer, lambda inputs: peer(**inputs).loss, precision)
    return {
        "ours": ours,
        "padded": lambda number: step(data.padded[number]),
        "padded_to_longest": lambda number: step(data.padded_to_longest[number]),
        "ours_encoder": _our_encoder(ours.model, data),
        "padded_encoder": _padded_encoder(peer, data, precision),
    }


def peer_step(peer: Any, loss_of: Callable[[Any], Tensor], precision: Precision) -> PeerStep:
    """A step of the other side with its optimizer, in its way to compute in a precision of ours."""
    optimizer = usual_adamw(peer, OPTIM, "fused")
    return PeerStep(peer, loss_of, optimizer, CLIP.max_norm, autocast_dtype(precision))


def fastest_attention(peer: Any, step: Contender, names: tuple[str, ...]) -> str:
    """Set `peer` to that of its attention implementations whose step is fastest, and name it.

    One that runs out of memory is not.
    """
    seconds = dict.fromkeys(names, float("inf"))
    for name in names * 2:  # the second time warmed up; the lower counts, as noise only adds
        peer.set_attn_implementation(name)
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds[name] = min(seconds[name], seconds_of(step, 0))
        free_memory()
    fastest = min(seconds, key=seconds.__getitem__)
    peer.set_attn_implementation(fastest)
    return fastest


def _our_encoder(ours: BertForPretraining, data: Data) -> Contender:
    """Forward and backward of embeddings and all layers, every token's output computed."""
    config = ours.config
    gradients = [
        _random((len(batch.input_ids), config.hidden_size), batch) for batch in data.batches
    ]
    dtype = torch.bfloat16 if config.precision == "bf16_autocast" else None

    def run(number: int) -> Tensor:
        batch = data.batches[number]
        try:
            with autocast(batch.input_ids.device, dtype):
                hidden: Tensor = ours.bert(batch, ours.dropout_keys(batch))
            torch.autograd.backward(hidden, gradients[number].to(hidden.dtype))
        finally:
            ours.zero_grad()
        return hidden.detach()[0, 0]

    return run


def _padded_encoder(peer: Any, data: Data, precision: Precision) -> Contender:
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
        try:
            with autocast(gradients[number].device, autocast_dtype(precision)):
                hidden: Tensor = peer.bert(**inputs[number]).last_hidden_state
            torch.autograd.backward(hidden, gradients[number].to(hidden.dtype))
        finally:
            peer.zero_grad()
        return hidden.detach()[0, 0, 0]

    return run


def _random(shape: tuple[int, ...], batch: UnpaddedBatch) -> Tensor:
    return torch.randn(shape, device=batch.input_ids.device)

"""The other side of `bench against`: `transformers`' BertForPreTraining on padded batches.

Shape letters: B sequences, S padded length, D hidden.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection, OptimSection, Precision
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch
from mlperf_bert.optim.optimizers import param_groups


def import_transformers() -> ModuleType:
    """The `transformers` package. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("transformers")  # untyped: its own types take mypy minutes
    except ImportError as error:
        remedy = "run in the checkout: tools/venv.sh dev"
        raise ConfigError("bench against", f"needs transformers ({error})", remedy) from None


def make_peer(ours: nn.Module, config: ModelSection, device: torch.device) -> Any:
    """A BertForPreTraining of `config` with the weights of our model, in training mode.

    Its vocabulary is config.vocab_size, without our padded words. Raises ConfigError for a model
    of masked LM alone, which has not its weights.
    """
    if config.objective != "mlm_nsp":
        problem = f"is {config.objective!r}, the other model is BertForPreTraining"
        raise ConfigError("model.objective", problem, "compare with 'mlm_nsp'")
    transformers = import_transformers()
    peer_config = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        hidden_dropout_prob=config.hidden_dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        layer_norm_eps=config.layer_norm_epsilon,
    )
    with device:  # so that its own initial weights are drawn there
        peer = transformers.BertForPreTraining(peer_config)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.copy_(weights[name][: len(parameter)])  # names are the same on both sides
    return peer.train()


def padded_inputs(batch: UnpaddedBatch, padded_length: int) -> dict[str, Tensor]:
    """What BertForPreTraining takes: int64 [B, S] tensors, S = padded_length, on batch's device."""
    device = batch.input_ids.device
    shape = (len(batch.lengths), padded_length)
    rows = torch.arange(shape[0], device=device)
    places = (
        rows.repeat_interleave(torch.tensor(batch.lengths, device=device)),
        batch.position_ids,
    )
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels[batch.masked_token_index] = batch.labels

    def pad(values: Tensor, padding: int) -> Tensor:
        return torch.full(shape, padding, device=device).index_put(places, values)

    return {
        "input_ids": pad(batch.input_ids, 0),
        "token_type_ids": pad(batch.token_type_ids, 0),
        "attention_mask": pad(torch.ones_like(batch.input_ids), 0),
        "labels": pad(labels, IGNORED),
        "next_sentence_label": batch.next_sentence_label,
    }


def usual_adamw(
    model: nn.Module, rule: OptimSection, how: Literal["foreach", "fused"]
) -> torch.optim.Optimizer:
    """torch's AdamW with a rule's constants, in one of its ways to do all tensors together."""
    groups = param_groups(model, rule.weight_decay)
    return torch.optim.AdamW(
        [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
        lr=rule.learning_rate,
        betas=(rule.beta_1, rule.beta_2),
        eps=rule.epsilon,
        foreach=how == "foreach",
        fused=how == "fused",
    )


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """What users of `transformers` let products be computed in; None: in fp32, the weights' own.

    Their weights stay fp32 in every precision.
    """
    if precision == "fp32":
        return None
    return torch.float16 if precision == "fp16" else torch.bfloat16


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Products in `dtype`, or as they are."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


class PeerStep:
    """One update as users of `transformers` write it: forward, backward, clip, optimizer."""

    def __init__(
        self,
        peer: Any,
        loss_of: Callable[[Any], Tensor],
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        dtype: torch.dtype | None,
    ) -> None:
        self._peer = peer
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._dtype = dtype

    def __call__(self, inputs: Any) -> Tensor:
        """Update once; the loss before it. No gradient is left, whatever happens."""
        try:
            with autocast(self._peer.device, self._dtype):
                loss = self._loss_of(inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._peer.parameters(), self._max_norm)
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()
        return loss.detach()

"""The other side of `bench transformers`: `transformers`' BertForPreTraining in every form.

For the modern architecture it is their ModernBertForMaskedLM, in the forms that run without its own
unpadded path, which needs another library's kernels.

The usual form pads all sequences to the maximum and computes logits of all positions. The fast form
computes logits of the masked positions only and pads to the longest in a batch of similar lengths.
Both also run compiled. The unpadded form has one row of T tokens: attention goes through its
AttentionInterface to torch's nested tensors, whose fused kernels on CUDA take sequences of unequal
length and dropout; all else is its own code, including the logits of all T tokens.

Shape letters: B sequences, S padded length, T tokens, N heads, H head size.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_tools.bench.timing import Contender, free_memory, reason_of
from mlperf_bert.config.sections import (
    Architecture,
    ClipSection,
    ModelSection,
    OptimSection,
    Precision,
)
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch
from mlperf_bert.errors import ConfigError
from mlperf_bert.extras import require_packages
from mlperf_bert.optim.optimizers import param_groups

OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
CLIP = ClipSection()
OPTIMIZER_IN_WORDS = f"fused AdamW after clipping to norm {CLIP.max_norm:g}, on both sides"
ATTENTION_NAME = "mlperf_bert_nested"
OPPONENTS = (
    "sorted",  # masked positions, sorted by length
    "sorted_compiled",  # the same through torch.compile
    "padded",  # as people feed it: all positions, padded to the maximum
    "padded_compiled",  # the same through torch.compile
    "unpadded_baseline",  # without padding, all positions
)
Compiled = Literal["no", "whole", "by layer"]
LossOf = Callable[[int], Tensor]
"""The loss of the batch of this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Samples for both sides, already on the device, so that no step waits for them."""

    batches: list[UnpaddedBatch]
    by_length: list[UnpaddedBatch]  # samples of the same lengths, dealt by length
    padded: list[dict[str, Tensor]]  # `batches`, to the maximum length
    sorted: list[dict[str, Any]]  # inputs of each batch of `by_length` for `masked_loss`


def import_transformers() -> ModuleType:
    """Import `transformers` without its types, which would take mypy minutes.

    Raises ConfigError if it is not installed.
    """
    require_packages("bench transformers", "transformers", "transformers")
    return importlib.import_module("transformers")


def make_baseline(ours: nn.Module, config: ModelSection, device: torch.device) -> Any:
    """Their model of `config` with the weights of ours, in training mode.

    Its vocabulary is config.vocab_size, without our padded words. Raises ConfigError for a BERT
    with a masked-LM head only, which lacks some of the weights.
    """
    if config.architecture == "bert" and config.objective != "mlm_nsp":
        problem = f"is {config.objective!r}, the other model is BertForPreTraining"
        raise ConfigError("model.objective", problem, "compare with 'mlm_nsp'")
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    with device:  # draws its own initial weights there
        make = _modern_baseline if config.architecture == "modern" else _bert_baseline
        baseline = make(config, sizes)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in baseline.named_parameters():
            parameter.copy_(weights[name][: len(parameter)])  # names are the same on both sides
    baseline.set_attn_implementation("sdpa")
    return baseline.train()


def _is_modern(baseline: Any) -> bool:
    return hasattr(baseline, "decoder")


def _bert_baseline(config: ModelSection, sizes: dict[str, int]) -> Any:
    transformers = import_transformers()
    return transformers.BertForPreTraining(
        transformers.BertConfig(
            **sizes,
            hidden_dropout_prob=config.hidden_dropout,
            attention_probs_dropout_prob=config.attention_dropout,
            layer_norm_eps=config.layer_norm_epsilon,
        )
    )


def _modern_baseline(config: ModelSection, sizes: dict[str, int]) -> Any:
    transformers = import_transformers()
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **sizes,
            embedding_dropout=config.hidden_dropout,
            mlp_dropout=config.hidden_dropout,
            attention_dropout=config.attention_dropout,
            norm_eps=config.layer_norm_epsilon,
            local_attention=config.attention_window,
            global_attn_every_n_layers=config.global_attention_every,
            global_rope_theta=config.rope_base_global,
            local_rope_theta=config.rope_base_local,
            pad_token_id=0,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        )
    )


def padded_inputs(
    batch: UnpaddedBatch, padded_length: int, architecture: Architecture = "bert"
) -> dict[str, Tensor]:
    """Inputs of their model: int64 [B, S] tensors, S = padded_length, on the batch's device."""
    device = batch.input_ids.device
    shape = (len(batch.lengths), padded_length)
    rows = torch.arange(shape[0], device=device)
    places = (
        rows.repeat_interleave(torch.tensor(batch.lengths, device=device)),
        batch.position_ids,
    )

    def pad(values: Tensor, padding: int) -> Tensor:
        return torch.full(shape, padding, device=device).index_put(places, values)

    inputs = {
        "input_ids": pad(batch.input_ids, 0),
        "attention_mask": pad(torch.ones_like(batch.input_ids), 0),
        "labels": pad(_labels(batch), IGNORED),
    }
    if architecture == "bert":
        inputs["token_type_ids"] = pad(batch.token_type_ids, 0)
        inputs["next_sentence_label"] = batch.next_sentence_label
    return inputs


def masked_inputs(batch: UnpaddedBatch, architecture: Architecture = "bert") -> dict[str, Any]:
    """Inputs of `masked_loss`: the batch padded to its longest sequence, on its device."""
    padded = padded_inputs(batch, batch.max_seqlen, architecture)
    is_real = padded["attention_mask"].flatten().nonzero()[:, 0]  # int64 [T]: each one's position
    return {
        "tokens": {name: padded[name] for name in padded if not name.endswith(("labels", "label"))},
        "masked": is_real[batch.masked_token_index],
        "labels": batch.labels,
        "next_sentence_label": batch.next_sentence_label,
    }


def masked_loss(baseline: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss of their model, with logits of the masked positions only."""
    if _is_modern(baseline):
        hidden = baseline.model(**inputs["tokens"])[0]
        masked = hidden.flatten(0, 1).index_select(0, inputs["masked"])
        return F.cross_entropy(baseline.decoder(baseline.head(masked)).float(), inputs["labels"])
    hidden, pooled = baseline.bert(**inputs["tokens"])[:2]
    masked = hidden.flatten(0, 1).index_select(0, inputs["masked"])
    return _loss_of_both(baseline.cls(masked, pooled), inputs)


def _labels(batch: UnpaddedBatch) -> Tensor:
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels[batch.masked_token_index] = batch.labels
    return labels


def unpadded_inputs(batch: UnpaddedBatch) -> dict[str, Any]:
    """Inputs of `unpadded_loss` on the batch's device; [1, T] tensors among others."""
    return {
        "tokens": {
            "input_ids": batch.input_ids[None],
            "token_type_ids": batch.token_type_ids[None],
            "position_ids": batch.position_ids[None],
            "cu_seqlens": batch.cu_seqlens.long(),
            "longest": batch.max_seqlen,
            "shortest": min(batch.lengths),
        },
        "first": batch.cu_seqlens[:-1].long(),
        "labels": _labels(batch),
        "next_sentence_label": batch.next_sentence_label,
    }


def use_nested_attention(baseline: Any) -> None:
    """Make `baseline` attend within the sequences of `cu_seqlens` only."""
    import_transformers().AttentionInterface.register(ATTENTION_NAME, nested_attention)
    baseline.set_attn_implementation(ATTENTION_NAME)


def nested_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    longest: int,
    shortest: int,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Context [1, T, N, H] of [1, N, T, H] each; the signature is that of AttentionInterface."""

    def nest(x: Tensor) -> Tensor:  # [1, N, T, H] -> [B, N, each length, H]
        nested = torch.nested.nested_tensor_from_jagged(
            x[0].transpose(0, 1), cu_seqlens, min_seqlen=shortest, max_seqlen=longest
        )
        return nested.transpose(1, 2)

    context = F.scaled_dot_product_attention(
        nest(query), nest(key), nest(value), dropout_p=dropout, scale=scaling
    )
    return context.transpose(1, 2).values()[None], None


def unpadded_loss(baseline: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss of BertForPreTraining, whose own forward takes one first token per row."""
    hidden = baseline.bert(**inputs["tokens"]).last_hidden_state[0]
    pooled = baseline.bert.pooler(hidden[inputs["first"]][:, None])
    return _loss_of_both(baseline.cls(hidden, pooled), inputs)


def _loss_of_both(scores: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> Tensor:
    names = ("labels", "next_sentence_label")
    words, pairs = (
        F.cross_entropy(each, inputs[name]) for each, name in zip(scores, names, strict=True)
    )
    return words + pairs


def fused_adamw(model: nn.Module, rule: OptimSection) -> torch.optim.Optimizer:
    """torch's fused AdamW with a rule's constants."""
    groups = param_groups(model, rule.weight_decay)
    return torch.optim.AdamW(
        [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
        lr=rule.learning_rate,
        betas=(rule.beta_1, rule.beta_2),
        eps=rule.epsilon,
        fused=True,
    )


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Autocast of `transformers`' users at this precision; their weights stay fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision != "fp32")


def baseline_step(baseline: Any, loss_of: LossOf, precision: Precision) -> Contender:
    """One update as `transformers`' users write it: forward, backward, clip, optimizer.

    Takes the number of a batch and returns the loss before the update; it leaves no gradient, even
    after an error.
    """
    optimizer = fused_adamw(baseline, OPTIM)

    def step(number: int) -> Tensor:
        try:
            with autocast(baseline.device, precision):
                loss = loss_of(number)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(baseline.parameters(), CLIP.max_norm)
            optimizer.step()
        finally:
            optimizer.zero_grad()
        return loss.detach()

    return step


def make_opponents(
    make_baseline: Callable[[], Any],
    data: Data,
    config: ModelSection,
    *,
    device: torch.device,
    compiled: Compiled,
    check: Callable[[str, Tensor], object],
    report: Callable[[str], None],
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Build each of OPPONENTS and run it on every batch; also the reasons of those that cannot run.

    Args:
        make_baseline: makes a new baseline in training mode for each.
        data: batches for all of them.
        config: of both sides; in precisions other than fp32 they run under autocast.
        device: device of models and data.
        compiled: what goes through torch.compile at once in the compiled forms, if they shall run.
        check: takes a name and the loss of its first batch without dropout, and raises ConfigError
            if that belongs to another model.
        report: gets lines of progress.
    """
    contenders: dict[str, Contender] = {}
    reasons: dict[str, str] = {}
    for name in OPPONENTS:
        reason = _reason_left_out(name, device, compiled, config.architecture)
        if reason is None:
            report(f"preparing {name}")
            try:
                contenders[name] = _prepared(name, make_baseline(), data, config, compiled, check)
            except ConfigError:
                raise
            except Exception as error:  # any error from others' code is a finding, no failure
                reason = reason_of(error)
            free_memory()
        if reason is not None:
            reasons[name] = reason
            report(f"{name}: {reason}")
    return contenders, reasons


def _prepared(
    name: str,
    baseline: Any,
    data: Data,
    config: ModelSection,
    compiled: Compiled,
    check: Callable[[str, Tensor], object],
) -> Contender:
    """A step that has run once. As a separate function it leaves nothing behind on failure."""
    loss_of = loss_function(name, baseline, data, compiled)
    if not name.endswith("compiled"):  # the plain module would be compiled again
        baseline.eval()
        with torch.no_grad(), autocast(baseline.device, config.precision):
            check(name, loss_of(0))
        baseline.train()
    step = baseline_step(baseline, loss_of, config.precision)
    for number in range(len(data.batches)):  # each may have a new shape, which is compiled once
        step(number).item()
    return step


def loss_function(name: str, baseline: Any, data: Data, compiled: Compiled = "no") -> LossOf:
    """The loss of the opponent of this name, whose model is `baseline`."""
    if name == "unpadded_baseline":
        use_nested_attention(baseline)
        inputs = [unpadded_inputs(batch) for batch in data.batches]
        return lambda number: unpadded_loss(baseline, inputs[number])
    is_sorted = name.startswith("sorted")
    function: Any = partial(masked_loss, baseline) if is_sorted else baseline
    if name.endswith("compiled"):
        if compiled == "whole":
            function = torch.compile(function, dynamic=is_sorted)
        else:
            for layer in (
                baseline.model.layers if _is_modern(baseline) else baseline.bert.encoder.layer
            ):
                layer.compile(dynamic=is_sorted)
    if is_sorted:
        return lambda number: function(data.sorted[number])
    return lambda number: function(**data.padded[number]).loss


def _reason_left_out(
    name: str, device: torch.device, compiled: Compiled, architecture: Architecture
) -> str | None:
    if name == "unpadded_baseline" and architecture == "modern":
        return "its own unpadded path needs the kernels of flash-attn"
    if name.endswith("compiled") and compiled == "no":
        return "torch.compile was not asked for: --compile"
    if name == "padded_compiled" and device.type != "cuda":
        return f"compiled on CUDA alone; this run is on {device.type}"
    if name == "unpadded_baseline" and device.type != "cuda":
        return f"its attention kernels are for CUDA; this run is on {device.type}"
    return None

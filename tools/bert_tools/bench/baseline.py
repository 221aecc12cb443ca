"""The baselines of `bench transformers`, which train a model with the library `transformers`.

The model is BertForPreTraining, or ModernBertForMaskedLM for the modern architecture. BASELINES
lists the measured ways of training this model:

- The common way pads all sequences to the maximum length and computes logits for all positions.
- The fast way sorts by length, pads to the longest sequence of a batch, and computes logits for the
  masked positions only.
- Both ways are also measured with torch.compile.
- The padding-free way is the library's own: its collator and FlashAttention's kernels.
- The nested way needs no further package. It concatenates the sequences of a batch into one row of
  T tokens. `transformers`' AttentionInterface lets it compute attention with torch's nested
  tensors, whose fused CUDA kernels support dropout and sequences of unequal length. Everything
  except attention is the library's own code, including the logits of all T tokens.

On CUDA, the padded ways prefer cuDNN's attention, which is 1.7 to 2.3 times as fast as torch's
FlashAttention on Hopper (transformers issue 48163).

Shape letters: B sequences, S padded length, T tokens, N heads, H head size.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bert_tools.bench import padding_free
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
from mlperf_bert.run.console import ProgressLines

OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
CLIP = ClipSection()
OPTIMIZER_IN_WORDS = f"both use fused AdamW after clipping to norm {CLIP.max_norm:g}"
ATTENTION_NAME = "mlperf_bert_nested"
BASELINES = (
    "sorted",  # sorted by length, logits of masked positions only
    "sorted_compiled",  # the same through torch.compile
    "padded",  # the common way: padded to the maximum, logits of all positions
    "padded_compiled",  # the same through torch.compile
    "padding_free",  # the library's own way without padding, logits of masked positions only
    "nested",  # no padding, by torch's nested tensors, logits of all positions
)
# Measured on two CPU cores. Many layers and a GPU's autotuning take longer.
Compiled = Literal["no", "whole", "by layer"]
LossOf = Callable[[int], Tensor]
"""Computes the loss of the batch with this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Batches for all measured models, already on the device so that no step waits for data."""

    batches: list[UnpaddedBatch]
    by_length: list[UnpaddedBatch]  # samples of the same lengths, grouped by length
    padded: list[dict[str, Tensor]]  # `batches`, padded to the maximum length
    sorted: list[dict[str, Any]]  # `by_length` as inputs of `masked_loss`


def import_transformers() -> ModuleType:
    """Import `transformers` as an untyped module, because checking its types takes mypy minutes.

    Raises ConfigError if the library is not installed.
    """
    require_packages("bench transformers", "transformers", "transformers")
    return importlib.import_module("transformers")


def make_baseline(ours: nn.Module, config: ModelSection, device: torch.device) -> Any:
    """Build the model of `config` with `transformers`, and give it the weights of our model `ours`.

    The result is in training mode. Its word embedding has config.vocab_size rows, without the
    padding rows of `ours`. Raises ConfigError if `ours` is a BERT without a next-sentence head,
    because BertForPreTraining has this head.
    """
    if config.architecture == "bert" and config.objective != "mlm_nsp":
        problem = f"must be 'mlm_nsp' to compare with BertForPreTraining, not {config.objective!r}"
        raise ConfigError("model.objective", problem, "add --set model.objective=mlm_nsp")
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    with device:  # so that its initial weights are drawn there
        make = _modern_baseline if config.architecture == "modern" else _bert_baseline
        baseline = make(config, sizes)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in baseline.named_parameters():
            parameter.copy_(weights[name][: len(parameter)])  # both models use the same names
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
    """Convert a batch to padded inputs of `transformers`' model, on the batch's device.

    The inputs are int64 [B, S] tensors with S = padded_length. For BERT, they include the labels of
    next-sentence prediction, int64 [B].
    """
    device = batch.input_ids.device
    shape = (len(batch.lengths), padded_length)
    rows = torch.arange(shape[0], device=device)
    indices = (
        rows.repeat_interleave(torch.tensor(batch.lengths, device=device)),
        batch.position_ids,
    )

    def pad(values: Tensor, padding: int) -> Tensor:
        return torch.full(shape, padding, device=device).index_put(indices, values)

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
    """Convert a batch to inputs of `masked_loss`, padded to the length of the longest sequence."""
    padded = padded_inputs(batch, batch.max_seqlen, architecture)
    # int64 [T]: the position of each token among the B * S padded ones.
    is_real = padded["attention_mask"].flatten().nonzero()[:, 0]
    return {
        "tokens": {name: padded[name] for name in padded if not name.endswith(("labels", "label"))},
        "masked": is_real[batch.masked_token_index],
        "labels": batch.labels,
        "next_sentence_label": batch.next_sentence_label,
    }


def masked_loss(baseline: Any, inputs: dict[str, Any]) -> Tensor:
    """Compute the loss of `transformers`' model from logits for the masked positions only."""
    if _is_modern(baseline):
        hidden = baseline.model(**inputs["tokens"])[0]
        masked = hidden.flatten(0, 1).index_select(0, inputs["masked"])
        return F.cross_entropy(baseline.decoder(baseline.head(masked)).float(), inputs["labels"])
    hidden, pooled = baseline.bert(**inputs["tokens"])[:2]
    if "first" in inputs:  # the model's own pooler reads only the first token of a row
        pooled = baseline.bert.pooler(hidden[0, inputs["first"]][:, None])
    masked = hidden.flatten(0, 1).index_select(0, inputs["masked"])
    return _loss_of_both(baseline.cls(masked, pooled), inputs)


def _labels(batch: UnpaddedBatch) -> Tensor:
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels[batch.masked_token_index] = batch.labels
    return labels


def unpadded_inputs(batch: UnpaddedBatch) -> dict[str, Any]:
    """Convert a batch to inputs of `unpadded_loss`, on the batch's device.

    In "tokens", tensors with one value per token are [1, T]. "first" contains the positions of the
    [CLS] tokens, int64 [B].
    """
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
    """Set `baseline` to compute attention with `nested_attention`, within each sequence only."""
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
    """Compute attention within each sequence of a row that contains several.

    The function has the signature that `transformers`' AttentionInterface requires. `cu_seqlens`
    contains the boundaries of the sequences. `query`, `key` and `value` are [1, N, T, H]. Returns
    the attention output [1, T, N, H], and None instead of attention weights.
    """

    def nest(x: Tensor) -> Tensor:  # [1, N, T, H] -> [B, N, length of each sequence, H]
        nested = torch.nested.nested_tensor_from_jagged(
            x[0].transpose(0, 1), cu_seqlens, min_seqlen=shortest, max_seqlen=longest
        )
        return nested.transpose(1, 2)

    context = F.scaled_dot_product_attention(
        nest(query), nest(key), nest(value), dropout_p=dropout, scale=scaling
    )
    return context.transpose(1, 2).values()[None], None


def unpadded_loss(baseline: Any, inputs: dict[str, Any]) -> Tensor:
    """Compute the loss of BertForPreTraining for one row that contains all sequences.

    The model's own forward pass cannot be used, because it pools only the first token of a row.
    """
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
    """Return torch's fused AdamW for a model, with the hyperparameters of `rule`."""
    groups = param_groups(model, rule.weight_decay)
    return torch.optim.AdamW(
        [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
        lr=rule.learning_rate,
        betas=(rule.beta_1, rule.beta_2),
        eps=rule.epsilon,
        fused=True,
    )


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context in which users of `transformers` usually train fp32 weights.

    The context computes in bf16. If `precision` is "fp32", the context has no effect.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision != "fp32")


def baseline_step(baseline: Any, loss_of: LossOf, precision: Precision) -> Contender:
    """Return a function that updates a baseline once, like typical code for `transformers`.

    The function takes the number of a batch. It runs the forward and backward pass, clips the
    gradients, updates the weights, and returns the loss before the update. Even after an error, the
    function frees the gradients.
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


def prepare_baselines(
    make_baseline: Callable[[], Any],
    data: Data,
    config: ModelSection,
    *,
    device: torch.device,
    compiled: Compiled,
    check: Callable[[str, Tensor], object],
    progress: ProgressLines,
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Build each of BASELINES, and run its training step once on every batch.

    Args:
        make_baseline: function that returns a new model in training mode.
        data: the batches for all measured models.
        config: settings of the model. If its precision is not fp32, baselines run under autocast.
        device: device of the models and the data.
        compiled: what to compile with torch.compile. With "no", compiled baselines are skipped.
        check: function that gets a baseline's name, and its loss on the first batch without
            dropout. It raises ConfigError if the loss differs from that of our model.
        progress: shows which baseline is being prepared.

    Returns:
        The steps of the baselines that can run, and why each of the others cannot, by name.
    """
    contenders: dict[str, Contender] = {}
    reasons: dict[str, str] = {}
    for number, name in enumerate(BASELINES, 1):
        reason = _reason_left_out(name, device, compiled, config)
        if reason is None:
            work = "compiling and warming up" if name.endswith("compiled") else "warming up"
            activity = f"{work} baseline {number} of {len(BASELINES)}, {name}"
            progress.line(activity)
            try:
                contenders[name] = _warmed_up(
                    name, make_baseline(), data, config, compiled, check, progress
                )
            except ConfigError:
                raise
            except Exception as error:  # reported as the reason why the baseline cannot run
                reason = reason_of(error)
            free_memory()
        if reason is not None:
            reasons[name] = reason
            progress.line(f"skipping baseline {number} of {len(BASELINES)}, {name}: {reason}")
    return contenders, reasons


def _warmed_up(
    name: str,
    baseline: Any,
    data: Data,
    config: ModelSection,
    compiled: Compiled,
    check: Callable[[str, Tensor], object],
    progress: ProgressLines,
) -> Contender:
    """Check the loss of a baseline, run its training step on every batch, and return the step.

    If the baseline fails, leaving this function drops all references to the baseline's tensors.
    """
    loss_of = loss_function(name, baseline, data, compiled)
    if not name.endswith("compiled"):  # checking in evaluation mode would compile a second time
        baseline.eval()
        with torch.no_grad(), autocast(baseline.device, config.precision):
            check(name, loss_of(0))
        baseline.train()
    step = baseline_step(baseline, loss_of, config.precision)
    for number in range(len(data.batches)):  # every new shape of a batch is compiled here
        progress.counted(f"warming up {name}", "batches", number, len(data.batches))
        step(number).item()
    return step


def loss_function(name: str, baseline: Any, data: Data, compiled: Compiled = "no") -> LossOf:
    """Return the loss function of a baseline, which takes the number of a batch.

    `name` is one of BASELINES, and `baseline` is its model.
    """
    if name == "nested":
        use_nested_attention(baseline)
        inputs = [unpadded_inputs(batch) for batch in data.batches]
        return lambda number: unpadded_loss(baseline, inputs[number])
    if name == "padding_free":
        padding_free.use_kernels(baseline)
        library, has_types = import_transformers(), not _is_modern(baseline)
        flat = [
            padding_free.flattened_inputs(library, batch, token_types=has_types)
            for batch in data.batches
        ]
        return lambda number: masked_loss(baseline, flat[number])
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

    def padded_loss(number: int) -> Tensor:
        with _preferring_cudnn(baseline.device):
            loss: Tensor = (
                function(data.sorted[number]) if is_sorted else function(**data.padded[number]).loss
            )
            return loss

    return padded_loss


def _preferring_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager in which attention on CUDA runs in cuDNN if cuDNN can run it."""
    if device.type != "cuda":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    order += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def _reason_left_out(
    name: str, device: torch.device, compiled: Compiled, config: ModelSection
) -> str | None:
    """Return why the baseline `name` is skipped on this device, or None if it is not skipped."""
    if name == "padding_free":
        return padding_free.why_not(device, config.precision)
    if name == "nested" and config.architecture == "modern":
        return "nested tensors have no attention windows, which ModernBERT needs"
    if name.endswith("compiled") and compiled == "no":
        return "torch.compile is turned off by --no-compile"
    if name == "padded_compiled" and device.type != "cuda":
        return f"it is compiled only on CUDA, and this run uses {device.type}"
    if name == "nested" and device.type != "cuda":
        return f"its attention kernels need CUDA, and this run uses {device.type}"
    return None

"""BERT and ModernBERT for pre-training: unpadded tokens in, scores of the tasks out.

Shape letters: B sequences, C sequences whose first token is read, T tokens, D hidden, V vocabulary
(padded), P masked positions, R = C + P rows of the last layer that are read.
"""

from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import memory_bytes
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout, Queries
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.choices import AttentionChoice, choose_attention, choose_blocks
from mlperf_bert.model.dropout_keys import DropoutKeys
from mlperf_bert.model.fp8 import PRODUCTS_PER_LAYER, Fp8Scales
from mlperf_bert.model.layers import (
    Embeddings,
    Encoder,
    EncoderLayer,
    LossSums,
    Pooler,
    PretrainingHeads,
    PretrainingLogits,
)
from mlperf_bert.model.modern import (
    CUT_AT,
    DecoderBias,
    MaskedLmScores,
    ModernBody,
    ModernLayer,
    PredictionHead,
    spread_of,
)
from mlperf_bert.seeds import derive_seed

# TensorFlow's names of our parameters. The first BERT release
# (https://github.com/google-research/bert) named its variables; MLPerf's checkpoint and its rule
# files keep those names. Ours are Hugging Face's.
# Here an embedding is one table, and the next-sentence projection has a name of its own.
WHOLE_NAMES = MappingProxyType(
    {
        "bert.embeddings.word_embeddings.weight": "bert/embeddings/word_embeddings",
        "bert.embeddings.position_embeddings.weight": "bert/embeddings/position_embeddings",
        "bert.embeddings.token_type_embeddings.weight": "bert/embeddings/token_type_embeddings",
        "cls.predictions.bias": "cls/predictions/output_bias",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
        "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    }
)
# (end of our name, end of theirs) of everything else; the first match is used.
ENDINGS = (
    ("LayerNorm.weight", "LayerNorm/gamma"),
    ("LayerNorm.bias", "LayerNorm/beta"),
    (".weight", "/kernel"),
    (".bias", "/bias"),
)

COMPUTED_IN = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "bf16_autocast": torch.bfloat16,
        "fp8": torch.bfloat16,
    }
)


def last_rows(batch: UnpaddedBatch, max_length: int, num_first: int) -> tuple[Queries, Tensor]:
    """The R rows of a batch that the heads read (first and masked tokens), in token order.

    Shapes follow from the batch's shapes alone and nothing is read from the device, so it can be
    captured. Padding slots are rows as well: an empty sequence slot stands for the batch's last
    token, and an unused masked slot for the token it names.

    Args:
        batch: may be padded to a capacity.
        max_length: tokens of the longest possible sequence.
        num_first: C, counted from the batch's first sequence; 0 if nothing is pooled.

    Returns:
        The rows as queries of the last layer, and the positions among them, int64 [C + P], of the
        first tokens, then of the masked tokens.
    """
    num_tokens = batch.input_ids.shape[0]
    bounds = batch.cu_seqlens.long()
    first = bounds[:num_first].clamp(max=num_tokens - 1)
    # Stable: if a first token is masked too, the sequence's first row is that of its slot.
    rows, order = torch.cat((first, batch.masked_token_index)).sort(stable=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=order.device))
    lengths = _query_lengths(batch, num_first)
    most = 1 + (max_length if batch.shape is None else batch.shape.max_masked)
    assert max(lengths) <= most
    queries = Queries(
        rows=rows,
        cu_seqlens=torch.searchsorted(rows, bounds, out_int32=True),
        lengths=lengths,
        max_length=most,
    )
    return queries, place


def _query_lengths(batch: UnpaddedBatch, num_first: int) -> tuple[int, ...]:
    """Number of rows of each sequence, on the host."""
    counts = list(batch.masked_counts)
    assert len(counts) == len(batch.lengths)
    assert sum(counts) == len(batch.masked_token_index)
    last_with_tokens = max(i for i, length in enumerate(batch.lengths) if length)
    for i in range(num_first):
        counts[min(i, last_with_tokens)] += 1
    return tuple(counts)


class BertBody(nn.Module):
    """Embeddings, encoder and, for next-sentence prediction, pooler."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.embeddings = Embeddings(config, blocks)
        self.encoder = Encoder(config, attend, blocks)
        self.pooler = Pooler(config) if config.objective == "mlm_nsp" else None

    def forward(
        self, batch: UnpaddedBatch, keys: DropoutKeys | None, queries: Queries | None = None
    ) -> Tensor:
        """Final hidden states [T, D], or only those of the queries [R, D]."""
        layout = AttentionLayout(batch.lengths, batch.cu_seqlens, self.longest(batch))
        hidden: Tensor = self.encoder(self.embeddings(batch, keys), layout, keys, queries)
        return hidden

    def longest(self, batch: UnpaddedBatch) -> int:
        """Tokens of the longest possible sequence in all batches of this one's shape."""
        return self.max_length if batch.shape is None else batch.shape.max_seqlen


class BertForPretraining(nn.Module):
    """BERT (arXiv 1810.04805), post-norm, with masked-LM and next-sentence heads; or ModernBERT.

    state_dict() keys are Hugging Face's BertForPreTraining's, or BertForMaskedLM's where
    model.objective is "mlm", or ModernBertForMaskedLM's where model.architecture is "modern"; the
    tied decoder appears once, as the word embedding. The model equals theirs with vocab_size =
    config.padded_vocab_size.

    Args:
        config: shape, dropout and attention policy. `precision` only chooses the policy here:
            weights are made in float32; the caller rounds them or uses autocast.
        device: device of the weights; on "meta" they stay unset.
        seed: seed of the initial weights, which do not depend on the device.
        attention: the choice made for another model of this config; None: choose here.

    Raises:
        ConfigError: this device cannot run the named model.attention or model.kernels, or the
            precision not the head.
    """

    def __init__(
        self,
        config: ModelSection,
        device: torch.device,
        *,
        seed: int = 0,
        attention: AttentionChoice | None = None,
    ) -> None:
        super().__init__()
        dtype = COMPUTED_IN[config.precision]
        self.fp8: Fp8Scales | None = None
        if config.precision == "fp8":
            self.fp8 = Fp8Scales(PRODUCTS_PER_LAYER * config.num_layers, device)
        blocks = choose_blocks(config, device, self.fp8)
        self.kernels = blocks.name
        self.config = config
        self.attention = attention or choose_attention(config, device, dtype)
        self.dropout_seed = 0
        # Number of the update in progress: a plain attribute, not part of the model's state.
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # Like skip_init: modules made on "meta" draw nothing from the global generator.
        if config.architecture == "bert":
            self.bert = BertBody(config, self.attention.policy, blocks)
            self.cls = PretrainingHeads(config, blocks)
        else:
            self.model = ModernBody(config, self.attention.policy, blocks)
            self.head = PredictionHead(config)
            self.decoder = DecoderBias(config)
            self._scores = MaskedLmScores(self.head, self.decoder, config, blocks)
        if self.fp8 is not None:
            self.fp8.assign([each for layer in self.layers for each in layer.products])
        if device.type != "meta":
            # to_empty() would do, but its empty_like() of "meta" imports sympy, which takes 0.3 s.
            self._apply(  # type: ignore[no-untyped-call]
                lambda each: torch.empty(each.shape, dtype=each.dtype, device=device)
            )
            self.reset_parameters(torch.Generator().manual_seed(seed))

    @property
    def body(self) -> BertBody | ModernBody:
        """Embeddings and encoder."""
        return self.bert if self.config.architecture == "bert" else self.model

    @property
    def layers(self) -> list[EncoderLayer | ModernLayer]:
        """The encoder's layers, the first first."""
        body = self.body
        return list(body.encoder.layer if isinstance(body, BertBody) else body.layers)  # type: ignore[arg-type]

    @property
    def word_embeddings(self) -> Tensor:
        """The word embedding [V, D], which is the decoder's matrix too."""
        body = self.body
        if isinstance(body, BertBody):
            return body.embeddings.word_embeddings.weight
        return body.embeddings.tok_embeddings.weight

    @property
    def decoder_bias(self) -> Tensor:
        """The decoder's bias [V]."""
        is_bert = self.config.architecture == "bert"
        return self.cls.predictions.bias if is_bert else self.decoder.bias

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw matrices from normal(0, initializer_range); biases are zero, LayerNorm weights one.

        (BERT, appendix A.2 and its published code, but not truncated, as in `transformers`.)
        ModernBERT's are truncated and differ by their place (`modern.spread_of`).

        Args:
            generator: a CPU generator. Numbers are drawn on the host in the order of parameters, so
                that every rank and device gets the same weights.
        """
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weights(name, parameter.shape, self.config, generator))

    def dropout_keys(self, batch: UnpaddedBatch) -> DropoutKeys | None:
        """Dropout keys of the batch's T tokens; None in evaluation."""
        if not self.training:
            return None
        counts, num_tokens = batch.cu_seqlens.diff(), batch.input_ids.shape[0]
        sample_ids = batch.sample_ids.repeat_interleave(counts, output_size=num_tokens)
        return DropoutKeys(self.dropout_seed, self.step, sample_ids, batch.position_ids)

    def fp8_state(self) -> dict[str, Tensor]:
        """FP8 scales by name: state that a step changes beside weights and optimizer."""
        return {} if self.fp8 is None else self.fp8.tensors()

    def forward(
        self, batch: UnpaddedBatch, result: Literal["logits", "loss_sums"] = "logits"
    ) -> PretrainingLogits | LossSums:
        """Logits of the masked positions [P, V] and of the sentence pairs [B, 2], or their losses.

        Training asks for `loss_sums`.
        """
        if self.fp8 is not None and self.training:
            self.fp8.follow(self.step)
        # The last layer computes only the rows that are read.
        body, is_bert = self.body, self.config.architecture == "bert"
        pooler = self.bert.pooler if is_bert else None
        heads = self.cls if is_bert else self._scores
        num_first = 0 if pooler is None else batch.next_sentence_label.shape[0]
        queries, place = last_rows(batch, body.longest(batch), num_first)
        hidden = body(batch, self.dropout_keys(batch), queries)
        first, masked = hidden.index_select(0, place).tensor_split((num_first,))
        pooled = None if pooler is None else pooler(first)
        if result == "loss_sums":
            return heads.loss_sums(masked, pooled, self.word_embeddings, batch)
        logits: PretrainingLogits = heads(masked, pooled, self.word_embeddings)
        return logits


def initial_weights(
    name: str, shape: torch.Size, config: ModelSection, generator: torch.Generator
) -> Tensor:
    """A parameter's first values, float32 on the host: `BertForPretraining.reset_parameters`."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.lower():
        return torch.ones(shape)
    drawn = torch.empty(shape, dtype=torch.float32)
    if config.architecture == "bert":
        return drawn.normal_(0.0, config.initializer_range, generator=generator)
    spread = spread_of(name, config)
    most = CUT_AT * spread
    return nn.init.trunc_normal_(drawn, 0.0, spread, -most, most, generator=generator)


def make_model(config: RunConfig, seed: int, device: torch.device) -> BertForPretraining:
    """The bare model, its weights and dropout from the run's seed, equal on every rank."""
    model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
    model.dropout_seed = derive_seed(seed, "dropout")
    return model


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if a CPU's memory cannot hold weights and gradients.

    Whether a batch fits a GPU is found at warm-up.
    """
    if device.type == "cuda":
        return
    needed = 8 * config.model.num_parameters * config.parallel.ranks_per_node
    if needed > memory_bytes():
        problem = f"makes a model whose weights and gradients take {needed / 2**30:,.0f} GiB"
        remedy = (
            f"this machine has {memory_bytes() / 2**30:,.0f}: use a smaller one, or fewer ranks"
        )
        raise ConfigError("model.hidden_size", problem, remedy)


def tensorflow_name(parameter_name: str) -> str:
    """TensorFlow's name of one of `BertForPretraining`'s parameters, e.g. bert/pooler/dense/bias.

    Different parameters have different names. A `kernel` holds the transpose of our `weight`; every
    other tensor is laid out as ours is. The word embedding, tied to the decoder, is one tensor on
    both sides; ours may have more rows, which pad the vocabulary.

    Raises ValueError for a name that is no parameter's.
    """
    if parameter_name in WHOLE_NAMES:
        return WHOLE_NAMES[parameter_name]
    for ours, theirs in ENDINGS:
        if parameter_name.endswith(ours):
            stem = parameter_name.removesuffix(ours).replace("encoder.layer.", "encoder.layer_")
            return stem.replace(".", "/") + theirs
    raise ValueError(f"{parameter_name!r} is not the name of a parameter")

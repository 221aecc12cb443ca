"""BERT and ModernBERT for pre-training, from unpadded tokens to the scores of the tasks.

Shapes use the letters B (sequences), C (sequences whose first token the pooler reads), T (tokens),
D (hidden size), V (padded vocabulary size), P (masked positions) and R = C + P (rows of the last
layer that the heads read).
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
    initial_std,
)
from mlperf_bert.seeds import derive_seed

# TensorFlow's names of our parameters. They come from the first BERT release
# (https://github.com/google-research/bert), and MLPerf's checkpoint and rule files still use them.
# Our own names are Hugging Face's. This table contains the names that follow no pattern, which are
# those of the embeddings, the decoder's bias and the next-sentence projection.
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
# (end of our name, end of theirs) for all other parameters. The first match is used.
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
    """Find the R rows of a batch that the heads read (first and masked tokens), in token order.

    The function can be captured in a CUDA graph, because all shapes depend only on the batch's
    shapes and nothing is read from the device. Padding slots count as rows too. An empty sequence
    slot selects the batch's last token, and an unused masked slot selects the token whose index it
    contains.

    Args:
        batch: may be padded to a capacity.
        max_length: the number of tokens of the longest possible sequence.
        num_first: C, counted from the batch's first sequence, or 0 if the model has no pooler.

    Returns:
        The rows as queries of the last layer, and indices int64 [C + P] into these rows. The
        indices of the C first tokens come first, followed by those of the P masked tokens.
    """
    num_tokens = batch.input_ids.shape[0]
    bounds = batch.cu_seqlens.long()
    first = bounds[:num_first].clamp(max=num_tokens - 1)
    # The sort is stable, so that if a first token is also masked, the sequence's first row belongs
    # to the slot of the first token.
    rows, order = torch.cat((first, batch.masked_token_index)).sort(stable=True)
    index = torch.empty_like(order)
    index.scatter_(0, order, torch.arange(len(order), device=order.device))
    lengths = _query_lengths(batch, num_first)
    most = 1 + (max_length if batch.shape is None else batch.shape.max_masked)
    assert max(lengths) <= most
    queries = Queries(
        rows=rows,
        cu_seqlens=torch.searchsorted(rows, bounds, out_int32=True),
        lengths=lengths,
        max_length=most,
    )
    return queries, index


def _query_lengths(batch: UnpaddedBatch, num_first: int) -> tuple[int, ...]:
    """Count the rows of each sequence that the heads read, without reading from the device."""
    counts = list(batch.masked_counts)
    assert len(counts) == len(batch.lengths)
    assert sum(counts) == len(batch.masked_token_index)
    last_with_tokens = max(i for i, length in enumerate(batch.lengths) if length)
    for i in range(num_first):
        counts[min(i, last_with_tokens)] += 1
    return tuple(counts)


class BertBody(nn.Module):
    """BERT's embeddings and encoder, and its pooler if the model predicts next sentences."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.embeddings = Embeddings(config, blocks)
        self.encoder = Encoder(config, attend, blocks)
        self.pooler = Pooler(config) if config.objective == "mlm_nsp" else None

    def forward(
        self, batch: UnpaddedBatch, keys: DropoutKeys | None, queries: Queries | None = None
    ) -> Tensor:
        """Compute the final hidden states of all tokens [T, D], or of the queries only [R, D]."""
        layout = AttentionLayout(batch.lengths, batch.cu_seqlens, self.longest(batch))
        hidden: Tensor = self.encoder(self.embeddings(batch, keys), layout, keys, queries)
        return hidden

    def longest(self, batch: UnpaddedBatch) -> int:
        """Return the largest possible length of a sequence, in tokens, in batches of this shape."""
        return self.max_length if batch.shape is None else batch.shape.max_seqlen


class BertForPretraining(nn.Module):
    """BERT or ModernBERT with its pre-training heads.

    BERT (arXiv 1810.04805) is post-norm and has a masked-LM and a next-sentence head. The keys of
    state_dict() are those of Hugging Face's BertForPreTraining. If model.objective is "mlm", the
    keys are those of BertForMaskedLM, and if model.architecture is "modern", those of
    ModernBertForMaskedLM. The decoder's matrix is tied to the word embedding, so it has no key of
    its own. The results equal those of Hugging Face's model with vocab_size =
    config.padded_vocab_size.

    Args:
        config: shape, dropout, attention policy and precision. Weights are always created in
            float32. For another precision, the caller rounds them or uses autocast.
        device: device of the weights. On "meta" the weights are not initialized.
        seed: seed of the initial weights, which do not depend on the device.
        attention: the policy chosen for another model of this config, or None to choose one.

    Raises:
        ConfigError: this device cannot run the config's model.attention, model.kernels or
            model.precision.
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
        # The number of the current update is a plain attribute and not part of the model's state.
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # Modules are created on "meta", as skip_init does, so that they draw no random numbers from
        # the global generator.
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
            # to_empty() would also work, but its empty_like() on "meta" imports sympy, which takes
            # 0.3 s.
            self._apply(  # type: ignore[no-untyped-call]
                lambda each: torch.empty(each.shape, dtype=each.dtype, device=device)
            )
            self.reset_parameters(torch.Generator().manual_seed(seed))

    @property
    def body(self) -> BertBody | ModernBody:
        """The embeddings and the encoder, without the pre-training heads."""
        return self.bert if self.config.architecture == "bert" else self.model

    @property
    def layers(self) -> list[EncoderLayer | ModernLayer]:
        """The encoder's layers, from the first to the last."""
        body = self.body
        return list(body.encoder.layer if isinstance(body, BertBody) else body.layers)  # type: ignore[arg-type]

    @property
    def word_embeddings(self) -> Tensor:
        """The word embedding [V, D], which is also the decoder's matrix."""
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
        """Draw matrices from normal(0, initializer_range). Set biases to 0 and norm weights to 1.

        Source: BERT, appendix A.2 and its published code. As in `transformers`, but unlike in BERT,
        the distribution is not truncated. ModernBERT's distribution is truncated, and its standard
        deviation depends on the matrix (`modern.initial_std`).

        Args:
            generator: a CPU generator. Numbers are drawn on the host in the order of the
                parameters, so that every rank and device gets the same weights.
        """
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weights(name, parameter.shape, self.config, generator))

    def dropout_keys(self, batch: UnpaddedBatch) -> DropoutKeys | None:
        """Return the keys that determine the dropout of the batch's T tokens.

        Returns None in evaluation, which uses no dropout.
        """
        if not self.training:
            return None
        counts, num_tokens = batch.cu_seqlens.diff(), batch.input_ids.shape[0]
        sample_ids = batch.sample_ids.repeat_interleave(counts, output_size=num_tokens)
        return DropoutKeys(self.dropout_seed, self.step, sample_ids, batch.position_ids)

    def fp8_state(self) -> dict[str, Tensor]:
        """Return the tensors of the FP8 scales by name.

        Every step updates these tensors. The dictionary is empty if the model does not use FP8.
        """
        return {} if self.fp8 is None else self.fp8.tensors()

    def forward(
        self, batch: UnpaddedBatch, result: Literal["logits", "loss_sums"] = "logits"
    ) -> PretrainingLogits | LossSums:
        """Compute the logits of masked positions [P, V] and sentence pairs [B, 2], or their losses.

        `result` selects between the logits and the summed losses. Training uses the losses.
        """
        if self.fp8 is not None and self.training:
            self.fp8.follow(self.step)
        # The last layer computes only the rows that are read.
        body, is_bert = self.body, self.config.architecture == "bert"
        pooler = self.bert.pooler if is_bert else None
        heads = self.cls if is_bert else self._scores
        num_first = 0 if pooler is None else batch.next_sentence_label.shape[0]
        queries, index = last_rows(batch, body.longest(batch), num_first)
        hidden = body(batch, self.dropout_keys(batch), queries)
        first, masked = hidden.index_select(0, index).tensor_split((num_first,))
        pooled = None if pooler is None else pooler(first)
        if result == "loss_sums":
            return heads.loss_sums(masked, pooled, self.word_embeddings, batch)
        logits: PretrainingLogits = heads(masked, pooled, self.word_embeddings)
        return logits


def initial_weights(
    name: str, shape: torch.Size, config: ModelSection, generator: torch.Generator
) -> Tensor:
    """Draw the initial values of a parameter, float32 on the host.

    `BertForPretraining.reset_parameters` describes their distribution.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.lower():
        return torch.ones(shape)
    drawn = torch.empty(shape, dtype=torch.float32)
    if config.architecture == "bert":
        return drawn.normal_(0.0, config.initializer_range, generator=generator)
    std = initial_std(name, config)
    limit = CUT_AT * std
    return nn.init.trunc_normal_(drawn, 0.0, std, -limit, limit, generator=generator)


def make_model(config: RunConfig, seed: int, device: torch.device) -> BertForPretraining:
    """Create the model of a run, and derive its weights and its dropout from the run's seed.

    The result is the same on every rank.
    """
    model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
    model.dropout_seed = derive_seed(seed, "dropout")
    return model


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if the weights and gradients do not fit into this machine's memory.

    If the device is a GPU, the function checks nothing, because warm-up shows whether a batch fits.
    """
    if device.type == "cuda":
        return
    needed = 8 * config.model.num_parameters * config.parallel.ranks_per_node
    if needed > memory_bytes():
        problem = (
            f"the weights and gradients need {needed / 2**30:,.0f} GiB of memory, but this machine "
            f"has {memory_bytes() / 2**30:,.0f} GiB"
        )
        remedy = "use a smaller model, or fewer ranks per node"
        raise ConfigError("model.hidden_size", problem, remedy)


def tensorflow_name(parameter_name: str) -> str:
    """Return TensorFlow's name of a BERT parameter, for example bert/pooler/dense/bias.

    Different parameters have different names. A TensorFlow `kernel` is the transpose of our
    `weight`, and every other tensor has the same layout in both programs. In both programs, the
    word embedding and the decoder share a single tensor. In our program, this tensor may have
    additional rows that pad the vocabulary.

    Raises ValueError if `parameter_name` is not the name of a parameter.
    """
    if parameter_name in WHOLE_NAMES:
        return WHOLE_NAMES[parameter_name]
    for ours, theirs in ENDINGS:
        if parameter_name.endswith(ours):
            stem = parameter_name.removesuffix(ours).replace("encoder.layer.", "encoder.layer_")
            return stem.replace(".", "/") + theirs
    raise ValueError(f"{parameter_name!r} is not the name of a parameter")

"""ModernBERT's encoder and head on unpadded tokens.

The encoder is pre-norm, with rotary positions, gated feed-forward halves and mostly local
attention. Source: Warner et al., "Smarter, Better, Faster, Longer" (arXiv 2412.13663), section 2.1
and appendix A. Attribute names are those of Hugging Face's ModernBertForMaskedLM, so that
state_dict keys are equal. The decoder's matrix is tied to the word embedding, so it has no key of
its own. Dropout, which is 0 in the published model, is applied in the same places as in BERT.

Shapes use the letters B (sequences), T (tokens), R (wanted rows), P (masked positions), N (heads),
H (head size), D (hidden size), F (feed-forward width) and V (padded vocabulary size).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout, Queries, Rotary
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.dropout_keys import DropoutKeys, make_site
from mlperf_bert.model.layers import (
    DROPOUT_STREAM,
    META,
    STREAMS_PER_LAYER,
    LossSums,
    PretrainingLogits,
    unset_table,
)

CUT_AT = 2.0  # standard deviations at which the initial weights' normal distribution is truncated
# Name endings of the matrices that write to the residual stream or to the decoder.
_OUTPUTS = ("Wo.weight", "head.dense.weight")


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device=META)


def _norm(config: ModelSection) -> nn.LayerNorm:
    size, epsilon = config.hidden_size, config.layer_norm_epsilon
    return nn.LayerNorm(size, eps=epsilon, bias=False, device=META)


class WordEmbeddings(nn.Module):
    """Word embeddings and their norm. ModernBERT does not embed positions or segments."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.tok_embeddings = unset_table(config.padded_vocab_size, config.hidden_size)
        self.norm = _norm(config)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout

    def forward(self, batch: UnpaddedBatch, keys: DropoutKeys | None) -> Tensor:
        """Embed the batch's tokens. Returns hidden states [T, D] in the dtype of the weights."""
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed_words(batch.input_ids, self.tok_embeddings, self.norm, site)


class ModernAttention(nn.Module):
    """The attention half of a layer, with one matrix for queries, keys and values.

    `Wqkv` is that matrix, `attend` is the attention policy, and `Wo` is the output matrix. The
    layer itself applies `Wo`.
    """

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.Wqkv = _matrix(hidden, 3 * hidden)
        self.Wo = _matrix(hidden, hidden)
        self.attend = attend
        self.blocks = blocks
        self.head_shape = (config.num_heads, config.head_size)
        self.dropout_p = config.attention_dropout
        self.dropout_stream = stream

    def forward(self, normed: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Compute the context [R, D] of the layout's queries from normalized hidden states [T, D].

        `keys` are the dropout keys of the queries.
        """
        projected = self.blocks.multiply(normed, (self.Wqkv,))[0]
        columns = self.blocks.columns(projected, 3)
        q, k, v = (each.view(len(each), *self.head_shape) for each in columns)
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(layout.select(q), k, v, layout, site).flatten(1)


class GatedFeedForward(nn.Module):
    """The two matrices of a GeGLU feed-forward half (arXiv 2002.05202)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.Wi = _matrix(config.hidden_size, 2 * config.intermediate_size)
        self.Wo = _matrix(config.intermediate_size, config.hidden_size)


class ModernLayer(nn.Module):
    """One layer of ModernBERT's encoder.

    Each half of the layer also computes the norm with which the next half begins, because a fused
    kernel computes the residual sum and the norm together.
    """

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, number: int
    ) -> None:
        super().__init__()
        stream = DROPOUT_STREAM + 1 + STREAMS_PER_LAYER * number
        # The first layer needs no norm of its own, because the embeddings end with one.
        self.attn_norm = _norm(config) if number else nn.Identity()
        self.attn = ModernAttention(config, attend, blocks, stream)
        self.mlp_norm = _norm(config)
        self.mlp = GatedFeedForward(config)
        self.is_global = config.is_global(number)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout
        self.dropout_streams = (stream + 1, stream + 2)

    def forward(
        self,
        residual: Tensor,
        normed: Tensor,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        next_norm: nn.LayerNorm,
    ) -> tuple[Tensor, Tensor]:
        """Compute the next residual stream and its norm, both [R, D], from the current ones [T, D].

        The R rows are the layout's queries, and `keys` are their dropout keys. `next_norm` is the
        norm of the next layer, or the model's final norm after the last layer.
        """
        attention_site, feed_forward_site = (
            make_site(self.dropout_p, stream, keys) for stream in self.dropout_streams
        )
        context = self.attn(normed, layout, keys)
        blocks, mlp = self.blocks, self.mlp
        residual, normed = blocks.sum_norm(
            context, layout.select(residual), self.attn.Wo, self.mlp_norm, attention_site
        )
        gated = blocks.gated(normed, mlp.Wi)
        return blocks.sum_norm(gated, residual, mlp.Wo, next_norm, feed_forward_site)

    @property
    def products(self) -> list[tuple[nn.Linear, ...]]:
        """The linear layers that form each matrix product, in the order of the products."""
        return [(self.attn.Wqkv,), (self.attn.Wo,), (self.mlp.Wi,), (self.mlp.Wo,)]


class LayerLayouts:
    """A callable that builds a batch's attention layouts for local and for global layers."""

    def __init__(self, config: ModelSection) -> None:
        self._reach = config.reach
        bases = config.rope_base_global, config.rope_base_local
        shape = config.max_position_embeddings, config.head_size
        self._rotary = [Rotary.of_base(base, *shape) for base in bases]

    def __call__(
        self, batch: UnpaddedBatch, longest: int
    ) -> tuple[AttentionLayout, AttentionLayout]:
        """Return the batch's layouts for local and for global layers, in this order.

        `longest` is the number of tokens of the longest possible sequence.
        """
        # The tables move to the device in the first forward pass, which is never captured.
        self._rotary = [each.on(batch.input_ids.device) for each in self._rotary]
        whole = AttentionLayout(batch.lengths, batch.cu_seqlens, longest, batch.position_ids)
        global_layout = whole.attending(self._rotary[0], None)
        return whole.attending(self._rotary[1], self._reach), global_layout


class ModernBody(nn.Module):
    """ModernBERT's embeddings, layers and final norm, without its head."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.embeddings = WordEmbeddings(config, blocks)
        self.layers = nn.ModuleList(
            ModernLayer(config, attend, blocks, number) for number in range(config.num_layers)
        )
        self.final_norm = _norm(config)
        self._layouts = LayerLayouts(config)

    def forward(
        self, batch: UnpaddedBatch, keys: DropoutKeys | None, queries: Queries | None = None
    ) -> Tensor:
        """Compute the final hidden states of all tokens [T, D], or of the queries only [R, D]."""
        local_layout, global_layout = self._layouts(batch, self.longest(batch))
        residual: Tensor = self.embeddings(batch, keys)
        normed = residual
        for i, layer in enumerate(self.layers):
            layout = global_layout if layer.is_global else local_layout
            is_last = i + 1 == len(self.layers)
            if is_last and queries is not None:
                layout = layout.for_queries(queries)
                keys = None if keys is None else keys.rows(queries.rows)
            next_norm = self.final_norm if is_last else self.layers[i + 1].attn_norm
            residual, normed = layer(residual, normed, layout, keys, next_norm)
        return normed

    def longest(self, batch: UnpaddedBatch) -> int:
        """Return the largest possible length of a sequence, in tokens, in batches of this shape."""
        return self.max_length if batch.shape is None else batch.shape.max_seqlen


class PredictionHead(nn.Module):
    """The projection, GELU (erf) and norm before the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = _matrix(config.hidden_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the projection, GELU and norm to hidden states: [P, D] -> [P, D]."""
        transformed: Tensor = self.norm(F.gelu(self.dense(hidden)))
        return transformed


class DecoderBias(nn.Module):
    """The decoder's bias.

    The decoder has no other parameter, because its matrix is the word embedding.
    """

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))


class MaskedLmScores:
    """ModernBERT's head and decoder, with the interface of `PretrainingHeads`.

    Its methods ignore `pooled`, because ModernBERT does not predict next sentences.
    """

    def __init__(
        self, head: PredictionHead, decoder: DecoderBias, config: ModelSection, blocks: Blocks
    ) -> None:
        self._transform, self._decoder = head, decoder
        self._blocks = blocks

    def __call__(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor
    ) -> PretrainingLogits:
        """Compute logits [P, V] from masked positions [P, D] and the decoder's matrix [V, D]."""
        scores = F.linear(self._transform(masked), word_embeddings, self._decoder.bias)
        return PretrainingLogits(mlm=scores, nsp=None)

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """Compute the summed losses directly, without returning the logits.

        The result equals the sum of the cross-entropies of `logits` for the same arguments.
        """
        factors = self._transform(masked), word_embeddings, self._decoder.bias
        return LossSums(self._blocks.masked_lm_loss(*factors, batch.labels), None)


def initial_std(name: str, config: ModelSection) -> float:
    """Return the standard deviation of a matrix's initial weights.

    The value is config.initializer_range for most matrices. For matrices that write to the residual
    stream or to the decoder, this value is divided by the square root of the number of writes to
    the stream. Source: Megatron (arXiv 1909.08053, section 3).
    """
    writes = 2 * config.num_layers
    return config.initializer_range / (math.sqrt(writes) if name.endswith(_OUTPUTS) else 1.0)

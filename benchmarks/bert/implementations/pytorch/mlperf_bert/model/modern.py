"""ModernBERT's encoder and head on real tokens only: pre-norm, rotary, gated, mostly local.

Source: Warner et al., "Smarter, Better, Faster, Longer" (arXiv 2412.13663), section 2.1 and
appendix A. Attribute names are those of Hugging Face's ModernBertForMaskedLM, so that state_dict
keys are equal; the tied decoder appears once, as the word embedding. Dropout, 0 as published, is
where BERT has it.

Shape letters: B sequences, T tokens, R wanted rows, P masked positions, N heads, H head size,
D hidden, F feed-forward width, V vocabulary (padded).
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

CUT_AT = 2.0  # standard deviations: where the initial weights' normal distribution is cut off
# Ends of the names of matrices that write to the residual stream, or to the decoder.
_OUTPUTS = ("Wo.weight", "head.dense.weight")


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device=META)


def _norm(config: ModelSection) -> nn.LayerNorm:
    size, epsilon = config.hidden_size, config.layer_norm_epsilon
    return nn.LayerNorm(size, eps=epsilon, bias=False, device=META)


class WordEmbeddings(nn.Module):
    """Word embeddings and their norm; positions and segments have none."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.tok_embeddings = unset_table(config.padded_vocab_size, config.hidden_size)
        self.norm = _norm(config)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout

    def forward(self, batch: UnpaddedBatch, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] of the batch's tokens, in the dtype of the weights."""
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed_words(batch.input_ids, self.tok_embeddings, self.norm, site)


class ModernAttention(nn.Module):
    """Queries, keys and values by one matrix, an attention policy, and its output's matrix."""

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
        """Context [R, D] of the layout's queries, whose keys are `keys`, from rows [T, D]."""
        projected = self.blocks.multiply(normed, (self.Wqkv,))[0]
        columns = self.blocks.columns(projected, 3)
        q, k, v = (each.view(len(each), *self.head_shape) for each in columns)
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(layout.select(q), k, v, layout, site).flatten(1)


class GatedFeedForward(nn.Module):
    """The matrices of a GeGLU feed-forward half (arXiv 2002.05202)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.Wi = _matrix(config.hidden_size, 2 * config.intermediate_size)
        self.Wo = _matrix(config.intermediate_size, config.hidden_size)


class ModernLayer(nn.Module):
    """One layer; each half ends with the norm that its successor begins with."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, number: int
    ) -> None:
        super().__init__()
        stream = DROPOUT_STREAM + 1 + STREAMS_PER_LAYER * number
        # The embeddings' norm is the first layer's.
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
        normed: Tensor | None,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        next_norm: nn.Module | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Residual stream and its norm [T, D] -> the next layer's, [R, D] of the layout's queries.

        `keys` are those of the R rows. A layer whose neighbours are elsewhere takes and gives no
        norm: it norms the stream itself, and so does its successor.
        """
        normed = self.attn_norm(residual) if normed is None else normed
        of_attention, of_feed_forward = (
            make_site(self.dropout_p, stream, keys) for stream in self.dropout_streams
        )
        context = self.attn(normed, layout, keys)
        blocks, mlp = self.blocks, self.mlp
        residual, normed = blocks.sum_norm(
            context, layout.select(residual), self.attn.Wo, self.mlp_norm, of_attention
        )
        gated = blocks.gated(normed, mlp.Wi)
        if next_norm is None:
            return blocks.add(gated, residual, mlp.Wo, of_feed_forward), None
        assert isinstance(next_norm, nn.LayerNorm)
        return blocks.sum_norm(gated, residual, mlp.Wo, next_norm, of_feed_forward)

    @property
    def products(self) -> list[tuple[nn.Linear, ...]]:
        """The layers that form each matrix product, in order."""
        return [(self.attn.Wqkv,), (self.attn.Wo,), (self.mlp.Wi,), (self.mlp.Wo,)]


class LayerLayouts:
    """The two kinds of attention layouts of a batch, for layers that are global or not."""

    def __init__(self, config: ModelSection) -> None:
        self._reach = config.reach
        bases = config.rope_base_global, config.rope_base_local
        shape = config.max_position_embeddings, config.head_size
        self._rotary = [Rotary.of_base(base, *shape) for base in bases]

    def __call__(
        self, batch: UnpaddedBatch, longest: int
    ) -> tuple[AttentionLayout, AttentionLayout]:
        """Layouts of the local layers and of the global ones; `longest` as `max_length`'s."""
        # Moved in the first forward, which is never captured.
        self._rotary = [each.on(batch.input_ids.device) for each in self._rotary]
        whole = AttentionLayout(batch.lengths, batch.cu_seqlens, longest, batch.position_ids)
        everywhere = whole.attending(self._rotary[0], None)
        return whole.attending(self._rotary[1], self._reach), everywhere


class ModernBody(nn.Module):
    """Embeddings, layers and the last norm."""

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
        """Final hidden states [T, D], or only those of the queries [R, D]."""
        nearby, everywhere = self._layouts(batch, self.longest(batch))
        residual: Tensor = self.embeddings(batch, keys)
        normed = residual
        for i, layer in enumerate(self.layers):
            layout = everywhere if layer.is_global else nearby
            is_last = i + 1 == len(self.layers)
            if is_last and queries is not None:
                layout = layout.for_queries(queries)
                keys = None if keys is None else keys.rows(queries.rows)
            next_norm = self.final_norm if is_last else self.layers[i + 1].attn_norm
            residual, normed = layer(residual, normed, layout, keys, next_norm)
        return normed

    def longest(self, batch: UnpaddedBatch) -> int:
        """Tokens of the longest possible sequence in all batches of this one's shape."""
        return self.max_length if batch.shape is None else batch.shape.max_seqlen


class PredictionHead(nn.Module):
    """Projection, GELU (erf) and norm before the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = _matrix(config.hidden_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        transformed: Tensor = self.norm(F.gelu(self.dense(hidden)))
        return transformed


class DecoderBias(nn.Module):
    """The decoder's own parameter: its matrix is the word embedding."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))


class MaskedLmScores:
    """Head and decoder with the methods of `PretrainingHeads`; nothing is pooled."""

    def __init__(
        self, head: PredictionHead, decoder: DecoderBias, config: ModelSection, blocks: Blocks
    ) -> None:
        self._transform, self._decoder = head, decoder
        self._blocks = blocks

    def __call__(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor
    ) -> PretrainingLogits:
        """Masked positions [P, D], decoder matrix [V, D] -> logits [P, V]."""
        scores = F.linear(self._transform(masked), word_embeddings, self._decoder.bias)
        return PretrainingLogits(mlm=scores, nsp=None)

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """`loss_sums` of the logits of the same arguments."""
        factors = self._transform(masked), word_embeddings, self._decoder.bias
        return LossSums(self._blocks.masked_lm_loss(*factors, batch.labels), None)


def initial_std(name: str, config: ModelSection) -> float:
    """Standard deviation of a matrix's initial weights (Megatron's, arXiv 1909.08053, section 3).

    Matrices that write to the residual stream have less, by the root of the number of such writes.
    """
    writes = 2 * config.num_layers
    return config.initializer_range / (math.sqrt(writes) if name.endswith(_OUTPUTS) else 1.0)

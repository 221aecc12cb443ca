"""Embeddings, post-norm encoder layers, and the masked-LM and next-sentence heads with their loss.

Shape letters: B sequences, T tokens, R wanted rows, N heads, H head size, D hidden, F feed-forward
width, V vocabulary (padded to a multiple of 8), P masked positions.

Attribute names are those of Hugging Face's BertForPreTraining, so that state_dict keys are equal.
Padding words are ordinary words: their rows are trained and their logits take part in the softmax,
as in `transformers` built with vocab_size = V. No label ever names one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.config.sections import TOKEN_TYPES, ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout, Queries
from mlperf_bert.model.blocks import Blocks, cross_entropy_sum
from mlperf_bert.model.dropout_keys import DropoutKeys, make_site

META = torch.device("meta")  # where modules are made: nothing is drawn for their weights
DROPOUT_STREAM = 0  # of the embeddings
STREAMS_PER_LAYER = 3  # dropouts: of probabilities, after attention, after the feed-forward half


class Embeddings(nn.Module):
    """Input of the encoder (BERT, arXiv 1810.04805, section 3, figure 2)."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = unset_table(config.padded_vocab_size, hidden)
        self.position_embeddings = unset_table(config.max_position_embeddings, hidden)
        self.token_type_embeddings = unset_table(TOKEN_TYPES, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout

    def forward(self, batch: UnpaddedBatch, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] of the batch's tokens, in the dtype of the weights."""
        ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        tables = (self.word_embeddings, self.token_type_embeddings, self.position_embeddings)
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed(ids, tables, self.LayerNorm, site)


def unset_table(rows: int, hidden: int) -> nn.Embedding:
    """A table with weights not drawn: drawing on "meta" would import torch._dynamo, in 0.6 s."""
    weights = torch.empty(rows, hidden, device=META)
    return nn.Embedding(rows, hidden, _weight=weights)


class SelfAttention(nn.Module):
    """Query, key and value projections around an attention policy."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.query = nn.Linear(hidden, hidden, device=META)
        self.key = nn.Linear(hidden, hidden, device=META)
        self.value = nn.Linear(hidden, hidden, device=META)
        self.attend = attend
        self.blocks = blocks
        self.head_shape = (config.num_heads, config.head_size)
        self.dropout_p = config.attention_dropout
        self.dropout_stream = stream

    def forward(
        self, hidden: Tensor, wanted: Tensor, layout: AttentionLayout, keys: DropoutKeys | None
    ) -> Tensor:
        """Context [R, D] of the wanted rows [R, D] of hidden states [T, D]: the layout's queries.

        `keys` are those of the R rows.
        """
        projected = self.blocks.project_qkv(hidden, wanted, self.query, self.key, self.value)
        q, k, v = (each.view(len(each), *self.head_shape) for each in projected)
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(q, k, v, layout, site).flatten(1)


class ResidualOutput(nn.Module):
    """Projection to D, dropout, residual sum, LayerNorm: the end of both halves of a layer."""

    def __init__(self, in_features: int, config: ModelSection, blocks: Blocks, stream: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(in_features, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout
        self.dropout_stream = stream

    def forward(self, x: Tensor, residual: Tensor, keys: DropoutKeys | None) -> Tensor:
        """LayerNorm(dropout(dense(x)) + residual): [R, in_features], [R, D] -> [R, D]."""
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.blocks.residual_output(x, residual, self.dense, self.LayerNorm, site)


class AttentionHalf(nn.Module):
    """Self-attention with its output projection."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        super().__init__()
        self.self = SelfAttention(config, attend, blocks, stream)
        self.output = ResidualOutput(config.hidden_size, config, blocks, stream + 1)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] -> [R, D] of the layout's queries, whose keys are `keys`."""
        wanted = layout.select(hidden)
        attended: Tensor = self.output(self.self(hidden, wanted, layout, keys), wanted, keys)
        return attended


class Intermediate(nn.Module):
    """First feed-forward matrix with the exact (erf) GELU, arXiv 1606.08415."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, F]."""
        return self.blocks.intermediate(hidden, self.dense)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, LayerNorm after each residual sum (arXiv 1706.03762, 3.1)."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        """`stream` is the first of the layer's dropouts."""
        super().__init__()
        self.attention = AttentionHalf(config, attend, blocks, stream)
        self.intermediate = Intermediate(config, blocks)
        self.output = ResidualOutput(config.intermediate_size, config, blocks, stream + 2)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] -> [R, D] of the layout's queries, whose keys are `keys`."""
        attended = self.attention(hidden, layout, keys)
        output: Tensor = self.output(self.intermediate(attended), attended, keys)
        return output

    @property
    def products(self) -> list[tuple[nn.Linear, ...]]:
        """The layers that form each matrix product, in order."""
        attention = self.attention.self
        return [
            (attention.query, attention.key, attention.value),
            (self.attention.output.dense,),
            (self.intermediate.dense,),
            (self.output.dense,),
        ]


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks) -> None:
        super().__init__()
        first = DROPOUT_STREAM + 1
        self.layer = nn.ModuleList(
            EncoderLayer(config, attend, blocks, first + STREAMS_PER_LAYER * number)
            for number in range(config.num_layers)
        )

    def forward(
        self,
        hidden: Tensor,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        queries: Queries | None = None,
    ) -> Tensor:
        """Hidden states [T, D] -> final hidden states [T, D], or [R, D] of the queries.

        `queries` are the only outputs the caller will use. Only keys and values mix rows, so the
        last layer computes all else for just those: the same numbers for less work. (With attention
        for all rows, forward and backward of 4 layers, hidden 256, take 1.08 times as long: 16
        sequences of published lengths, one core, median of 12 rounds.)
        """
        last = len(self.layer) - 1
        for i, layer in enumerate(self.layer):
            if i == last and queries is not None:
                layout = layout.for_queries(queries)
                keys = None if keys is None else keys.rows(queries.rows)
            hidden = layer(hidden, layout, keys)
        return hidden


class PretrainingLogits(NamedTuple):
    """Scores of both tasks: `mlm` [P, V], `nsp` [B, 2] (0: B follows A, 1: random).

    `nsp` is None if model.objective leaves it out.
    """

    mlm: Tensor
    nsp: Tensor | None


class LossSums(NamedTuple):
    """Sums of cross-entropies in nats, scalars of float32 (float64 where the logits are)."""

    mlm: Tensor  # over P masked positions
    nsp: Tensor | None  # over B sequences


class Pooler(nn.Module):
    """Projection of the first token's hidden state through tanh."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, device=META)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return torch.tanh(self.dense(first_tokens))


class PredictionTransform(nn.Module):
    """Projection, GELU (erf) and LayerNorm before the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        transformed: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return transformed


class MaskedLmHead(nn.Module):
    """Scores over the vocabulary; the decoder's matrix is the word embedding, passed in."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states [P, D] of masked positions, matrix [V, D] -> logits [P, V]."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class PretrainingHeads(nn.Module):
    """Both tasks of BERT's pre-training (arXiv 1810.04805, section 3.1), or its masked LM alone."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.predictions = MaskedLmHead(config)
        # No unused weights: a reducer would wait for their gradients, and decay would shrink them.
        self.seq_relationship: nn.Linear | None = None
        if config.objective == "mlm_nsp":
            self.seq_relationship = nn.Linear(config.hidden_size, 2, device=META)
        self.blocks = blocks

    def forward(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor
    ) -> PretrainingLogits:
        """Masked positions [P, D], pooled first tokens [B, D], decoder matrix [V, D] -> logits.

        Without next-sentence prediction `pooled` is None.
        """
        return PretrainingLogits(
            mlm=self.predictions(masked, word_embeddings), nsp=self._pair_scores(pooled)
        )

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """`loss_sums` of the logits of the same arguments."""
        head = self.predictions
        factors = head.transform(masked), word_embeddings, head.bias
        return LossSums(
            mlm=self.blocks.masked_lm_loss(*factors, batch.labels),
            nsp=_pair_loss(self._pair_scores(pooled), batch),
        )

    def _pair_scores(self, pooled: Tensor | None) -> Tensor | None:
        if self.seq_relationship is None or pooled is None:
            return None
        scores: Tensor = self.seq_relationship(pooled)
        return scores


def loss_sums(logits: PretrainingLogits, batch: UnpaddedBatch) -> LossSums:
    """Summed cross-entropy of both tasks; zero, with a gradient, if P is zero."""
    return LossSums(
        mlm=cross_entropy_sum(logits.mlm, batch.labels),
        nsp=_pair_loss(logits.nsp, batch),
    )


def _pair_loss(scores: Tensor | None, batch: UnpaddedBatch) -> Tensor | None:
    return None if scores is None else cross_entropy_sum(scores, batch.next_sentence_label)


def pretraining_loss(sums: LossSums, batch: UnpaddedBatch) -> Tensor:
    """Scalar loss: each sum over its own denominator, the one of the whole update."""
    loss = sums.mlm / batch.mlm_denominator
    return loss if sums.nsp is None else loss + sums.nsp / batch.nsp_denominator


def correct_predictions(logits: PretrainingLogits, batch: UnpaddedBatch) -> Tensor:
    """Bool [P]: true if the label has the highest score (counted by MLPerf's masked-LM accuracy).

    A row with label IGNORED is false, whatever its logits hold.
    """
    return logits.mlm.argmax(dim=-1) == batch.labels

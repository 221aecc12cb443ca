"""Embeddings, post-norm encoder layers, and the masked-LM and next-sentence heads with their loss.

Shape letters: B sequences, T tokens, R wanted rows, N heads, H head size, D hidden, F feed-forward
width, V vocabulary (padded to a multiple of 8), P masked positions.

Attribute names are those of Hugging Face's BertForPreTraining, so that state_dict keys are equal.
The words that pad the vocabulary are treated like any others, as in `transformers` with vocab_size
= V. Their rows are trained and their logits are part of the softmax, but no label refers to them.
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

META = torch.device("meta")  # modules are created here, so that no random weights are drawn
DROPOUT_STREAM = 0  # dropout stream of the embeddings
STREAMS_PER_LAYER = 3  # attention probabilities, attention output, feed-forward output


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
        """Embed the batch's tokens as hidden states [T, D], in the dtype of the weights."""
        ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        tables = (self.word_embeddings, self.token_type_embeddings, self.position_embeddings)
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed(ids, tables, self.LayerNorm, site)


def unset_table(rows: int, hidden: int) -> nn.Embedding:
    """Create an embedding table without drawing its weights.

    Drawing them on "meta" would import torch._dynamo, which takes 0.6 s.
    """
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
        """Compute the context [R, D] of the wanted rows [R, D] of the hidden states [T, D].

        The wanted rows are the layout's queries. `keys` are the dropout keys of these R rows.
        """
        projected = self.blocks.project_qkv(hidden, wanted, self.query, self.key, self.value)
        q, k, v = (each.view(len(each), *self.head_shape) for each in projected)
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(q, k, v, layout, site).flatten(1)


class ResidualOutput(nn.Module):
    """Projection to D, dropout, residual sum and LayerNorm, which end both halves of a layer."""

    def __init__(self, in_features: int, config: ModelSection, blocks: Blocks, stream: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(in_features, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout
        self.dropout_stream = stream

    def forward(self, x: Tensor, residual: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Compute LayerNorm(dropout(dense(x)) + residual): [R, in_features], [R, D] -> [R, D]."""
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.blocks.residual_output(x, residual, self.dense, self.LayerNorm, site)


class AttentionHalf(nn.Module):
    """Self-attention and its output projection."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        super().__init__()
        self.self = SelfAttention(config, attend, blocks, stream)
        self.output = ResidualOutput(config.hidden_size, config, blocks, stream + 1)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Map hidden states [T, D] to [R, D] of the layout's queries.

        `keys` are the dropout keys of the queries.
        """
        wanted = layout.select(hidden)
        attended: Tensor = self.output(self.self(hidden, wanted, layout, keys), wanted, keys)
        return attended


class Intermediate(nn.Module):
    """First feed-forward matrix, followed by the exact (erf) GELU (arXiv 1606.08415)."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [R, D] to [R, F] and apply the GELU."""
        return self.blocks.intermediate(hidden, self.dense)


class EncoderLayer(nn.Module):
    """Attention and feed-forward with LayerNorm after each residual sum (arXiv 1706.03762, 3.1)."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        """Create the layer. `stream` is the dropout stream of its first dropout."""
        super().__init__()
        self.attention = AttentionHalf(config, attend, blocks, stream)
        self.intermediate = Intermediate(config, blocks)
        self.output = ResidualOutput(config.intermediate_size, config, blocks, stream + 2)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Map hidden states [T, D] to [R, D] of the layout's queries.

        `keys` are the dropout keys of the queries.
        """
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
        """Compute final hidden states [T, D] from hidden states [T, D], or [R, D] of the queries.

        If `queries` is given, the caller uses no other outputs. The last layer then computes keys
        and values for all rows, because queries attend to them, and everything else only for the
        queries. The numbers are the same. Computing attention for all rows would take 1.08 times as
        long. (This was measured with forward and backward passes of 4 layers of hidden size 256, on
        16 sequences of published lengths on one core, as the median of 12 rounds.)
        """
        last = len(self.layer) - 1
        for i, layer in enumerate(self.layer):
            if i == last and queries is not None:
                layout = layout.for_queries(queries)
                keys = None if keys is None else keys.rows(queries.rows)
            hidden = layer(hidden, layout, keys)
        return hidden


class PretrainingLogits(NamedTuple):
    """Scores of both tasks, `mlm` [P, V] and `nsp` [B, 2] (0: B follows A, 1: random).

    `nsp` is None if model.objective does not include next-sentence prediction.
    """

    mlm: Tensor
    nsp: Tensor | None


class LossSums(NamedTuple):
    """Sums of cross-entropies in nats, float32 scalars, or float64 if the logits are float64."""

    mlm: Tensor  # over P masked positions
    nsp: Tensor | None  # over B sequences


class Pooler(nn.Module):
    """Projection of the first token's hidden state, followed by tanh."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, device=META)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """Project [B, D] to [B, D] and apply tanh."""
        return torch.tanh(self.dense(first_tokens))


class PredictionTransform(nn.Module):
    """Projection, GELU (erf) and LayerNorm in front of the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform hidden states [P, D] to [P, D]."""
        transformed: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return transformed


class MaskedLmHead(nn.Module):
    """Scores over the vocabulary. The caller passes the word embedding as the decoder's matrix."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Compute logits [P, V] of masked positions [P, D] with the decoder's matrix [V, D]."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class PretrainingHeads(nn.Module):
    """Heads of BERT's pre-training tasks (arXiv 1810.04805, section 3.1), or of masked LM only."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.predictions = MaskedLmHead(config)
        # Unused weights are not created, because a reducer would wait for their gradients, and
        # weight decay would shrink them.
        self.seq_relationship: nn.Linear | None = None
        if config.objective == "mlm_nsp":
            self.seq_relationship = nn.Linear(config.hidden_size, 2, device=META)
        self.blocks = blocks

    def forward(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor
    ) -> PretrainingLogits:
        """Compute logits from masked positions [P, D], pooled first tokens [B, D] and [V, D].

        The matrix [V, D] is the decoder's. `pooled` is None without next-sentence prediction.
        """
        return PretrainingLogits(
            mlm=self.predictions(masked, word_embeddings), nsp=self._pair_scores(pooled)
        )

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """Compute the same as `loss_sums` of the logits of these arguments."""
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
    """Sum the cross-entropies of each task. If P is zero, `mlm` is zero and has a gradient."""
    return LossSums(
        mlm=cross_entropy_sum(logits.mlm, batch.labels),
        nsp=_pair_loss(logits.nsp, batch),
    )


def _pair_loss(scores: Tensor | None, batch: UnpaddedBatch) -> Tensor | None:
    return None if scores is None else cross_entropy_sum(scores, batch.next_sentence_label)


def pretraining_loss(sums: LossSums, batch: UnpaddedBatch) -> Tensor:
    """Compute the scalar loss, with each sum divided by its denominator for the whole update."""
    loss = sums.mlm / batch.mlm_denominator
    return loss if sums.nsp is None else loss + sums.nsp / batch.nsp_denominator


def correct_predictions(logits: PretrainingLogits, batch: UnpaddedBatch) -> Tensor:
    """Find the masked positions whose label has the highest score, as bool [P].

    MLPerf's masked-LM accuracy counts these. A row with label IGNORED is false whatever its logits
    are.
    """
    return logits.mlm.argmax(dim=-1) == batch.labels

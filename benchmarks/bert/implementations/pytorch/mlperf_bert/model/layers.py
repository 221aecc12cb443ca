"""Embeddings, post-norm encoder layers, and the masked-LM and next-sentence heads with their loss.

Shapes use the letters B (sequences), T (tokens), R (wanted rows), N (heads), H (head size), D
(hidden size), F (feed-forward width), V (vocabulary size, padded to a multiple of 8) and P (masked
positions).

Attribute names are those of Hugging Face's BertForPreTraining, so that state_dict keys are equal.
The words that pad the vocabulary are treated like all other words, as in `transformers` with
vocab_size = V. Their rows are trained and their logits are part of the softmax, but no label refers
to them.
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
    """BERT's sum of word, token-type and position embeddings, with LayerNorm and dropout.

    Source: BERT, arXiv 1810.04805, section 3, figure 2.
    """

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
        """Embed the batch's tokens. Returns hidden states [T, D] in the dtype of the weights."""
        ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        tables = (self.word_embeddings, self.token_type_embeddings, self.position_embeddings)
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed(ids, tables, self.LayerNorm, site)


def unset_table(rows: int, hidden: int) -> nn.Embedding:
    """Create an embedding table without drawing its initial weights.

    Drawing them on "meta" would import torch._dynamo, which takes 0.6 s.
    """
    weights = torch.empty(rows, hidden, device=META)
    return nn.Embedding(rows, hidden, _weight=weights)


class SelfAttention(nn.Module):
    """The query, key and value projections, followed by an attention policy."""

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
        """Compute the context [R, D] of the layout's queries.

        `hidden` [T, D] contains all hidden states, and `wanted` [R, D] those of the queries. `keys`
        are the dropout keys of the queries.
        """
        projected = self.blocks.project_qkv(hidden, wanted, self.query, self.key, self.value)
        q, k, v = (each.view(len(each), *self.head_shape) for each in projected)
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(q, k, v, layout, site).flatten(1)


class ResidualOutput(nn.Module):
    """A projection to D, followed by dropout, residual sum and LayerNorm.

    Both halves of an encoder layer end with these operations.
    """

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
    """The attention half of an encoder layer, which is self-attention and its residual output."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        super().__init__()
        self.self = SelfAttention(config, attend, blocks, stream)
        self.output = ResidualOutput(config.hidden_size, config, blocks, stream + 1)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Compute the output [R, D] for the layout's queries from hidden states [T, D].

        `keys` are the dropout keys of the queries.
        """
        wanted = layout.select(hidden)
        attended: Tensor = self.output(self.self(hidden, wanted, layout, keys), wanted, keys)
        return attended


class Intermediate(nn.Module):
    """The first feed-forward matrix, followed by the exact (erf) GELU (arXiv 1606.08415)."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project hidden states [R, D] to [R, F], and apply the GELU."""
        return self.blocks.intermediate(hidden, self.dense)


class EncoderLayer(nn.Module):
    """An attention half and a feed-forward half, each with LayerNorm after its residual sum.

    Source: Transformer, arXiv 1706.03762, section 3.1.
    """

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks, stream: int
    ) -> None:
        """Create the layer. `stream` is the number of the first of its three dropout streams."""
        super().__init__()
        self.attention = AttentionHalf(config, attend, blocks, stream)
        self.intermediate = Intermediate(config, blocks)
        self.output = ResidualOutput(config.intermediate_size, config, blocks, stream + 2)

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Compute the output [R, D] for the layout's queries from hidden states [T, D].

        `keys` are the dropout keys of the queries.
        """
        attended = self.attention(hidden, layout, keys)
        output: Tensor = self.output(self.intermediate(attended), attended, keys)
        return output

    @property
    def products(self) -> list[tuple[nn.Linear, ...]]:
        """The linear layers that form each matrix product, in the order of the products."""
        attention = self.attention.self
        return [
            (attention.query, attention.key, attention.value),
            (self.attention.output.dense,),
            (self.intermediate.dense,),
            (self.output.dense,),
        ]


class Encoder(nn.Module):
    """BERT's encoder, which is a stack of identical layers."""

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
        """Compute the final hidden states of all tokens [T, D], or of the queries only [R, D].

        `hidden` [T, D] are the embeddings. If `queries` is given, the caller uses no other outputs.
        The last layer then computes keys and values for all rows, because queries attend to all
        rows, and computes everything else only for the queries. The results for the queries do not
        change. Computing attention for all rows would take 1.08 times as long. (Forward and
        backward passes of 4 layers of hidden size 256 were measured on one core. The input was 16
        sequences of published lengths, and the result is a median of 12 rounds.)
        """
        last = len(self.layer) - 1
        for i, layer in enumerate(self.layer):
            if i == last and queries is not None:
                layout = layout.for_queries(queries)
                keys = None if keys is None else keys.rows(queries.rows)
            hidden = layer(hidden, layout, keys)
        return hidden


class PretrainingLogits(NamedTuple):
    """The scores `mlm` [P, V] of masked words, and the scores `nsp` [B, 2] of sentence pairs.

    In `nsp`, class 0 means that the second segment follows the first one, and class 1 that the
    second segment is random. `nsp` is None if model.objective does not include next-sentence
    prediction.
    """

    mlm: Tensor
    nsp: Tensor | None


class LossSums(NamedTuple):
    """The summed cross-entropy of each task, in nats.

    The sums are float32 scalars, or float64 if the logits are float64.
    """

    mlm: Tensor  # over P masked positions
    nsp: Tensor | None  # over B sequences


class Pooler(nn.Module):
    """The projection of the first token's hidden state, followed by tanh."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, device=META)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """Project the first tokens' hidden states [B, D] to [B, D], and apply tanh."""
        return torch.tanh(self.dense(first_tokens))


class PredictionTransform(nn.Module):
    """The projection, GELU (erf) and LayerNorm before the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the projection, GELU and LayerNorm to hidden states: [P, D] -> [P, D]."""
        transformed: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return transformed


class MaskedLmHead(nn.Module):
    """The head that scores all words of the vocabulary at each masked position.

    The decoder's matrix is the word embedding, which the caller passes.
    """

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Compute logits [P, V] of masked positions [P, D] with the decoder's matrix [V, D]."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class PretrainingHeads(nn.Module):
    """The masked-LM head, and the next-sentence head if the model predicts next sentences.

    Source: BERT, arXiv 1810.04805, section 3.1.
    """

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
        """Compute the logits of the masked positions [P, D] and of the pooled first tokens [B, D].

        `word_embeddings` [V, D] is the decoder's matrix. `pooled` is None if the model does not
        predict next sentences.
        """
        return PretrainingLogits(
            mlm=self.predictions(masked, word_embeddings), nsp=self._pair_scores(pooled)
        )

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """Compute the summed losses directly, without returning the logits.

        The result equals the sums of the cross-entropies of `logits` for the same arguments.
        """
        head = self.predictions
        factors = head.transform(masked), word_embeddings, head.bias
        scores, labels = self._pair_scores(pooled), batch.next_sentence_label
        return LossSums(
            mlm=self.blocks.masked_lm_loss(*factors, batch.labels),
            nsp=None if scores is None else cross_entropy_sum(scores, labels),
        )

    def _pair_scores(self, pooled: Tensor | None) -> Tensor | None:
        if self.seq_relationship is None or pooled is None:
            return None
        scores: Tensor = self.seq_relationship(pooled)
        return scores


def pretraining_loss(sums: LossSums, batch: UnpaddedBatch) -> Tensor:
    """Compute the scalar loss of a micro-batch, as its share of the whole update's loss.

    Each sum is divided by the batch's denominator for its task. The losses of all micro-batches of
    an update then add up to a rank's loss.
    """
    loss = sums.mlm / batch.mlm_denominator
    return loss if sums.nsp is None else loss + sums.nsp / batch.nsp_denominator


def correct_predictions(logits: PretrainingLogits, batch: UnpaddedBatch) -> Tensor:
    """Return which masked positions are predicted correctly, bool [P].

    A prediction is correct if the position's label has the highest score. MLPerf's masked-LM
    accuracy counts these positions. A row with label IGNORED is always False.
    """
    return logits.mlm.argmax(dim=-1) == batch.labels

"""One post-norm encoder layer and the stack of them, on real tokens only.

Shape letters: T tokens, R wanted rows, N heads, H head size, D hidden, F feed-forward width.

Attribute names are those of Hugging Face's BertForPreTraining, so that state_dict keys are equal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.config import ModelSection
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout import DropoutKeys, dropout, make_site
from mlperf_bert.model.embeddings import DROPOUT_STREAM

STREAMS_PER_LAYER = 3  # dropouts: of probabilities, after attention, after the feed-forward half


class SelfAttention(nn.Module):
    """Query, key and value projections around an attention policy."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, stream: int, device: torch.device
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.query = nn.Linear(hidden, hidden, device=device)
        self.key = nn.Linear(hidden, hidden, device=device)
        self.value = nn.Linear(hidden, hidden, device=device)
        self.attend = attend
        self.head_shape = (config.num_heads, config.head_size)
        self.dropout_p = config.attention_dropout
        self.dropout_stream = stream

    def forward(self, hidden: Tensor, layout: AttentionLayout, keys: DropoutKeys | None) -> Tensor:
        """Context [T, D] of hidden states [T, D]."""
        # One product with the three weights concatenated was no faster (CPU, 2 layers, hidden 128).
        q, k, v = (
            projection(hidden).unflatten(-1, self.head_shape)
            for projection in (self.query, self.key, self.value)
        )
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        return self.attend(q, k, v, layout, site).flatten(1)


class ResidualOutput(nn.Module):
    """Projection to D, dropout, residual sum, LayerNorm: the end of both halves of a layer."""

    def __init__(
        self, in_features: int, config: ModelSection, stream: int, device: torch.device
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(in_features, hidden, device=device)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=device)
        self.dropout_p = config.hidden_dropout
        self.dropout_stream = stream

    def forward(self, x: Tensor, residual: Tensor, keys: DropoutKeys | None) -> Tensor:
        """LayerNorm(dropout(dense(x)) + residual): [R, in_features], [R, D] -> [R, D]."""
        site = make_site(self.dropout_p, self.dropout_stream, keys)
        dropped = dropout(self.dense(x), site)
        normalised: Tensor = self.LayerNorm(dropped + residual)
        return normalised


class AttentionHalf(nn.Module):
    """Self-attention with its output projection."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, stream: int, device: torch.device
    ) -> None:
        super().__init__()
        self.self = SelfAttention(config, attend, stream, device)
        self.output = ResidualOutput(config.hidden_size, config, stream + 1, device)

    def forward(
        self,
        hidden: Tensor,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Hidden states [T, D] -> [T, D], or [R, D] of the given rows (int64 [R])."""
        context = self.self(hidden, layout, keys)
        if rows is not None:
            context, hidden = context.index_select(0, rows), hidden.index_select(0, rows)
            keys = None if keys is None else keys.rows(rows)
        attended: Tensor = self.output(context, hidden, keys)
        return attended


class Intermediate(nn.Module):
    """First feed-forward matrix with the exact (erf) GELU, arXiv 1606.08415."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, F]."""
        return F.gelu(self.dense(hidden))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, LayerNorm after each residual sum (arXiv 1706.03762, 3.1)."""

    def __init__(
        self, config: ModelSection, attend: AttentionPolicy, stream: int, device: torch.device
    ) -> None:
        """`stream` is the first of the layer's dropouts."""
        super().__init__()
        self.attention = AttentionHalf(config, attend, stream, device)
        self.intermediate = Intermediate(config, device)
        self.output = ResidualOutput(config.intermediate_size, config, stream + 2, device)

    def forward(
        self,
        hidden: Tensor,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] -> [T, D], or only the given rows (int64 [R]) -> [R, D]."""
        attended = self.attention(hidden, layout, keys, rows)
        kept = keys if keys is None or rows is None else keys.rows(rows)
        output: Tensor = self.output(self.intermediate(attended), attended, kept)
        return output


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, device: torch.device) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            EncoderLayer(config, attend, DROPOUT_STREAM + 1 + STREAMS_PER_LAYER * number, device)
            for number in range(config.num_layers)
        )

    def forward(
        self,
        hidden: Tensor,
        layout: AttentionLayout,
        keys: DropoutKeys | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] -> final hidden states [T, D], or [R, D] of the given rows.

        `rows` (int64 [R]) are the only outputs the caller will use. After attention every row is
        independent, so the last layer computes just those: the same numbers for less work (a step
        of 2 layers, hidden 128, 32 sequences of 16-64 tokens, on one core: 48 ms, not 64).
        """
        last = len(self.layer) - 1
        for i, layer in enumerate(self.layer):
            hidden = layer(hidden, layout, keys, rows if i == last else None)
        return hidden

"""Word, position and token-type embeddings, summed, normalised and dropped out.

Shape letters: T tokens, D hidden, V vocabulary (padded to a multiple of 8).
"""

import torch
from torch import Tensor, nn

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.dropout import DropoutKeys, make_site

DROPOUT_STREAM = 0


class Embeddings(nn.Module):
    """Input of the encoder (BERT, arXiv 1810.04805, section 3, figure 2)."""

    def __init__(self, config: ModelSection, blocks: Blocks, device: torch.device) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = _unset(config.padded_vocab_size, hidden, device)
        self.position_embeddings = _unset(config.max_position_embeddings, hidden, device)
        self.token_type_embeddings = _unset(config.type_vocab_size, hidden, device)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=device)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout

    def forward(self, batch: UnpaddedBatch, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] of the batch's tokens, in the dtype of the weights."""
        ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        tables = (self.word_embeddings, self.token_type_embeddings, self.position_embeddings)
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed(ids, tables, self.LayerNorm, site)


def _unset(rows: int, hidden: int, device: torch.device) -> nn.Embedding:
    """A table with weights not drawn: drawing on "meta" would import torch._dynamo, in 0.6 s."""
    weights = torch.empty(rows, hidden, device=device)
    return nn.Embedding(rows, hidden, _weight=weights)

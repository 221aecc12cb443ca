"""Word, position and token-type embeddings, summed, normalised and dropped out.

Shape letters: T tokens, D hidden, V vocabulary (padded to a multiple of 8).
"""

import torch
from torch import Tensor, nn

from mlperf_bert.config_sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.dropout import DropoutKeys, make_site

DROPOUT_STREAM = 0


class Embeddings(nn.Module):
    """Input of the encoder (BERT, arXiv 1810.04805, section 3, figure 2)."""

    def __init__(self, config: ModelSection, blocks: Blocks, device: torch.device) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, hidden, device=device)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, hidden, device=device
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden, device=device)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=device)
        self.blocks = blocks
        self.dropout_p = config.hidden_dropout

    def forward(self, batch: UnpaddedBatch, keys: DropoutKeys | None) -> Tensor:
        """Hidden states [T, D] of the batch's tokens, in the dtype of the weights."""
        ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
        tables = (self.word_embeddings, self.token_type_embeddings, self.position_embeddings)
        site = make_site(self.dropout_p, DROPOUT_STREAM, keys)
        return self.blocks.embed(ids, tables, self.LayerNorm, site)

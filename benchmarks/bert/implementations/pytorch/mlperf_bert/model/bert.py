"""BERT for pre-training: unpadded tokens in, scores of both tasks out.

Shape letters: B sequences, T tokens, D hidden, V vocabulary (padded), P masked positions.
"""

from types import MappingProxyType

import torch
from torch import Tensor, nn

from mlperf_bert.config import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.attention import AttentionPolicy, choose_attention
from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout import DropoutKeys
from mlperf_bert.model.embeddings import Embeddings
from mlperf_bert.model.heads import Pooler, PretrainingHeads, PretrainingLogits
from mlperf_bert.model.layers import Encoder

COMPUTED_IN = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "bf16_autocast": torch.bfloat16,
        "fp16": torch.float16,
    }
)


class BertBody(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, device: torch.device) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.embeddings = Embeddings(config, device)
        self.encoder = Encoder(config, attend, device)
        self.pooler = Pooler(config, device)

    def forward(
        self, batch: UnpaddedBatch, keys: DropoutKeys | None, rows: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [T, D], or only those of the given rows (int64 [R]) -> [R, D]."""
        layout = AttentionLayout(batch.lengths, batch.cu_seqlens, self.max_length)
        hidden: Tensor = self.encoder(self.embeddings(batch, keys), layout, keys, rows)
        return hidden


class BertForPretraining(nn.Module):
    """BERT (arXiv 1810.04805), post-norm, with masked-LM and next-sentence heads.

    state_dict() keys are Hugging Face's BertForPreTraining's; the tied decoder appears once, as
    the word embedding. Equal to it with vocab_size = config.padded_vocab_size.

    Args:
        config: shape, dropout and attention policy. `precision` only chooses the policy here: the
            weights are float32, and rounded, or run under autocast, from outside.
        device: where the weights are made; on "meta" they stay unset.
        seed: of the initial weights, which do not depend on the device.

    Raises:
        ConfigError: model.attention names a policy this device cannot run.
    """

    def __init__(self, config: ModelSection, device: torch.device, *, seed: int = 0) -> None:
        super().__init__()
        dtype = COMPUTED_IN[config.precision]
        attend = choose_attention(config.attention, device, dtype, config.head_size)
        self.config = config
        self.dropout_seed = 0
        # Of the update that is computed: a plain attribute, as it is no part of the model's state.
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # skip_init's way: modules made on "meta" draw nothing from the global generator.
        meta = torch.device("meta")
        self.bert = BertBody(config, attend, meta)
        self.cls = PretrainingHeads(config, meta)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """normal(0, initializer_range) matrices, zero biases, LayerNorm weights of one.

        (BERT, appendix A.2 and its published code, but not truncated, as in `transformers`.)

        Args:
            generator: a CPU generator; numbers are drawn on the host, in the order of parameters,
                so that every rank and device gets the same weights.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "LayerNorm" in name:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                drawn.normal_(0.0, self.config.initializer_range, generator=generator)
                parameter.copy_(drawn)

    def dropout_keys(self, batch: UnpaddedBatch) -> DropoutKeys | None:
        """Of the batch's T tokens; None in evaluation."""
        if not self.training:
            return None
        counts, num_tokens = batch.cu_seqlens.diff(), batch.input_ids.shape[0]
        sample_ids = batch.sample_ids.repeat_interleave(counts, output_size=num_tokens)
        return DropoutKeys(self.dropout_seed, self.step, sample_ids, batch.position_ids)

    def forward(self, batch: UnpaddedBatch) -> PretrainingLogits:
        """Logits of the masked positions [P, V] and of the sentence pairs [B, 2]."""
        num_masked = batch.masked_token_index.shape[0]
        # Nothing else of the last layer is used, so nothing else of it is computed.
        rows = torch.cat((batch.masked_token_index, batch.cu_seqlens[:-1].long()))
        masked, first = self.bert(batch, self.dropout_keys(batch), rows).tensor_split((num_masked,))
        decoder = self.bert.embeddings.word_embeddings.weight
        logits: PretrainingLogits = self.cls(masked, self.bert.pooler(first), decoder)
        return logits

"""BERT for pre-training: unpadded tokens in, scores of both tasks out.

Shape letters: B sequences, C sequences whose first token is read, T tokens, D hidden, V vocabulary
(padded), P masked positions, R = C + P rows of the last layer that are read.
"""

from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout, Queries
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.choices import AttentionChoice, choose_attention, choose_blocks
from mlperf_bert.model.dropout_keys import DropoutKeys
from mlperf_bert.model.fp8 import PRODUCTS_PER_LAYER, Fp8Scales, products_of
from mlperf_bert.model.heads import LossSums, Pooler, PretrainingHeads, PretrainingLogits
from mlperf_bert.model.layers import Embeddings, Encoder

COMPUTED_IN = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "bf16_autocast": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.bfloat16,
    }
)


def last_rows(batch: UnpaddedBatch, max_length: int, num_first: int) -> tuple[Queries, Tensor]:
    """The R rows of a batch that the heads read (first and masked tokens), in token order.

    Shapes follow from the batch's shapes alone and nothing is read from the device, so it can be
    captured. Padding slots are rows as well: an empty sequence slot stands for the batch's last
    token, and an unused masked slot for the token it names.

    Args:
        batch: may be padded to a capacity.
        max_length: tokens of the longest possible sequence.
        num_first: C, counted from the batch's first sequence; 0 if nothing is pooled.

    Returns:
        The rows as queries of the last layer, and the positions among them, int64 [C + P], of the
        first tokens, then of the masked tokens.
    """
    num_tokens = batch.input_ids.shape[0]
    bounds = batch.cu_seqlens.long()
    first = bounds[:num_first].clamp(max=num_tokens - 1)
    # Stable: if a first token is masked too, the sequence's first row is that of its slot.
    rows, order = torch.cat((first, batch.masked_token_index)).sort(stable=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=order.device))
    lengths = _query_lengths(batch, num_first)
    most = 1 + (max_length if batch.shape is None else batch.shape.max_masked)
    assert max(lengths) <= most
    queries = Queries(
        rows=rows,
        cu_seqlens=torch.searchsorted(rows, bounds, out_int32=True),
        lengths=lengths,
        max_length=most,
    )
    return queries, place


def _query_lengths(batch: UnpaddedBatch, num_first: int) -> tuple[int, ...]:
    """Number of rows of each sequence, on the host."""
    counts = list(batch.masked_counts)
    assert len(counts) == len(batch.lengths)
    assert sum(counts) == len(batch.masked_token_index)
    last_with_tokens = max(i for i, length in enumerate(batch.lengths) if length)
    for i in range(num_first):
        counts[min(i, last_with_tokens)] += 1
    return tuple(counts)


class BertBody(nn.Module):
    """Embeddings, encoder and, for next-sentence prediction, pooler."""

    def __init__(self, config: ModelSection, attend: AttentionPolicy, blocks: Blocks) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.embeddings = Embeddings(config, blocks)
        self.encoder = Encoder(config, attend, blocks)
        self.pooler = Pooler(config) if config.objective == "mlm_nsp" else None

    def forward(
        self, batch: UnpaddedBatch, keys: DropoutKeys | None, queries: Queries | None = None
    ) -> Tensor:
        """Final hidden states [T, D], or only those of the queries [R, D]."""
        layout = AttentionLayout(batch.lengths, batch.cu_seqlens, self.longest(batch))
        hidden: Tensor = self.encoder(self.embeddings(batch, keys), layout, keys, queries)
        return hidden

    def longest(self, batch: UnpaddedBatch) -> int:
        """Tokens of the longest possible sequence in all batches of this one's shape."""
        return self.max_length if batch.shape is None else batch.shape.max_seqlen


class BertForPretraining(nn.Module):
    """BERT (arXiv 1810.04805), post-norm, with masked-LM and next-sentence heads.

    state_dict() keys are Hugging Face's BertForPreTraining's, or BertForMaskedLM's where
    model.objective is "mlm"; the tied decoder appears once, as the word embedding. The model equals
    theirs with vocab_size = config.padded_vocab_size.

    Args:
        config: shape, dropout and attention policy. `precision` only chooses the policy here:
            weights are made in float32; the caller rounds them or uses autocast.
        device: device of the weights; on "meta" they stay unset.
        seed: seed of the initial weights, which do not depend on the device.
        attention: the choice made for another model of this config; None: choose here.

    Raises:
        ConfigError: this device cannot run the named model.attention or model.kernels.
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
        self.config = config
        self.attention = attention or choose_attention(config, device, dtype)
        self.dropout_seed = 0
        # Number of the update in progress: a plain attribute, not part of the model's state.
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # Like skip_init: modules made on "meta" draw nothing from the global generator.
        self.bert = BertBody(config, self.attention.policy, blocks)
        self.cls = PretrainingHeads(config, blocks)
        if self.fp8 is not None:
            self.fp8.assign(products_of(self.bert.encoder.layer))
        if device.type != "meta":
            # to_empty() would do, but its empty_like() of "meta" imports sympy, which takes 0.3 s.
            self._apply(  # type: ignore[no-untyped-call]
                lambda each: torch.empty(each.shape, dtype=each.dtype, device=device)
            )
            self.reset_parameters(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw matrices from normal(0, initializer_range); biases are zero, LayerNorm weights one.

        (BERT, appendix A.2 and its published code, but not truncated, as in `transformers`.)

        Args:
            generator: a CPU generator. Numbers are drawn on the host in the order of parameters, so
                that every rank and device gets the same weights.
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
        """Dropout keys of the batch's T tokens; None in evaluation."""
        if not self.training:
            return None
        counts, num_tokens = batch.cu_seqlens.diff(), batch.input_ids.shape[0]
        sample_ids = batch.sample_ids.repeat_interleave(counts, output_size=num_tokens)
        return DropoutKeys(self.dropout_seed, self.step, sample_ids, batch.position_ids)

    def fp8_state(self) -> dict[str, Tensor]:
        """FP8 scales by name: state that a step changes beside weights and optimizer."""
        return {} if self.fp8 is None else self.fp8.tensors()

    def forward(
        self, batch: UnpaddedBatch, result: Literal["logits", "loss_sums"] = "logits"
    ) -> PretrainingLogits | LossSums:
        """Logits of the masked positions [P, V] and of the sentence pairs [B, 2], or their losses.

        Training asks for `loss_sums`, which does not need all logits at once (`model.head`).
        """
        if self.fp8 is not None and self.training:
            self.fp8.follow(self.step)
        # The last layer computes only the rows that are read.
        pooler = self.bert.pooler
        num_first = 0 if pooler is None else batch.next_sentence_label.shape[0]
        queries, place = last_rows(batch, self.bert.longest(batch), num_first)
        hidden = self.bert(batch, self.dropout_keys(batch), queries)
        first, masked = hidden.index_select(0, place).tensor_split((num_first,))
        decoder = self.bert.embeddings.word_embeddings.weight
        pooled = None if pooler is None else pooler(first)
        if result == "loss_sums":
            return self.cls.loss_sums(masked, pooled, decoder, batch)
        logits: PretrainingLogits = self.cls(masked, pooled, decoder)
        return logits

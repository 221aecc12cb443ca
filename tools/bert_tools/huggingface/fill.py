"""Fill-mask: a model's most probable words for [MASK], with their probabilities.

Shape letters: T tokens of the text, P masked positions, V vocabulary (padded).
"""

from dataclasses import dataclass

import torch

from bert_tools.huggingface.tokenizer import tokens_of
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch, empty_batch
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.word_pieces import Vocabulary


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token of the vocabulary, and its probability among all."""

    token: str
    probability: float


def fill(
    model: BertForPretraining, vocabulary: AnyVocabulary, text: str, top: int
) -> list[list[Candidate]]:
    """The `top` candidates for each [MASK] of a text, in order; the model is in evaluation mode.

    Several masked words are predicted independently. Special tokens are no candidates.

    Raises:
        ConfigError: the text has no [MASK], or is too long for the model.
    """
    batch = _batch(tokens_of(text, vocabulary, model.config.max_position_embeddings), vocabulary)
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(batch.to(device)).mlm  # [P, V]
        probabilities = logits.float().softmax(dim=-1)[:, : len(vocabulary)]
        special = {
            getattr(vocabulary, f"{role}_id") for role in ("pad", "unk", "cls", "sep", "mask")
        }
        probabilities[:, sorted(special)] = 0
        best = probabilities.topk(min(top, len(vocabulary) - len(special)), dim=-1)
    return [
        [Candidate(_spelled(token, vocabulary), value) for token, value in zip(*pair, strict=True)]
        for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _spelled(token: int, vocabulary: AnyVocabulary) -> str:
    if isinstance(vocabulary, Vocabulary):
        return vocabulary.tokens[token]
    # A token that is no character by itself, such as a space or a byte, has only its name.
    tokenizer = vocabulary.tokenizer
    return str(tokenizer.decode([token])).strip() or str(tokenizer.id_to_token(token))


def _batch(tokens: list[int], vocabulary: AnyVocabulary) -> UnpaddedBatch:
    """One sequence of one segment, whose [MASK] are the masked positions."""
    input_ids = torch.tensor(tokens)
    masked = (input_ids == vocabulary.mask_id).nonzero().flatten()
    batch = empty_batch((len(tokens),), (len(masked),))
    batch.input_ids.copy_(input_ids)
    torch.arange(len(tokens), out=batch.position_ids)
    batch.token_type_ids.zero_()
    batch.cu_seqlens.copy_(torch.tensor([0, len(tokens)]))
    batch.sample_ids.zero_()
    batch.masked_token_index.copy_(masked)
    batch.labels.fill_(IGNORED)
    batch.next_sentence_label.zero_()
    batch.mlm_denominator.fill_(1)
    batch.nsp_denominator.fill_(1)
    return batch

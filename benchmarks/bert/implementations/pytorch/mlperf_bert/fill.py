"""What a model puts in the place of [MASK]: its most probable words, with their probabilities.

Shape letters: T tokens of the text, P masked positions, V vocabulary (padded).
"""

from dataclasses import dataclass

import torch

from mlperf_bert.data.batch import IGNORED, UnpaddedBatch, empty_batch
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, Vocabulary
from mlperf_bert.prepare.wordpiece import PlainTokenizer

MASK = "[MASK]"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token of the vocabulary, and its probability among all."""

    token: str
    probability: float


def fill(
    model: BertForPretraining, vocabulary: Vocabulary, text: str, top: int
) -> list[list[Candidate]]:
    """The `top` candidates of each [MASK] of a text, in their order; the model is in evaluation.

    Several masked words are predicted each by itself, none knowing the others. Special tokens are
    no candidates.

    Raises:
        ConfigError: the text has no [MASK], or is longer than the model takes.
    """
    batch = _batch(tokens_of(text, vocabulary, model.config.max_position_embeddings), vocabulary)
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(batch.to(device)).mlm  # [P, V]
        probabilities = logits.float().softmax(dim=-1)[:, : len(vocabulary)].cpu()
    probabilities[:, [vocabulary.ids[token] for token in SPECIAL_TOKENS]] = 0
    best = probabilities.topk(min(top, len(vocabulary) - len(SPECIAL_TOKENS)), dim=-1)
    return [
        [Candidate(vocabulary.tokens[token], value) for token, value in zip(*pair, strict=True)]
        for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def tokens_of(text: str, vocabulary: Vocabulary, most: int) -> list[int]:
    """[CLS], the text's word pieces as `prepare` makes them, [SEP]; at most `most`."""
    tokenizer = PlainTokenizer(vocabulary)
    first, *others = text.split(MASK)
    if not others:
        raise ConfigError("text", f"has no {MASK}", f"write {MASK} where a word is to be filled in")
    tokens = [vocabulary.cls_id, *tokenizer.encode(first)]
    for part in others:
        tokens += [vocabulary.mask_id, *tokenizer.encode(part)]
    tokens.append(vocabulary.sep_id)
    if len(tokens) > most:
        problem = f"has {len(tokens)} tokens, the model takes {most}"
        raise ConfigError("text", problem, "shorten it")
    return tokens


def _batch(tokens: list[int], vocabulary: Vocabulary) -> UnpaddedBatch:
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

"""Generate sequences `[CLS] sentences [SEP]` of whole sentences instead of pairs of segments.

A sequence contains as many consecutive sentences of one document as fit. A sentence that is longer
than a sequence is cut. This is the format DOC-SENTENCES, the best input format of RoBERTa (arXiv
1907.11692, section 4.2). No sequence crosses documents, and short sequences are not padded. Each
pass stores the same sequences with new masks.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.compiled import compiled
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.compiled_masking import ALL_DRAWN, draw_masks
from mlperf_bert.data.index import ShardSettings, masked_count_table
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare.documents import Documents
from mlperf_bert.prepare.examples import interrupt_deferred, joined
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

SPECIAL_PER_SEQUENCE = 2


def make_sequences(
    documents: Documents, vocabulary: AnyVocabulary, settings: ShardSettings, source_sha256: str
) -> ShardArrays:
    """Return the masked sequences of all passes, in the order of the text.

    There must be at least one document. The masks depend on the settings' seed and on the text's
    digest, so that two texts have different masks. The peak memory is twice the size of the
    examples. Ctrl-C takes effect at the end of a pass.
    """
    with interrupt_deferred():
        max_tokens = settings.max_seq_length - SPECIAL_PER_SEQUENCE
        ends = cut(documents.sentence_offsets, documents.document_offsets, max_tokens)
        starts = np.concatenate((documents.sentence_offsets[:1], ends))[:-1]
        offsets = np.zeros(len(ends) + 1, dtype=np.int64)
        np.cumsum(ends - starts + SPECIAL_PER_SEQUENCE, out=offsets[1:])
        tokens = np.empty(offsets[-1], documents.tokens.dtype)
        _lay_out(documents.tokens, starts, offsets, vocabulary.cls_id, vocabulary.sep_id, tokens)
    lengths = np.diff(offsets)
    table = masked_count_table(
        settings.max_seq_length, settings.max_predictions, STORED_MASKING_RATE
    )
    counts = table[lengths].astype(np.int64)
    digest = hashlib.sha256(f"{settings.seed}/stored masks/{source_sha256}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    special = np.unique(
        [vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id]
    )
    masked_offsets = np.concatenate(([0], np.cumsum(counts)))
    passes = []
    for number in range(settings.dupe_factor):
        masked = tokens.copy()
        positions = np.empty(masked_offsets[-1], dtype=np.uint16)
        labels = np.empty(len(positions), dtype=tokens.dtype)
        with interrupt_deferred():
            wrong = draw_masks(
                masked,
                offsets,
                np.arange(len(counts)),
                counts,
                special,
                vocabulary.mask_id,
                len(vocabulary),
                number,
                seed,
                positions,
                labels,
            )
        assert wrong == ALL_DRAWN  # Encoders return no special tokens.
        passes.append(
            ShardArrays(
                input_ids=masked,
                offsets=offsets,
                segment_b_start=lengths.astype(np.uint16),
                masked_lm_positions=positions,
                masked_lm_ids=labels,
                masked_lm_offsets=masked_offsets,
                next_sentence_label=np.zeros(len(lengths), np.uint8),
            )
        )
    return joined(passes)


@compiled
def cut(
    sentence_offsets: NDArray[np.int64], document_offsets: NDArray[np.int64], max_tokens: int
) -> NDArray[np.int64]:
    """Cut documents into sequences of at most `max_tokens` tokens, and return where they end.

    The result is int64 [sequences], in ascending order, and counts tokens over all documents. The
    first sequence starts at token 0, and each other sequence starts where the previous one ends.
    `sentence_offsets` [N + 1] are indices of tokens, and `document_offsets` [D + 1] are indices of
    sentences.
    """
    most = len(sentence_offsets) + (sentence_offsets[-1] - sentence_offsets[0]) // max_tokens
    ends = np.empty(most, np.int64)
    count = 0
    for document in range(len(document_offsets) - 1):
        start = sentence_offsets[document_offsets[document]]
        taken = start
        for sentence in range(document_offsets[document], document_offsets[document + 1]):
            end = sentence_offsets[sentence + 1]
            if end - start > max_tokens and taken > start:
                ends[count] = taken
                start = taken
                count += 1
            while end - start > max_tokens:
                start += max_tokens
                ends[count] = start
                count += 1
            taken = end
        if taken > start:
            ends[count] = taken
            count += 1
    return ends[:count]


@compiled
def _lay_out(
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    cls_id: int,
    sep_id: int,
    target: NDArray[Any],
) -> None:
    """Write each sequence as [CLS] sentences [SEP] to `target`, end to end.

    Sequence i begins at token `starts[i]` of the text and at element `offsets[i]` of `target`.
    """
    for i in range(len(starts)):
        at, end = offsets[i], offsets[i + 1]
        target[at] = cls_id
        for position in range(at + 1, end - 1):
            target[position] = tokens[starts[i] + position - at - 1]
        target[end - 1] = sep_id

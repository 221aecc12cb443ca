"""Documents to sequences of whole sentences, without pairs: [CLS] sentences [SEP].

A sequence has as many neighbouring sentences of one document as fit; a longer sentence is cut
(RoBERTa's DOC-SENTENCES, arXiv 1907.11692, section 4.2: the best of its input formats). No sequence
crosses documents, and short ones are not padded. Each pass stores new masks of the same sequences.
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
    """All sequences of each pass, in the order of the text; needs at least one document.

    The settings' seed and the text's digest decide the masks, so two texts get different masks. At
    its peak this holds the examples twice. Ctrl-C waits for the end of a pass.
    """
    with interrupt_deferred():
        room = settings.max_seq_length - SPECIAL_PER_SEQUENCE
        ends = cut(documents.sentence_offsets, documents.document_offsets, room)
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
        masked = tokens.copy()  # seed of pass `number`
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
        assert wrong == ALL_DRAWN  # encoders return no special tokens
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
    sentence_offsets: NDArray[np.int64], document_offsets: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    """The ends of sequences of at most `room` tokens, counted over all documents, ascending.

    The result is int64 [sequences]. The first sequence begins at token 0, each other one at the end
    of the one before. `sentence_offsets` [N + 1] index tokens, `document_offsets` [D + 1]
    sentences.
    """
    most = len(sentence_offsets) + (sentence_offsets[-1] - sentence_offsets[0]) // room
    ends = np.empty(most, np.int64)
    count = 0
    for document in range(len(document_offsets) - 1):
        start = sentence_offsets[document_offsets[document]]
        taken = start
        for sentence in range(document_offsets[document], document_offsets[document + 1]):
            end = sentence_offsets[sentence + 1]
            if end - start > room and taken > start:
                ends[count] = taken
                start = taken
                count += 1
            while end - start > room:
                start += room
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
    for i in range(len(starts)):
        at, end = offsets[i], offsets[i + 1]
        target[at] = cls_id
        for place in range(at + 1, end - 1):
            target[place] = tokens[starts[i] + place - at - 1]
        target[end - 1] = sep_id

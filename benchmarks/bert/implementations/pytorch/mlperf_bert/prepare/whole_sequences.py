"""Documents to sequences of whole sentences, without pairs: [CLS] sentences [SEP].

As many neighbouring sentences of one document as fit; a longer sentence is cut (RoBERTa's
DOC-SENTENCES, arXiv 1907.11692, section 4.2: the best of its input formats). No sequence crosses a
document, and short ones need no padding here. Each pass stores other masks of the same sequences.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled, usable_cache
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.compiled_masking import ALL_DRAWN, draw_masks
from mlperf_bert.data.index import masked_count_table
from mlperf_bert.prepare.documents import Documents
from mlperf_bert.prepare.examples import ExampleArrays, interrupt_deferred
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.word_pieces import token_dtype

SPECIAL_PER_SEQUENCE = 2


class SequenceMaker:
    """Sequences of the documents of one text file, and their stored masks."""

    def __init__(
        self,
        vocabulary: AnyVocabulary,
        *,
        max_seq_length: int,
        max_predictions: int,
        seed: int,
        source_sha256: str,
    ) -> None:
        """`seed` and the text's digest decide the masks, so that two texts have other ones."""
        self._vocabulary = vocabulary
        self._room = max_seq_length - SPECIAL_PER_SEQUENCE
        self._counts = masked_count_table(max_seq_length, max_predictions, STORED_MASKING_RATE)
        digest = hashlib.sha256(f"{seed}/stored masks/{source_sha256}".encode()).digest()
        self._seed = int.from_bytes(digest[:8], "little") >> 1

    def make(self, documents: Documents, passes: int) -> ExampleArrays:
        """All sequences of each pass, in the order of the text; needs one document at least.

        At its peak this holds the examples twice. Ctrl-C waits for the end of a pass.
        """
        with interrupt_deferred():
            ends = cut(documents.sentence_offsets, documents.document_offsets, self._room)
            starts = np.concatenate((documents.sentence_offsets[:1], ends))[:-1]
            offsets = np.zeros(len(ends) + 1, dtype=np.int64)
            np.cumsum(ends - starts + SPECIAL_PER_SEQUENCE, out=offsets[1:])
            tokens = np.empty(offsets[-1], documents.tokens.dtype)
            _lay_out(
                documents.tokens,
                starts,
                offsets,
                self._vocabulary.cls_id,
                self._vocabulary.sep_id,
                tokens,
            )
        counts = self._counts[np.diff(offsets)].astype(np.int64)
        made = [self._masked(tokens.copy(), offsets, counts, number) for number in range(passes)]
        return _joined(made, offsets, counts)

    def _masked(
        self,
        tokens: NDArray[Any],
        offsets: NDArray[np.int64],
        counts: NDArray[np.int64],
        number: int,
    ) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[Any]]:
        """Tokens as they are after masking, positions and labels of one pass."""
        positions = np.empty(counts.sum(), dtype=np.uint16)
        labels = np.empty(len(positions), dtype=tokens.dtype)
        ids = self._vocabulary
        special = np.unique(np.array([ids.pad_id, ids.cls_id, ids.sep_id, ids.mask_id]))
        with interrupt_deferred():
            wrong = draw_masks(
                tokens,
                offsets,
                np.arange(len(counts)),
                counts,
                special,
                ids.mask_id,
                len(ids),
                number,
                self._seed,
                positions,
                labels,
            )
        assert wrong == ALL_DRAWN  # encoders give no special tokens
        return tokens, positions, labels


def compile_sequences(vocabulary: AnyVocabulary) -> None:
    """Compile what `SequenceMaker.make` runs for this vocabulary, or load it from the cache.

    Raises ConfigError when the cache is damaged or cannot be written.
    """
    nothing = Documents(
        tokens=np.zeros(0, dtype=token_dtype(len(vocabulary))),
        sentence_offsets=np.zeros(1, dtype=np.int64),
        document_offsets=np.zeros(1, dtype=np.int64),
    )
    maker = SequenceMaker(vocabulary, max_seq_length=8, max_predictions=1, seed=0, source_sha256="")
    with usable_cache(draw_masks):
        maker.make(nothing, passes=1)


@compiled
def cut(
    sentence_offsets: NDArray[np.int64], document_offsets: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    """Where each sequence ends among the tokens of all documents, int64 [sequences], ascending.

    The first begins at token 0, and each where the one before it ends.

    Args:
        sentence_offsets: [N + 1] into the tokens.
        document_offsets: [D + 1] into the sentences.
        room: tokens of a sequence at most.
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


def _joined(
    made: list[tuple[NDArray[Any], NDArray[np.uint16], NDArray[Any]]],
    offsets: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> ExampleArrays:
    """The passes one after the other."""
    lengths = np.tile(np.diff(offsets), len(made))
    tokens, positions, labels = (np.concatenate(parts) for parts in zip(*made, strict=True))
    return ExampleArrays(
        input_ids=tokens,
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        segment_b_start=lengths.astype(np.uint16),
        masked_lm_positions=positions,
        masked_lm_ids=labels,
        masked_lm_offsets=np.concatenate(([0], np.cumsum(np.tile(counts, len(made))))),
        next_sentence_label=np.zeros(len(lengths), dtype=np.uint8),
    )

"""The reference's example making in plain Python, to hold the compiled code against.

Documents are lists of sentences, sentences are lists of token ids; `random.Random` is the random
stream. Nothing here is arranged for speed.
"""

import random
from itertools import pairwise

import numpy as np

from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare.documents import Documents
from mlperf_bert.vocabulary.word_pieces import token_dtype


def plain_examples(documents, vocabulary, settings):
    """`make_examples`, which has the same signature."""
    return _Maker(vocabulary, settings).make(documents)


class _Maker:
    def __init__(self, vocabulary, settings):
        self.vocabulary = vocabulary
        self.passes = settings.dupe_factor
        self.room = settings.max_seq_length - 3
        self.max_predictions = settings.max_predictions
        self.rng = random.Random(settings.seed)
        self.found = []

    def make(self, documents):
        nested = as_lists(documents)
        self.rng.shuffle(nested)
        for _ in range(self.passes):
            for number in range(len(nested)):
                self.add_document(nested, number)
        self.rng.shuffle(self.found)
        return self.arrays()

    def add_document(self, documents, number):
        document = documents[number]
        target = self.room
        if self.rng.random() < 0.1:
            target = self.rng.randint(2, self.room)
        chunk = []
        length = 0
        i = 0
        while i < len(document):
            chunk.append(document[i])
            length += len(document[i])
            if i == len(document) - 1 or length >= target:
                end_of_a = self.rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                segment_a = joined(chunk[:end_of_a])
                if len(chunk) == 1 or self.rng.random() < 0.5:
                    segment_b = self.random_segment(documents, number, target - len(segment_a))
                    i -= len(chunk) - end_of_a
                    self.add_example(segment_a, segment_b, next_label=1)
                else:
                    self.add_example(segment_a, joined(chunk[end_of_a:]), next_label=0)
                chunk = []
                length = 0
            i += 1

    def random_segment(self, documents, number, wanted):
        for _ in range(10):
            other = self.rng.randint(0, len(documents) - 1)
            if other != number:
                break
        sentences = documents[other]
        start = self.rng.randint(0, len(sentences) - 1)
        segment = []
        for sentence in sentences[start:]:
            segment += sentence
            if len(segment) >= wanted:
                break
        return segment

    def add_example(self, segment_a, segment_b, next_label):
        segment_a, segment_b = list(segment_a), list(segment_b)
        while len(segment_a) + len(segment_b) > self.room:
            longer = segment_a if len(segment_a) > len(segment_b) else segment_b
            del longer[0 if self.rng.random() < 0.5 else -1]
        ids = self.vocabulary
        tokens = [ids.cls_id, *segment_a, ids.sep_id, *segment_b, ids.sep_id]
        start_of_b = len(segment_a) + 2
        labels = self.mask(tokens, {0, start_of_b - 1, len(tokens) - 1})
        self.found.append(
            {
                "input_ids": tokens,
                "segment_b_start": [start_of_b],
                "masked_lm_positions": sorted(labels),
                "masked_lm_ids": [labels[position] for position in sorted(labels)],
                "next_sentence_label": [next_label],
            }
        )

    def mask(self, tokens, fixed):
        """Mask `tokens` in place; the original tokens by position."""
        candidates = [position for position in range(len(tokens)) if position not in fixed]
        self.rng.shuffle(candidates)
        count = min(self.max_predictions, max(1, round(len(tokens) * 0.15)))
        labels = {}
        for position in candidates[:count]:
            labels[position] = tokens[position]
            if self.rng.random() < 0.8:
                tokens[position] = self.vocabulary.mask_id
            elif self.rng.random() >= 0.5:
                tokens[position] = self.rng.randint(0, len(self.vocabulary) - 1)
        return labels

    def arrays(self):
        dtype = token_dtype(len(self.vocabulary))
        return ShardArrays(
            input_ids=self.flat("input_ids", dtype),
            offsets=self.offsets("input_ids"),
            segment_b_start=self.flat("segment_b_start", np.uint16),
            masked_lm_positions=self.flat("masked_lm_positions", np.uint16),
            masked_lm_ids=self.flat("masked_lm_ids", dtype),
            masked_lm_offsets=self.offsets("masked_lm_ids"),
            next_sentence_label=self.flat("next_sentence_label", np.uint8),
        )

    def flat(self, key, dtype):
        return np.array(joined([example[key] for example in self.found]), dtype=dtype)

    def offsets(self, key):
        lengths = [len(example[key]) for example in self.found]
        return np.cumsum([0, *lengths], dtype=np.int64)


def joined(lists):
    return [number for one in lists for number in one]


def as_lists(documents):
    tokens = documents.tokens.tolist()
    ends = documents.sentence_offsets.tolist()
    sentences = [tokens[start:end] for start, end in pairwise(ends)]
    ends = documents.document_offsets.tolist()
    return [sentences[start:end] for start, end in pairwise(ends)]


def as_documents(nested, vocab_size):
    sentences = [sentence for document in nested for sentence in document]
    return Documents(
        tokens=np.array(joined(sentences), dtype=token_dtype(vocab_size)),
        sentence_offsets=np.cumsum([0, *map(len, sentences)], dtype=np.int64),
        document_offsets=np.cumsum([0, *map(len, nested)], dtype=np.int64),
    )

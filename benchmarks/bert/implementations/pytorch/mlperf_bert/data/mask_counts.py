"""How many tokens of a sequence are masked, a function of its length and the rate, and which never.

So every rank knows the masked positions of all others without reading a sample or asking.
"""

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.index import Manifest
from mlperf_bert.data.permutation import Int64Array


def masked_count_table(max_seq_length: int, max_predictions: int, rate: float) -> NDArray[np.uint8]:
    """Masked positions by length, uint8 [max_seq_length + 1]: the MLPerf reference's formula.

    min(max_predictions, max(1, round(rate * length))), where length counts special tokens and
    round() is half to even. `max_predictions` is 255 at most.
    """
    counts = [
        min(max_predictions, max(1, round(rate * length))) for length in range(max_seq_length + 1)
    ]
    return np.array(counts, dtype=np.uint8)


class CountsByLength:
    """What an index holds as masked counts, computed where it is asked for."""

    def __init__(self, lengths: NDArray[np.uint16], table: NDArray[np.uint8]) -> None:
        """Of samples with `lengths` [N], which may be a memory map; `table` is by length."""
        self._lengths = lengths
        self._table = table

    def __getitem__(self, ids: Int64Array) -> NDArray[np.uint8]:
        """Masked positions of some samples, uint8 [n]."""
        counts: NDArray[np.uint8] = self._table[self._lengths[ids]]
        return counts


def special_ids(manifest: Manifest) -> Int64Array:
    """Ids that stand for no text, int64, ascending, each once: never masked, nor put in for a word.

    [UNK] stands for text that the vocabulary lacks, so it is a token as others are, as in BERT.
    """
    ids = (manifest.pad_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    return np.unique(np.array(ids, dtype=np.int64))

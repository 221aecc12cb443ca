"""Writers of the HDF5 files in which others keep examples: rows of one length, padded.

Plain on purpose, one example after the other, with nothing of the reader.
"""

from functools import partial
from itertools import pairwise

import h5py
import numpy as np

from mlperf_bert.data.shards import Shard


def examples_of(shard):
    """The examples of one of our shards."""
    arrays = Shard(shard).arrays()
    spans = zip(pairwise(arrays.offsets), pairwise(arrays.masked_lm_offsets), strict=True)
    found = []
    for number, ((first, end), (first_masked, end_masked)) in enumerate(spans):
        start_of_b = int(arrays.segment_b_start[number])
        found.append(
            {
                "input_ids": arrays.input_ids[first:end].tolist(),
                "segment_ids": [0] * start_of_b + [1] * int(end - first - start_of_b),
                "masked_lm_positions": arrays.masked_lm_positions[first_masked:end_masked].tolist(),
                "masked_lm_ids": arrays.masked_lm_ids[first_masked:end_masked].tolist(),
                "next_sentence_labels": [int(arrays.next_sentence_label[number])],
            }
        )
    return found


def padded(example, width, room):
    """An example padded like the reference's, without weights."""
    masked = {"masked_lm_positions": room, "masked_lm_ids": room, "next_sentence_labels": 1}
    mask = {"input_mask": [1] * len(example["input_ids"])}
    return {
        name: values + [0] * (masked.get(name, width) - len(values))
        for name, values in {**example, **mask}.items()
    }


def write_fixed(path, examples, width, room, **options):
    """2-D arrays, padded; labels 1-D."""
    rows = [padded(example, width, room) for example in examples]
    with h5py.File(path, "w") as file:
        for name in rows[0]:
            values = np.array([row[name] for row in rows], dtype=np.int32)
            if name == "next_sentence_labels":
                values = values[:, 0].astype(np.int8)
            file.create_dataset(name, data=values, **options)


# Ending of the file -> what writes it.
WRITERS = {
    "fixed.hdf5": write_fixed,
    "fixed_gzip.hdf5": partial(write_fixed, compression="gzip"),
}

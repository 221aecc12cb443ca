"""The features of an example in files of others, by name and number, and how rows travel as bytes.

Imports nothing: the child that reads HDF5 needs it.
"""

import struct

FEATURES = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "masked_lm_weights",
    "next_sentence_labels",
    "packed_input_len",
    "packed_masked_lm_len",
)
IDS, MASK, SEGMENTS, POSITIONS, LABELS, WEIGHTS, NEXT, LENGTHS, MASKED_LENGTHS = range(9)
ABSENT = -1  # count of a feature that a row does not have

# A piece of n rows: n, then counts, int32 [n, K], then the values of feature after feature, int32.
NUM_ROWS = struct.Struct("<q")
MOST_ROWS = 2**12
MOST_VALUES = 2**22  # of one feature

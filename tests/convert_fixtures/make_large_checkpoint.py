"""Writes a checkpoint of BERT-large's size with the real TensorFlow: `... PREFIX`.

398 tensors of float32, 1.34 GB, drawn at random; needs 5 GB of memory.
"""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

import tensorflow_cases as cases

SPREAD = 0.02


def write(prefix):
    """Save all tensors under the names of the first release."""
    sizes = {"VOCAB_SIZE": 30522, "POSITIONS": 512, "HIDDEN": 1024, "INTERMEDIATE": 4096}
    for name, value in {**sizes, "LAYERS": 24}.items():
        setattr(cases, name, value)
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(shape, np.float32) * np.float32(SPREAD)
        for name, shape in cases.weight_shapes().items()
    }
    names, tensors = list(values), list(values.values())
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=tensors,
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))

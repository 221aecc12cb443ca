"""Tells whether a TensorFlow checkpoint is one of the two that MLPerf's BERT starts from.

Sizes and digests as published (https://github.com/mlcommons/training,
language_model/tensorflow/bert/README.md). Only the table of tensors is looked at: it holds the
CRC32C of every tensor, and each is checked when it is read.
"""

import hashlib
from pathlib import Path
from types import MappingProxyType

from bert_tools.convert.tensorflow_errors import damage_of
from bert_tools.convert.tensorflow_table import MAX_INDEX_BYTES
from mlperf_bert.common.untrusted import read_regular_file

# (bytes, md5) of model.ckpt-28252.index -> the folder that MLPerf gives it in.
PUBLISHED = MappingProxyType(
    {
        (17_371, "f97de3ae180eb8d479555c939d50d048"): "tf1_ckpt",
        (6_420, "fc34dd7a54afc07f2d8e9d64471dc672"): "tf2_ckpt",
    }
)


def mlperf_folder(prefix: Path) -> str | None:
    """MLPerf's folder whose checkpoint this is; None where it is another, or not of format V2.

    Raises CheckpointError where the table cannot be read.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    if not path.exists():
        return None
    with damage_of(path):
        table = read_regular_file(path, MAX_INDEX_BYTES)
    digest = hashlib.md5(table, usedforsecurity=False).hexdigest()
    return PUBLISHED.get((len(table), digest))

"""A TensorFlow checkpoint of BERT as a source: tensors under our names, and bert_config.json.

Also told is whether it is one of the two that MLPerf's BERT starts from. Sizes and digests as
published (https://github.com/mlcommons/training, language_model/tensorflow/bert/README.md). Only
the table of tensors is looked at: it holds the CRC32C of every tensor, and each is checked when it
is read.
"""

import hashlib
from pathlib import Path
from types import MappingProxyType

from bert_tools.convert.tensorflow import checkpoint_prefix, open_tensorflow
from bert_tools.convert.tensorflow_errors import damage_of
from bert_tools.convert.tensorflow_names import sort_names
from bert_tools.convert.tensorflow_table import MAX_INDEX_BYTES
from mlperf_bert.checkpoint.huggingface.weights import Source, Weight, read_settings
from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import read_record
from mlperf_bert.common.untrusted import in_brief, read_regular_file

CONFIG = "bert_config.json"  # as the first release names it; its keys are Hugging Face's too

# (bytes, md5) of model.ckpt-28252.index -> the folder that MLPerf gives it in.
PUBLISHED = MappingProxyType(
    {
        (17_371, "f97de3ae180eb8d479555c939d50d048"): "tf1_ckpt",
        (6_420, "fc34dd7a54afc07f2d8e9d64471dc672"): "tf2_ckpt",
    }
)


def open_tensorflow_source(path: Path) -> Source:
    """Weights by our names, and settings where bert_config.json lies beside them.

    Raises CheckpointError, as `open_tensorflow`.
    """
    tensors = open_tensorflow(path)
    names = sort_names(tensors)
    weights = {
        ours.name: Weight(tensors[name], ours.is_transposed, f"{path}: {in_brief(name)}")
        for name, ours in names.weights.items()
    }
    with damage_of(path):
        prefix = checkpoint_prefix(path)
        has_config = (prefix.parent / CONFIG).exists()
    try:
        settings, stated_in = {}, ""
        if has_config:
            stated_in = str(prefix.parent / CONFIG)
            remedy = "mend it, or move it away"
            record = read_record(prefix.parent / CONFIG, missing="is missing", remedy=remedy)
            settings = read_settings(record)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    published = mlperf_folder(prefix)
    is_theirs = f"this is the {published} of MLPerf's BERT, by its published md5"
    return Source(
        path=path,
        name=prefix.name,
        form="TensorFlow checkpoint",
        weights=weights,
        ignored=names.ignored,
        settings=settings,
        stated_in=stated_in,
        folder=prefix.parent,
        published=f"MLPerf {published}" if published else "",
        remarks=(is_theirs,) if published else (),
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

"""Reader of a TensorFlow checkpoint (V2): its tensors one by one, and BERT's under our names.

It also recognises the checkpoint that MLPerf's BERT starts from, by its published size and digest
(https://github.com/mlcommons/training, language_model/tensorflow/bert/README.md). Only the table of
tensors counts for this: it holds every tensor's CRC32C, which is checked on reading.
"""

import hashlib
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from bert_tools.convert.tensorflow_bundle import MAX_INDEX_BYTES, damage_of, read_bundle
from bert_tools.convert.tensorflow_names import OBJECT_GRAPH, sort_names
from bert_tools.huggingface.weights import Source, SourceTensor, Weight, read_settings
from mlperf_bert.errors import CheckpointError, DataError
from mlperf_bert.files import in_brief, read_json, read_regular_file, reading

CONFIG = "bert_config.json"  # the first release's name; its keys are also Hugging Face's
# (bytes, md5) of model.ckpt-28252.index -> the folder in which MLPerf publishes it.
PUBLISHED = MappingProxyType({(17_371, "f97de3ae180eb8d479555c939d50d048"): "tf1_ckpt"})
_INDEX = ".index"
# .meta, a program's graph, is not read.
_OTHER = re.compile(r"\.meta$|\.data-\d{5}-of-\d{5}$")
_MOST_FILES = 1000  # files to look at in a directory
_REMEDY = "give the name that TensorFlow saved it under, such as DIR/model.ckpt-28252"


def open_tensorflow_source(path: Path) -> Source:
    """Weights by our names, and settings if bert_config.json lies beside them.

    Raises CheckpointError, as `open_tensorflow`.
    """
    tensors = open_tensorflow(path)
    names, ignored = sort_names(tensors)
    weights = {  # a kernel is [in, out], our weight [out, in]
        ours: Weight(tensors[name], name.endswith("/kernel"), f"{path}: {in_brief(name)}")
        for name, ours in names.items()
    }
    with damage_of(path):
        prefix = _prefix_of(path)
        config = prefix.parent / CONFIG
        has_config = config.exists()
        table = read_regular_file(_index_of(prefix), MAX_INDEX_BYTES)
    settings = {}
    try:
        if has_config:
            remedy = "mend it, or move it away"
            stated = read_json(config, missing="is missing", remedy=remedy)
            with reading(config, remedy):
                settings = read_settings(stated)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    digest = hashlib.md5(table, usedforsecurity=False).hexdigest()
    published = PUBLISHED.get((len(table), digest))
    is_theirs = f"this is the {published} of MLPerf's BERT, by its published md5"
    return Source(
        path=path,
        name=prefix.name,
        form="TensorFlow checkpoint",
        weights=weights,
        ignored=ignored,
        settings=settings,
        stated_in=str(config) if has_config else "",
        folder=prefix.parent,
        published=f"MLPerf {published}" if published else "",
        remarks=(is_theirs,) if published else (),
    )


def open_tensorflow(source: Path) -> Mapping[str, SourceTensor]:
    """The tensors of a checkpoint by the names of their variables, unread.

    Shapes fit the sizes of the files. Reading a tensor checks its CRC32C and holds one tensor in
    memory; any order will do. Tensors without numbers, such as text, are listed, and refused when
    they are read.

    Args:
        source: the name that the checkpoint was saved under, a prefix of its files' names; one of
            its files; or a directory with one checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or inconsistent.
    """
    with damage_of(source):
        prefix = _prefix_of(source)
        if not _index_of(prefix).exists():
            problem = f"is no TensorFlow checkpoint (V2): there is no {prefix.name}{_INDEX}"
            raise CheckpointError(str(source), problem, _REMEDY)
        bundle = read_bundle(prefix)
    if OBJECT_GRAPH in bundle:
        remedy = "give the first release's form; MLPerf publishes its weights so in tf1_ckpt"
        raise CheckpointError(str(source), "holds the objects of a TensorFlow 2 program", remedy)
    return bundle


def _prefix_of(source: Path) -> Path:
    """The name that TensorFlow saved a checkpoint under. Raises CheckpointError, OSError."""
    if source.is_dir():
        return _only_one(source)
    if _index_of(source).exists():
        return source
    name = source.name.removesuffix(_INDEX)
    return source.with_name(_OTHER.sub("", name) or name)


def _only_one(folder: Path) -> Path:
    names = [path.name for path in islice(folder.iterdir(), _MOST_FILES + 1)]
    if len(names) > _MOST_FILES:
        raise CheckpointError(str(folder), f"has more than {_MOST_FILES:,} files", _REMEDY)
    found = sorted(name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX))
    if len(found) != 1:
        problem = f"has {len(found)} checkpoints"
        remedy = f"name one of them: {', '.join(found[:8])}" if found else _REMEDY
        raise CheckpointError(str(folder), problem, remedy)
    return folder / found[0]


def _index_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + _INDEX)

"""Opens a TensorFlow checkpoint (V2) as named tensors that are read one by one."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from bert_tools.convert.tensorflow_bundle import read_bundle
from bert_tools.convert.tensorflow_errors import damage_of
from bert_tools.convert.tensorflow_objects import OBJECT_GRAPH, as_first_release
from mlperf_bert.checkpoint.huggingface.weights import SourceTensor
from mlperf_bert.common.errors import CheckpointError

_INDEX = ".index"
_DATA = re.compile(r"\.data-\d{5}-of-\d{5}$")
_META = ".meta"  # the program's graph, of which nothing is needed
_MOST_FILES = 1000  # looked at in a directory
_REMEDY = "give the name that TensorFlow saved it under, such as DIR/model.ckpt-28252"


def open_tensorflow(source: Path) -> Mapping[str, SourceTensor]:
    """The tensors of a checkpoint by the names of their variables, none of them read.

    Shapes fit the sizes of the files. Reading a tensor checks its CRC32C, holds one tensor in
    memory, and may be done in any order. Tensors that hold no numbers, such as text, are listed
    and refused when they are read.

    Args:
        source: the name that the checkpoint was saved under, which is a prefix of its files'; one
            of its files; or a directory with just one.

    Raises:
        CheckpointError: it is missing, damaged, or not what it says.
    """
    with damage_of(source):
        prefix = checkpoint_prefix(source)
        if not _beside(prefix, _INDEX).exists():
            problem = f"is no TensorFlow checkpoint (V2): there is no {prefix.name}{_INDEX}"
            raise CheckpointError(str(source), problem, _REMEDY)
        bundle = read_bundle(prefix)
        return as_first_release(bundle, prefix) if OBJECT_GRAPH in bundle else bundle


def checkpoint_prefix(source: Path) -> Path:
    """The name that TensorFlow saved a checkpoint under. Raises CheckpointError, OSError."""
    if source.is_dir():
        return _only_one(source)
    if _beside(source, _INDEX).exists():
        return source
    name = source.name.removesuffix(_INDEX).removesuffix(_META)
    return source.with_name(_DATA.sub("", name) or name)


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


def _beside(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)

"""Translation of the names of BERT's tensors in TensorFlow's checkpoints to ours.

Names of the first release use the table that names ours for MLPerf's logs. A checkpoint of training
also holds the optimizer's tensors, named after their weights, and counters. They are known here, so
that anything else is noticed.

TensorFlow 2's checkpoints of objects, such as MLPerf's `tf2_ckpt`, are first brought into the first
release's form. Their tensors are named by the path through the program's objects to a variable; a
graph of these, stored as a text beside them, has each variable's own name. The model library of
TensorFlow 2 (https://github.com/tensorflow/models, official/nlp) has its own names for BERT's
variables, and keeps heads as a dimension.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from bert_tools.convert.tensorflow_bundle import BundleTensor, damage_of, fields
from bert_tools.huggingface.weights import SourceTensor
from mlperf_bert.model.tensor_names import ENDINGS, WHOLE_NAMES, tensorflow_name

_OF_THE_MODEL = ("bert/", "cls/")
_COUNTERS = (
    *("global_step", "save_counter", "beta1_power", "beta2_power"),
    *("current_loss_scale", "loss_scale", "good_steps"),
)
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SLOT = "/.OPTIMIZER_SLOT/"  # in the keys of an optimizer's state of a variable
# A variable's name in the second release, or its beginning -> the first release's.
_SECOND_WHOLE = MappingProxyType(
    {
        "word_embeddings/embeddings": "bert/embeddings/word_embeddings",
        "type_embeddings/embeddings": "bert/embeddings/token_type_embeddings",
        "position_embedding/embeddings": "bert/embeddings/position_embeddings",
        "cls/predictions/output_bias/bias": "cls/predictions/output_bias",
        "predictions/transform/logits/kernel": "cls/seq_relationship/output_weights",
        "predictions/transform/logits/bias": "cls/seq_relationship/output_bias",
    }
)
_BEGINNINGS = MappingProxyType(
    {
        "embeddings/layer_norm/": "bert/embeddings/LayerNorm/",
        "pooler_transform/": "bert/pooler/dense/",
    }
)
# The same, inside a layer.
_LAYER = re.compile(r"transformer/(layer_\d{1,4}/)")
_IN_LAYER = MappingProxyType(
    {
        "self_attention/query/": "attention/self/query/",
        "self_attention/key/": "attention/self/key/",
        "self_attention/value/": "attention/self/value/",
        "self_attention/attention_output/": "attention/output/dense/",
        "self_attention_layer_norm/": "attention/output/LayerNorm/",
        "intermediate/": "intermediate/dense/",
        "output/": "output/dense/",
        "output_layer_norm/": "output/LayerNorm/",
    }
)
_PAIRS = "cls/seq_relationship/output_weights"  # the first release has [2, D]
_HEADS_LAST = ("/query/kernel", "/key/kernel", "/value/kernel")  # [D, N, H]
_ROWS = 2  # dimensions of a matrix


def sort_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Sort a checkpoint's names: our name of each weight, and why each other one is ignored.

    An unknown name in the model's own scopes, `bert` and `cls`, stays among the weights unchanged,
    so that the caller can refuse it.
    """
    weights, others, ignored = {}, [], {}
    for name in names:
        ours = parameter_name(name)
        if ours is None:
            others.append(name)
        else:
            weights[name] = ours
    for name in others:
        if any(parent in weights for parent in _parents(name)):
            ignored[name] = "the optimizer's"
        elif name in (*_COUNTERS, OBJECT_GRAPH):
            ignored[name] = "counts and settings of training"
        elif name.startswith(_OF_THE_MODEL):
            weights[name] = name
        else:
            ignored[name] = "no part of pre-training"
    return weights, ignored


def parameter_name(theirs: str) -> str | None:
    """The inverse of `tensorflow_name`; None if it is no parameter's name."""
    for ours, whole in WHOLE_NAMES.items():
        if theirs == whole:
            return ours
    for ours, end in ENDINGS:
        if theirs.startswith(_OF_THE_MODEL) and theirs.endswith(end):
            stem = theirs.removesuffix(end).replace("encoder/layer_", "encoder/layer/")
            name = stem.replace("/", ".") + ours
            if tensorflow_name(name) == theirs:
                return name
    return None


def _parents(name: str) -> Iterable[str]:
    """The scopes that a name lies in."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


@dataclass(frozen=True, slots=True)
class ReshapedTensor:
    """A tensor in another shape, or the transpose of a matrix; see `SourceTensor`."""

    tensor: SourceTensor
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def dtype(self) -> str:
        """The tensor's own."""
        return self.tensor.dtype

    def read(self) -> NDArray[Any]:
        """Read the numbers. Raises CheckpointError, as the tensor does."""
        found = self.tensor.read()
        return found.T if self.is_transposed else found.reshape(self.shape)


def as_first_release(tensors: Mapping[str, SourceTensor], path: Path) -> Mapping[str, SourceTensor]:
    """Tensors under their variables' names; BERT's second release in the first one's form.

    A name that is unknown, or not unique, stays as it was: the path through objects.

    Raises CheckpointError if the graph of objects is damaged.
    """
    graph = tensors[OBJECT_GRAPH]
    if not isinstance(graph, BundleTensor):
        return tensors
    with damage_of(path):
        names = {key: name for key, name in _variables(graph.read_text()) if _SLOT not in key}
    now = {key: first_release_name(name) for key, name in names.items()}
    counts = Counter(now.values())
    found: dict[str, SourceTensor] = {}
    for key, tensor in tensors.items():
        name = now.get(key, "")
        if not name or counts[name] > 1 or name in tensors:
            found[key] = tensor
        else:
            found[name] = tensor if name == names[key] else _reshaped(name, tensor)
    return found


def first_release_name(name: str) -> str:
    """The first release's name of a variable of the second; other names unchanged."""
    inner = name.removeprefix("bert/") if name.startswith("bert/cls/") else name
    if inner in _SECOND_WHOLE:
        return _SECOND_WHOLE[inner]
    layer, table = "", _BEGINNINGS
    if match := _LAYER.match(inner):
        layer, table, inner = f"bert/encoder/{match[1]}", _IN_LAYER, inner[match.end() :]
    for start, first in table.items():
        if inner.startswith(start):
            return layer + first + inner.removeprefix(start)
    return name if layer else inner


def _reshaped(name: str, tensor: SourceTensor) -> SourceTensor:
    """A tensor of BERT with the dimensions of the first release."""
    shape = tensor.shape
    if name == _PAIRS and len(shape) == _ROWS:
        return ReshapedTensor(tensor, shape[::-1], is_transposed=True)
    if name.endswith("/bias"):
        return ReshapedTensor(tensor, (math.prod(shape),))
    if name.endswith("/kernel") and len(shape) > _ROWS:
        place = 1 if name.endswith(_HEADS_LAST) else len(shape) - 1
        return ReshapedTensor(tensor, (math.prod(shape[:place]), math.prod(shape[place:])))
    return tensor


def _variables(graph: bytes) -> Iterator[tuple[str, str]]:
    """Key and name of each variable of a `TrackableObjectGraph`. Raises ValueError, IndexError."""
    for number, node in fields(memoryview(graph)):
        for kind, attribute in fields(node) if number == 1 else ():
            if kind == 2:
                found = dict(fields(attribute))
                yield bytes(found.get(3, b"")).decode(), bytes(found.get(2, b"")).decode()

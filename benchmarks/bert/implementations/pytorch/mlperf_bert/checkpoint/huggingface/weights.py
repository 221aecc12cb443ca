"""Foreign weights under our names, and the model settings of a source; used by all readers.

Our parameters have the names of Hugging Face's BertForPreTraining. This file only lists the
differences of other forms and older releases, as data for import and export.

Our word embedding has a multiple of 8 rows (decision 0002). If a source has one row per word,
padding rows are added that never matter. A row of zeros with a bias of PADDING_BIAS has a
probability of exactly zero in the softmax, and so a gradient of zero. Training does not change it,
loss and accuracy are the same without it, and export recognises and omits it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import in_brief

BODY = "bert."  # prefix of all names but the heads'; BertModel omits it
BODY_PARTS = ("embeddings.", "encoder.", "pooler.")
# Releases before 2020 used TensorFlow's names.
OLD_ENDINGS = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))

WORDS = "bert.embeddings.word_embeddings.weight"
WORD_BIAS = "cls.predictions.bias"
PAIRS = "cls.seq_relationship.weight"  # if there is a next-sentence head
# Tensors that many files duplicate, and our tensors that they must equal.
COPIES = MappingProxyType(
    {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": WORD_BIAS}
)
# Numbers 0 .. n and zeros, which older releases kept among the weights.
BUFFERS = frozenset(("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"))
# Parts that a form may omit: prefix of their names, and what they are called.
HEADS = MappingProxyType(
    {
        "bert.pooler.": "pooler",
        "cls.predictions.": "masked-LM head",
        "cls.seq_relationship.": "next-sentence head",
    }
)

# Their setting -> ours, of the section [model]; sizes have no default.
SIZES = MappingProxyType(
    {
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
    }
)
NUMBERS = MappingProxyType(
    {
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
    }
)
# Settings that our model requires if a config states them; an export writes them too.
FIXED = MappingProxyType(
    {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
)

PADDING_BIAS = -10_000.0  # float16 holds it, and exp of it is zero in float64 too
MOST_SPARE_ROWS = 1024  # beyond the tokens: the padding in use is to multiples of 8 .. 1,024
_LAYER = "bert.encoder.layer."
_MOST_LAYERS = 1000  # a header of 8 MiB can name 100,000, and modules would be made of them
_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))


class SourceTensor(Protocol):
    """One tensor of an untrusted file; it is not in memory before `read`.

    `open_tensorflow` and `open_huggingface` return a mapping of names to such tensors.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file, checked against its size."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the number type in the file, such as float32 or bfloat16."""
        ...

    def read(self) -> NDArray[Any]:
        """All numbers, in the dtype's own kind (bfloat16 as float32). Raises CheckpointError."""
        ...


def our_names(theirs: Iterable[str]) -> dict[str, str]:
    """Their name of each tensor -> ours; tensors outside BERT keep their names."""
    names = list(theirs)
    is_bare = not any(name.startswith(BODY) for name in names)
    return {name: _our_name(name, is_bare) for name in names}


def _our_name(name: str, is_bare: bool) -> str:
    if is_bare and name.startswith(BODY_PARTS):
        name = BODY + name
    for old, now in OLD_ENDINGS:
        if name.endswith(old):
            return name.removesuffix(old) + now
    return name


def read_settings(config: Record) -> dict[str, Any]:
    """Settings of our section [model]. Raises DataError for a model that we do not support."""
    for name, value in FIXED.items():
        stated = config.values.get(name, value)
        if type(stated) is not type(value) or stated != value:
            problem = f"is {in_brief(stated)}, this program computes {value!r} only"
            raise config.error(name, problem)
    for name in ("quantization_config", "pruned_heads"):
        if config.values.get(name):
            raise config.error(name, "changes the weights")
    settings: dict[str, Any] = {"vocab_size": config.integer("vocab_size", low=1, high=2**31)}
    for theirs, ours in SIZES.items():
        settings[ours] = config.integer(theirs, low=1, high=2**31)
    if config.has("type_vocab_size"):
        settings["type_vocab_size"] = config.integer("type_vocab_size", low=1, high=2**31)
    for theirs, ours in NUMBERS.items():
        if config.has(theirs):
            settings[ours] = config.number(theirs)
            if not 0 <= settings[ours] < 1:
                raise config.error(theirs, f"is {settings[ours]}, not within 0 .. 1")
    return settings


def with_rows(values: NDArray[np.float32], num_rows: int, fill: float) -> NDArray[np.float32]:
    """The first `num_rows` rows of an array [R] or [R, D], with filled rows after its own."""
    if len(values) >= num_rows:
        return np.ascontiguousarray(values[:num_rows])
    padded = np.full((num_rows, *values.shape[1:]), fill, np.float32)
    padded[: len(values)] = values
    return padded


def rows_that_matter(words: NDArray[np.float32], bias: NDArray[np.float32], num_tokens: int) -> int:
    """The number of rows without the padding rows at the end (see the module's docstring).

    Args:
        words: float32 [R, D], the word embedding.
        bias: float32 [R], of the masked-LM head.
        num_tokens: size of the vocabulary; at least so many rows matter.
    """
    spare = (bias == PADDING_BIAS) & ~words.any(axis=1)
    spare[:num_tokens] = False
    return len(spare) - int(np.argmin(spare[::-1])) if not spare.all() else num_tokens


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a source that is one of our parameters; reading it gives our layout."""

    tensor: SourceTensor
    is_transposed: bool = False  # in the source, relative to ours
    where: str = ""  # file and name, for messages

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in our layout."""
        return self.tensor.shape[::-1] if self.is_transposed else self.tensor.shape

    def read(self) -> NDArray[np.float32]:
        """Read it as float32, contiguous. Raises CheckpointError if a number is not finite."""
        found = self.tensor.read()
        found = np.ascontiguousarray(found.T if self.is_transposed else found, dtype=np.float32)
        if not np.isfinite(found).all():
            problem = "holds numbers that are not finite in float32"
            raise CheckpointError(self.where, problem, "give weights of a run that did not diverge")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Weights of another program.

    Args:
        path: the given path.
        name: of the checkpoint, without its directories.
        form: what it is, in a word or two: "BertForMaskedLM", "TensorFlow checkpoint".
        weights: by our names; tensors outside the model keep their names.
        copies: tensors that must be equal to another: our name -> our name of the other.
        ignored: names of the source, and the reason for ignoring each.
        settings: of our section [model], as far as the source states them.
        stated_in: the file that states them, for messages.
        folder: where a vocabulary may lie.
        published: a description, if its owner has published its digest.
        remarks: what a user should know of the source.
    """

    path: Path
    name: str
    form: str
    weights: Mapping[str, Weight]
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stated_in: str = ""
    folder: Path = Path()
    published: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, str]:
        """The origin for a checkpoint's manifest."""
        origin = {"name": self.name, "form": self.form, "published": self.published}
        return {key: value for key, value in origin.items() if value}


class Sizes(NamedTuple):
    """Sizes of a model, from its tensors."""

    word_rows: int
    settings: Mapping[str, int]  # of our section [model]


def sizes_of(source: Source) -> Sizes:
    """Read the model's sizes from the shapes. Raises CheckpointError if they are not BERT's."""
    rows, hidden = _matrix(source, "bert.embeddings.word_embeddings.weight")
    positions, _ = _matrix(source, "bert.embeddings.position_embeddings.weight")
    types, _ = _matrix(source, "bert.embeddings.token_type_embeddings.weight")
    numbers = {
        name.removeprefix(_LAYER).partition(".")[0]
        for name in source.weights
        if name.startswith(_LAYER)
    }
    num_layers = len(numbers)
    if not numbers or numbers != {str(number) for number in range(num_layers)}:
        problem = f"has {num_layers} layers, not numbered from 0 on"
        raise CheckpointError(str(source.path), problem, "give BERT's weights, all of them")
    if num_layers > _MOST_LAYERS:
        problem = f"has {num_layers:,} layers"
        raise CheckpointError(str(source.path), problem, f"give at most {_MOST_LAYERS:,}")
    intermediate, _ = _matrix(source, f"{_LAYER}0.intermediate.dense.weight")
    return Sizes(
        rows,
        {
            "hidden_size": hidden,
            "num_layers": num_layers,
            "intermediate_size": intermediate,
            "max_position_embeddings": positions,
            "type_vocab_size": types,
        },
    )


def missing_heads(source: Source, wanted: Mapping[str, object]) -> dict[str, str]:
    """Our names that the source lacks -> the head that they belong to.

    Raises CheckpointError if something else is missing, or a part of a head.
    """
    missing = [name for name in wanted if name not in source.weights]
    found = {}
    for name in missing:
        prefix = next((prefix for prefix in HEADS if name.startswith(prefix)), None)
        is_whole = prefix and not any(other.startswith(prefix) for other in source.weights)
        if prefix is None or not is_whole:
            remedy = "give BERT's weights, all of them"
            raise CheckpointError(str(source.path), f"{name} is missing", remedy)
        found[name] = HEADS[prefix]
    return found


def check_floats(source: Source) -> None:
    """Raise CheckpointError if a weight is not floating-point, such as 8-bit integers."""
    for weight in source.weights.values():
        if weight.tensor.dtype not in _FLOATS:
            problem = f"holds {in_brief(weight.tensor.dtype)}, not floating-point numbers"
            raise CheckpointError(weight.where, problem, "give weights that are not quantised")


def _matrix(source: Source, name: str) -> tuple[int, int]:
    if name not in source.weights:
        problem = f"{name} is missing"
        raise CheckpointError(str(source.path), problem, "give the weights of a BERT")
    shape = source.weights[name].shape
    if len(shape) != 2 or 0 in shape:
        problem = f"has the shape {list(shape)}, not that of a matrix"
        raise CheckpointError(source.weights[name].where, problem, "give the weights of a BERT")
    return shape[0], shape[1]

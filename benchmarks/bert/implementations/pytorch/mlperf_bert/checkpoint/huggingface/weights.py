"""Foreign weights under our names, and the model settings of a source; used by all readers.

Our parameters have the names of Hugging Face's BertForPreTraining and ModernBertForMaskedLM. This
file only lists the differences of other forms and older releases, as data for import and export:
a `Family` for each architecture.

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
from mlperf_bert.config.sections import Architecture, ModelSection

# Releases before 2020 used TensorFlow's names.
OLD_ENDINGS = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
PAIRS = "cls.seq_relationship.weight"  # if there is a next-sentence head
MASKED_LM = "masked-LM head"

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


# Settings of ours that weights decide and shapes of tensors need not show: of both families, and
# of ModernBERT's layers.
UNSEEN = ("architecture", "num_heads", "layer_norm_epsilon", "max_position_embeddings")
PATTERN = ("global_attention_every", "attention_window", "rope_base_global", "rope_base_local")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names and settings of one architecture in Hugging Face's form.

    Args:
        architecture: our name of it.
        class_name: beginning of the names of their classes.
        body: prefix of all names but the heads'; a model without heads omits it.
        body_parts: beginnings of those names without it.
        layers: prefix of a layer's names, before its number.
        words: the word embedding.
        word_bias: bias of the masked-LM decoder.
        copies: tensors that many files duplicate, and our tensors that they must equal.
        buffers: numbers 0 .. n and zeros, which older releases kept among the weights.
        heads: parts that a form may omit: prefix of their names, and what they are called.
        head_of_any_task: prefix of a head that models of other tasks have too, without `word_bias`.
        dimensions: our settings that tensors show: name of the tensor, and its dimension.
        numbers: their setting -> ours. Two of theirs may be one of ours, if they are equal.
        defaults: ours where a config states none, if not `ModelSection`'s.
        fixed: settings that our model requires if a config states them; an export writes them too.
    """

    architecture: Architecture
    class_name: str
    body: str
    body_parts: tuple[str, ...]
    layers: str
    words: str
    word_bias: str
    copies: Mapping[str, str]
    buffers: frozenset[str] = frozenset()
    heads: Mapping[str, str]
    head_of_any_task: str = ""
    dimensions: Mapping[str, tuple[str, int]]
    numbers: Mapping[str, str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, object]

    @property
    def fills(self) -> dict[str, float]:
        """Tensors with a row for each word, and the value that fills rows for padding."""
        return {self.words: 0.0, self.word_bias: PADDING_BIAS}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of all names of a model for pre-training."""
        return (self.body, *(prefix.partition(".")[0] + "." for prefix in self.heads))


_BERT = Family(
    architecture="bert",
    class_name="Bert",
    body="bert.",
    body_parts=("embeddings.", "encoder.", "pooler."),
    layers="bert.encoder.layer.",
    words="bert.embeddings.word_embeddings.weight",
    word_bias="cls.predictions.bias",
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=frozenset(("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")),
    heads={
        "bert.pooler.": "pooler",
        "cls.predictions.": MASKED_LM,
        "cls.seq_relationship.": "next-sentence head",
    },
    dimensions={
        "hidden_size": ("bert.embeddings.word_embeddings.weight", 1),
        "max_position_embeddings": ("bert.embeddings.position_embeddings.weight", 0),
        "type_vocab_size": ("bert.embeddings.token_type_embeddings.weight", 0),
        "intermediate_size": ("bert.encoder.layer.0.intermediate.dense.weight", 0),
    },
    numbers={
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
    },
    fixed={
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
)
_MODERN = Family(
    architecture="modern",
    class_name="ModernBert",
    body="model.",
    body_parts=("embeddings.", "layers.", "final_norm."),
    layers="model.layers.",
    words="model.embeddings.tok_embeddings.weight",
    word_bias="decoder.bias",
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    heads={"head.": MASKED_LM, "decoder.": MASKED_LM},
    head_of_any_task="head.",
    dimensions={
        "hidden_size": ("model.embeddings.tok_embeddings.weight", 1),
        "intermediate_size": ("model.layers.0.mlp.Wo.weight", 1),
    },
    # After attention's output they have attention's dropout, we the hidden states': the same model
    # where both are equal, as published (0).
    numbers={
        "embedding_dropout": "hidden_dropout",
        "mlp_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
    },
    defaults={
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layer_norm_epsilon": 1e-5,
        "global_attention_every": 3,
        "attention_window": 128,
        "rope_base_global": 160_000.0,
        "rope_base_local": 10_000.0,
    },
    fixed={
        "model_type": "modernbert",
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "tie_word_embeddings": True,
    },
)
FAMILIES: Mapping[str, Family] = MappingProxyType({"bert": _BERT, "modern": _MODERN})

# ModernBERT's layers of either kind, and our setting of their rotary positions; the older spelling
# of theirs (transformers 4.48, as published). Both see what the other release ignores.
_FULL, _LOCAL = "full_attention", "sliding_attention"
_EVERY, _WINDOW = "global_attn_every_n_layers", "local_attention"
_ROPE_BASES = MappingProxyType(
    {
        _FULL: ("rope_base_global", "global_rope_theta"),
        _LOCAL: ("rope_base_local", "local_rope_theta"),
    }
)
_CHANGES_THE_WEIGHTS = ("quantization_config", "pruned_heads")
_NOT_OURS = ("rope_scaling", "head_dim")

PADDING_BIAS = -10_000.0  # float16 holds it, and exp of it is zero in float64 too
MOST_SPARE_ROWS = 1024  # beyond the tokens: the padding in use is to multiples of 8 .. 1,024
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


def our_names(theirs: Iterable[str], family: Family) -> dict[str, str]:
    """Their name of each tensor -> ours; tensors outside the model keep their names."""
    names = list(theirs)
    is_bare = not any(name.startswith(family.body) for name in names)
    return {name: _our_name(name, family, is_bare) for name in names}


def _our_name(name: str, family: Family, is_bare: bool) -> str:
    if is_bare and name.startswith(family.body_parts):
        name = family.body + name
    for old, now in OLD_ENDINGS:
        if name.endswith(old):
            return name.removesuffix(old) + now
    return name


def read_settings(config: Record) -> dict[str, Any]:
    """Settings of our section [model]. Raises DataError for a model that we do not support."""
    kinds = {each.fixed["model_type"]: each for each in FAMILIES.values()}
    stated = config.values.get("model_type", "bert")
    family = kinds.get(stated) if isinstance(stated, str) else None
    if family is None:
        names = " and ".join(map(repr, kinds))
        raise config.error("model_type", f"is {in_brief(stated)}, this program computes {names}")
    for name, value in family.fixed.items():
        stated = config.values.get(name, value)
        if type(stated) is not type(value) or stated != value:
            problem = f"is {in_brief(stated)}, this program computes {value!r} only"
            raise config.error(name, problem)
    for name in _CHANGES_THE_WEIGHTS:
        if config.values.get(name):
            raise config.error(name, "changes the weights")
    found: dict[str, Any] = {"architecture": family.architecture}
    found["vocab_size"] = config.integer("vocab_size", low=1, high=2**31)
    for theirs, ours in SIZES.items():
        found[ours] = config.integer(theirs, low=1, high=2**31)
    if "type_vocab_size" in family.dimensions and config.has("type_vocab_size"):
        found["type_vocab_size"] = config.integer("type_vocab_size", low=1, high=2**31)
    found |= {**family.defaults, **_read_numbers(config, family)}
    return found | (_read_pattern(config, found["num_layers"]) if family is _MODERN else {})


def _read_numbers(config: Record, family: Family) -> dict[str, float]:
    found: dict[str, float] = {}
    for theirs, ours in family.numbers.items():
        if config.has(theirs):
            value = config.number(theirs)
            if not 0 <= value < 1:
                raise config.error(theirs, f"is {value}, not within 0 .. 1")
            if found.setdefault(ours, value) != value:
                raise config.error(theirs, f"is {value}, not {found[ours]} as elsewhere")
    return found


def _read_pattern(config: Record, num_layers: int) -> dict[str, Any]:
    """ModernBERT's settings of its two kinds of layers, in either spelling or both."""
    for name in _NOT_OURS:
        if config.has(name):
            raise config.error(name, "is set, which this program does not compute")
    found: dict[str, Any] = {}
    if (every := _read_period(config, num_layers)) is not None:
        found["global_attention_every"] = every
    if _WINDOW in config.values:
        found["attention_window"] = config.integer(_WINDOW, low=2, high=2**20)
    rope = Record(config.where, {}, config.remedy)
    if config.has("rope_parameters"):
        rope = config.record("rope_parameters")
    for kind in rope.values.keys() - _ROPE_BASES.keys():
        raise rope.error(in_brief(kind), "is no kind of this model's layers")
    for kind, (ours, older) in _ROPE_BASES.items():
        bases = _read_bases(rope, kind) if rope.has(kind) else []
        bases += [config.number(older)] if older in config.values else []
        if len(set(bases)) > 1:
            raise config.error(older, f"is {bases[1]}, rope_theta of {kind} is {bases[0]}")
        if bases:
            found[ours] = bases[0]
    return found


def _read_bases(rope: Record, kind: str) -> list[float]:
    """The base of the rotary positions of a kind of layers, if it is stated."""
    stated = rope.record(kind)
    is_plain = stated.values.get("rope_type", "default") == "default"
    if not is_plain or stated.values.keys() - {"rope_theta", "rope_type"}:
        raise rope.error(kind, "has more than a rope_theta, and the rope_type 'default'")
    return [stated.number("rope_theta")] if "rope_theta" in stated.values else []


def _read_period(config: Record, num_layers: int) -> int | None:
    """Every so many layers one sees whole sequences, the first among them; None: not stated."""
    every = config.integer(_EVERY, low=1, high=2**31) if _EVERY in config.values else None
    kinds = config.values.get("layer_types")
    if kinds is None:
        return every
    if type(kinds) is not list or len(kinds) != num_layers:
        raise config.error("layer_types", f"is no list of {num_layers:,} kinds of layers")
    if every is None:
        others = [i for i, kind in enumerate(kinds) if kind == _FULL and i > 0]
        every = others[0] if others else num_layers
    if kinds != [_LOCAL if i % every else _FULL for i in range(num_layers)]:
        problem = f"is not {_FULL} in the first layer and every {every:,} on, {_LOCAL} between"
        raise config.error("layer_types", problem)
    return every


def stated_settings(model: ModelSection) -> dict[str, Any]:
    """The settings of config.json that describe a model, but for its vocabulary.

    ModernBERT's layers are described as `transformers` 5 and as 4.48 read it, and no token id is
    that of a larger vocabulary.
    """
    family = FAMILIES[model.architecture]
    names = {**SIZES, **family.numbers}
    if family is _BERT:
        names["type_vocab_size"] = "type_vocab_size"
    stated = {**family.fixed, **{theirs: getattr(model, ours) for theirs, ours in names.items()}}
    if family is _MODERN:
        bases = {kind: getattr(model, ours) for kind, (ours, _) in _ROPE_BASES.items()}
        stated |= {older: bases[kind] for kind, (_, older) in _ROPE_BASES.items()}
        stated["rope_parameters"] = {
            kind: {"rope_theta": base, "rope_type": "default"} for kind, base in bases.items()
        }
        stated |= {_EVERY: model.global_attention_every, _WINDOW: model.attention_window}
        kinds = (_FULL if model.is_global(layer) else _LOCAL for layer in range(model.num_layers))
        stated["layer_types"] = list(kinds)
        stated |= dict.fromkeys(f"{role}_token_id" for role in ("bos", "eos", "cls", "sep"))
    return stated


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
    def family(self) -> Family:
        """Names and settings of its architecture."""
        return FAMILIES[self.settings.get("architecture", "bert")]

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
    family = source.family
    rows, _ = _matrix(source, family.words)
    numbers = {
        name.removeprefix(family.layers).partition(".")[0]
        for name in source.weights
        if name.startswith(family.layers)
    }
    num_layers = len(numbers)
    if not numbers or numbers != {str(number) for number in range(num_layers)}:
        problem = f"has {num_layers} layers, not numbered from 0 on"
        raise CheckpointError(str(source.path), problem, "give BERT's weights, all of them")
    if num_layers > _MOST_LAYERS:
        problem = f"has {num_layers:,} layers"
        raise CheckpointError(str(source.path), problem, f"give at most {_MOST_LAYERS:,}")
    found = {
        ours: _matrix(source, name)[dimension]
        for ours, (name, dimension) in family.dimensions.items()
    }
    return Sizes(rows, {"num_layers": num_layers, **found})


def missing_heads(source: Source, wanted: Mapping[str, object]) -> dict[str, str]:
    """Our names that the source lacks -> the head that they belong to.

    Raises CheckpointError if something else is missing, or a part of a head.
    """
    heads, found = source.family.heads, {}
    for name in (name for name in wanted if name not in source.weights):
        head = next((heads[prefix] for prefix in heads if name.startswith(prefix)), None)
        parts = tuple(prefix for prefix in heads if heads[prefix] == head)
        if head is None or any(other.startswith(parts) for other in source.weights):
            remedy = "give BERT's weights, all of them"
            raise CheckpointError(str(source.path), f"{name} is missing", remedy)
        found[name] = head
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

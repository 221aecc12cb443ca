"""The names and settings of other programs' models, and how they are converted to ours.

Our parameters have the names of Hugging Face's BertForPreTraining and ModernBertForMaskedLM. For
each of these two architectures, a `Family` describes the names and settings that import and export
need. It also covers the library's other classes for the same architecture.

The number of rows of our word embedding is a multiple of 8 (decision 0002). If a source has one row
per word, padding rows are added, which never change a result. A padding row consists of zeros and
has the bias PADDING_BIAS, so its softmax probability and its gradient are exactly zero. Therefore
training does not change the row, and loss and accuracy are the same without it. Export recognizes
padding rows and omits them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import TOKEN_TYPES, Architecture, ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import in_brief

# Hugging Face's setting -> ours in the section [model]. Sizes have no default.
SIZES = MappingProxyType(
    {
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names and settings of one architecture in the format of Hugging Face.

    Args:
        architecture: our name of the architecture.
        class_name: prefix of the names of the library's classes.
        body: prefix of all names except those of heads. A model without heads omits the prefix.
        layers: prefix of a layer's names, before its number.
        words: name of the word embedding.
        word_bias: name of the masked-LM decoder's bias.
        segments: name of the token type embedding, which has a single row in some models.
        head: prefixes of the masked-LM head's names.
        copies: maps a tensor that some files store twice to our tensor, which must be equal.
        buffers: names of constants (position ids and zeros) that older releases stored with the
            weights.
        numbers: maps the library's settings to ours. Two settings that map to the same one must be
            equal.
        defaults: defaults of our settings that differ from those of `ModelSection`.
        fixed: maps further settings of the library to their only supported value. An export writes
            them.
    """

    architecture: Architecture
    class_name: str
    body: str
    layers: str
    words: str
    word_bias: str
    segments: str = ""
    head: tuple[str, ...]
    copies: Mapping[str, str]
    buffers: frozenset[str] = frozenset()
    numbers: Mapping[str, str]
    defaults: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, object]

    @property
    def fills(self) -> dict[str, float]:
        """Values that fill the padding rows of tensors with one row per word, by tensor name."""
        return {self.words: 0.0, self.word_bias: PADDING_BIAS}


_BERT = Family(
    architecture="bert",
    class_name="Bert",
    body="bert.",
    layers="bert.encoder.layer.",
    words="bert.embeddings.word_embeddings.weight",
    word_bias="cls.predictions.bias",
    segments="bert.embeddings.token_type_embeddings.weight",
    head=("cls.predictions.",),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=frozenset(("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")),
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
    layers="model.layers.",
    words="model.embeddings.tok_embeddings.weight",
    word_bias="decoder.bias",
    head=("head.", "decoder."),
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    # After the output of attention, `transformers` applies the dropout of attention, and we apply
    # that of hidden states. The models agree if both are equal, as in published configs (0).
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

# For both kinds of ModernBERT's layers, our setting for the base of rotary positions, and the one
# in published configs (transformers 4.48). transformers 5 uses "rope_parameters" instead.
_FULL, _LOCAL = "full_attention", "sliding_attention"
_EVERY, _WINDOW = "global_attn_every_n_layers", "local_attention"
_ROPE_BASES = MappingProxyType(
    {
        _FULL: ("rope_base_global", "global_rope_theta"),
        _LOCAL: ("rope_base_local", "local_rope_theta"),
    }
)
_UNSUPPORTED = ("rope_scaling", "head_dim")

PADDING_BIAS = -10_000.0  # representable in float16, and exp() of it is zero even in float64
MOST_SPARE_ROWS = 1024  # word embeddings in use are padded to multiples of 8 up to 1,024

# Prefixes that wrappers add to all names, and parts that they add anywhere in a name.
_WRAPPERS = ("module.", "model.", "encoder_model.", "net.", "network.", "student.", "_model.")
_WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def our_names(theirs: Iterable[str], family: Family) -> dict[str, str]:
    """Map each tensor's name to our name.

    Tensors that do not belong to the model keep their names. Prefixes that a wrapper added are
    removed. Wrappers are DistributedDataParallel, torch.compile, FSDP, and modules that contain the
    model.
    """
    plain = {name: _WRAPPED.sub("", name) for name in theirs}
    while (prefix := _wrapper(plain.values(), family)) is not None:
        plain = {name: each.removeprefix(prefix) for name, each in plain.items()}
    has_body = any(name.startswith(family.body) for name in plain.values())
    prefix = "" if has_body else family.body
    # The file published as bert-base-uncased uses TensorFlow's names for the weights of a norm,
    # and transformers 5 keeps these names when it saves that model again.
    gamma, beta = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
    return {name: prefix + each.replace(*gamma).replace(*beta) for name, each in plain.items()}


def _wrapper(names: Collection[str], family: Family) -> str | None:
    """Return the prefix that a wrapper added to all names, or None.

    The prefix `model.` counts only if the architecture does not use this prefix itself.
    """
    for prefix in _WRAPPERS:
        if names and all(name.startswith(prefix) for name in names):
            inner = any(name.startswith(prefix + family.body) for name in names)
            if prefix != family.body or inner:
                return prefix
    return None


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config.json to the settings of our config section [model].

    Raises KeyError or ValueError for a model that we do not support. Call this function within
    `files.reading`, which converts these errors to ones that contain the path of the file.
    """
    kinds = {each.fixed["model_type"]: each for each in FAMILIES.values()}
    stated = config.get("model_type", "bert")
    family = next((each for kind, each in kinds.items() if kind == stated), None)
    if family is None:
        supported = " or ".join(map(str, kinds))
        raise ValueError(f"model_type must be {supported}, not {in_brief(stated)}")
    for name, value in family.fixed.items():
        stated = config.get(name, value)
        if stated != value:
            problem = f"{name} is {in_brief(stated)}, but this program supports only {value!r}"
            raise ValueError(problem)
    found: dict[str, Any] = {"architecture": family.architecture}
    found["vocab_size"] = _size(config, "vocab_size")
    for theirs, ours in SIZES.items():
        found[ours] = _size(config, theirs)
    if family is _BERT and config.get("type_vocab_size") not in (None, 1, TOKEN_TYPES):
        stated = in_brief(config["type_vocab_size"])
        problem = f"type_vocab_size is {stated}, but this program supports only 1 or {TOKEN_TYPES}"
        raise ValueError(problem)
    found |= {**family.defaults, **_read_numbers(config, family)}
    return found | (_read_pattern(config, found["num_layers"]) if family is _MODERN else {})


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {in_brief(value)}")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config[name]
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise ValueError(f"{name} must be a number, not {in_brief(value)}")
    return float(value)


def _read_numbers(config: Mapping[str, Any], family: Family) -> dict[str, float]:
    """Read the settings that are numbers, such as dropout, and return them by our names.

    Raises ValueError if a value is not a number, or if settings that must be equal differ.
    """
    found: dict[str, float] = {}
    for theirs, ours in family.numbers.items():
        if config.get(theirs) is not None:
            value = _number(config, theirs)
            if found.setdefault(ours, value) != value:
                same = [each for each, name in family.numbers.items() if name == ours]
                raise ValueError(f"{' and '.join(same)} must be equal in this program")
    return found


def _read_pattern(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Read the settings of ModernBERT's two kinds of layers, and return them by our names.

    If a config has a setting in the old and in the new form, the new form counts, as in
    transformers 5. Raises ValueError for a model that we do not support.
    """
    for name in _UNSUPPORTED:
        if config.get(name) is not None:
            raise ValueError(f"{name} is set, but this program does not support it")
    found: dict[str, Any] = {}
    if (every := _read_period(config, num_layers)) is not None:
        found["global_attention_every"] = every
    if _WINDOW in config:
        found["attention_window"] = _size(config, _WINDOW)
    return found | _read_bases(config)


def _read_bases(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the bases of rotary position embeddings, by the names of our settings.

    Raises ValueError for kinds of positions that we do not support.
    """
    rope = config.get("rope_parameters") or {}
    for kind in rope.keys() - _ROPE_BASES.keys():
        problem = f"contains {in_brief(kind)}, but this model has no layers of that kind"
        raise ValueError(f"rope_parameters {problem}")
    found = {}
    for kind, (ours, older) in _ROPE_BASES.items():
        if rope.get(kind) is not None:
            if rope[kind].get("rope_type", "default") != "default":
                raise ValueError(f"this program does not support the rope_type of {kind}")
            found[ours] = _number(rope[kind], "rope_theta")
        elif older in config:
            found[ours] = _number(config, older)
    return found


def _read_period(config: Mapping[str, Any], num_layers: int) -> int | None:
    """Return how many layers there are from one layer with full attention to the next.

    Returns None if the config does not state the number. The first layer must have full attention.
    Raises ValueError if the layers do not follow such a pattern.
    """
    every = _size(config, _EVERY) if _EVERY in config else None
    kinds = config.get("layer_types")
    if kinds is None:
        return every
    if every is None:
        others = [i for i, kind in enumerate(kinds) if kind == _FULL and i > 0]
        every = others[0] if others else num_layers
    if kinds != [_LOCAL if i % every else _FULL for i in range(num_layers)]:
        pattern = f"{_FULL} in the first and every {every:,} layers from there"
        raise ValueError(f"layer_types must be {pattern}, and {_LOCAL} in the others")
    return every


def stated_settings(model: ModelSection) -> dict[str, Any]:
    """Return the settings for config.json that describe a model, without its vocabulary.

    ModernBERT's are written in the forms of `transformers` 5 and of version 4.48.
    ModernBERT's special token ids are None, because the library's defaults belong to a larger
    vocabulary.
    """
    family = FAMILIES[model.architecture]
    names = {**SIZES, **family.numbers}
    stated = {**family.fixed, **{theirs: getattr(model, ours) for theirs, ours in names.items()}}
    if family is _BERT:
        stated["type_vocab_size"] = TOKEN_TYPES
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
    """Return an array [R] or [R, D], truncated or extended with `fill` to `num_rows` rows."""
    if len(values) >= num_rows:
        return np.ascontiguousarray(values[:num_rows])
    padded = np.full((num_rows, *values.shape[1:]), fill, np.float32)
    padded[: len(values)] = values
    return padded


def rows_that_matter(words: NDArray[np.float32], bias: NDArray[np.float32], num_tokens: int) -> int:
    """Return the number of rows of a word embedding without the padding rows at its end.

    The docstring of this module defines padding rows.

    Args:
        words: word embedding, float32 [R, D].
        bias: bias of the masked-LM decoder, float32 [R].
        num_tokens: size of the vocabulary. The result is never smaller.
    """
    spare = (bias == PADDING_BIAS) & ~words.any(axis=1)
    spare[:num_tokens] = False
    return len(spare) - int(np.argmin(spare[::-1])) if not spare.all() else num_tokens


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of another program's weights, whose method `read` loads it into memory.

    Args:
        shape: shape in our layout, which has been checked against the size of the file.
        dtype: dtype in the file, such as float32 or bfloat16.
        load: function that returns the values in our layout, with bfloat16 converted to float32. It
            may raise CheckpointError.
        where: file and name of the tensor, for error messages.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], NDArray[Any]]
    where: str

    def read(self) -> NDArray[np.float32]:
        """Read the tensor as a contiguous float32 array.

        Raises CheckpointError if the values are not floating-point (for example 8-bit integers), or
        not finite.
        """
        if self.dtype not in _FLOATS:
            problem = f"the dtype must be one of {', '.join(_FLOATS)}, not {in_brief(self.dtype)}"
            raise CheckpointError(self.where, problem, "pass weights that are not quantized")
        found = np.ascontiguousarray(self.load(), dtype=np.float32)
        if not np.isfinite(found).all():
            problem = "contains values that are not finite in float32"
            raise CheckpointError(self.where, problem, "pass weights of a run that did not diverge")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The opened weights of another program.

    Args:
        folder: directory of the weights, which is searched for a vocabulary.
        name: name of the checkpoint, without its directories.
        form: kind of checkpoint, such as "BertForMaskedLM" or "TensorFlow checkpoint".
        weights: tensors by our names. A tensor that our model does not have keeps its name.
        ignored: names of the tensors that pre-training does not use.
        settings: settings of our section [model].
        stated_in: file with these settings, for error messages.
        published: name under which the checkpoint was published, empty unless its digest is known.
        hub_name: name on the Hugging Face hub as the user typed it, empty for a directory.
        hub_revision: hash of the commit on the hub, empty for a directory.
    """

    folder: Path
    name: str
    form: str
    weights: Mapping[str, Weight]
    ignored: Sequence[str]
    settings: Mapping[str, Any]
    stated_in: Path
    published: str = ""
    hub_name: str = ""
    hub_revision: str = ""

    @property
    def family(self) -> Family:
        """Names and settings of the source's architecture."""
        return FAMILIES[self.settings["architecture"]]

    @property
    def origin(self) -> dict[str, str]:
        """Origin of the weights, as recorded in the manifest of a checkpoint."""
        keys = ("name", "form", "published", "hub_name", "hub_revision")
        return {key: value for key in keys if (value := getattr(self, key))}

"""Foreign weights under our names, and the model settings of a source; used by all readers.

Our parameters have the names of Hugging Face's BertForPreTraining and ModernBertForMaskedLM. This
file lists what differs between the two and in their other classes, as data for import and export: a
`Family` for each architecture.

Our word embedding has a multiple of 8 rows (decision 0002). If a source has one row per word,
padding rows are added that never matter. A row of zeros with a bias of PADDING_BIAS has a
probability of exactly zero in the softmax, and so a gradient of zero. Training does not change it,
loss and accuracy are the same without it, and export recognises and omits it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import TOKEN_TYPES, Architecture, ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import in_brief

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names and settings of one architecture in Hugging Face's form.

    Args:
        architecture: our name of it.
        class_name: beginning of the names of their classes.
        body: prefix of all names but the heads'; a model without heads omits it.
        layers: prefix of a layer's names, before its number.
        words: the word embedding.
        word_bias: bias of the masked-LM decoder.
        segments: the embedding of token types, of which some models have one for all.
        head: prefixes of the masked-LM head's names.
        copies: tensors that some files duplicate, and our tensors that they must equal.
        buffers: numbers 0 .. n and zeros, which older releases kept among the weights.
        numbers: their setting -> ours. Two of theirs may be one of ours, if they are equal.
        defaults: ours where a config states none, if not `ModelSection`'s.
        fixed: settings that our model requires if a config states them; an export writes them too.
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
        """Tensors with a row for each word, and the value that fills rows for padding."""
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

# ModernBERT's layers of either kind, our setting of their rotary positions, and theirs in the
# published configs (transformers 4.48), which transformers 5 spells otherwise.
_FULL, _LOCAL = "full_attention", "sliding_attention"
_EVERY, _WINDOW = "global_attn_every_n_layers", "local_attention"
_ROPE_BASES = MappingProxyType(
    {
        _FULL: ("rope_base_global", "global_rope_theta"),
        _LOCAL: ("rope_base_local", "local_rope_theta"),
    }
)
_NOT_OURS = ("rope_scaling", "head_dim")

PADDING_BIAS = -10_000.0  # float16 holds it, and exp of it is zero in float64 too
MOST_SPARE_ROWS = 1024  # beyond the tokens: the padding in use is to multiples of 8 .. 1,024

# Names that wrappers give to what they hold: before all names, and before or within any.
_WRAPPERS = ("module.", "model.", "encoder_model.", "net.", "network.", "student.", "_model.")
_WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def our_names(theirs: Iterable[str], family: Family) -> dict[str, str]:
    """Their name of each tensor -> ours; tensors outside the model keep their names.

    What wrappers put before or into all names goes: DistributedDataParallel, torch.compile, FSDP,
    and a module that holds the model.
    """
    plain = {name: _WRAPPED.sub("", name) for name in theirs}
    while (prefix := _wrapper(plain.values(), family)) is not None:
        plain = {name: each.removeprefix(prefix) for name, each in plain.items()}
    has_body = any(name.startswith(family.body) for name in plain.values())
    prefix = "" if has_body else family.body
    # The file published as bert-base-uncased has TensorFlow's names of a norm's weights, and
    # transformers 5 keeps them when it saves that model again.
    gamma, beta = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
    return {name: prefix + each.replace(*gamma).replace(*beta) for name, each in plain.items()}


def _wrapper(names: Collection[str], family: Family) -> str | None:
    """A wrapper's prefix of all names; the architecture's own `model.` is none."""
    for prefix in _WRAPPERS:
        if names and all(name.startswith(prefix) for name in names):
            inner = any(name.startswith(prefix + family.body) for name in names)
            if prefix != family.body or inner:
                return prefix
    return None


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of our section [model] in a config.json.

    Raises KeyError or ValueError for a model that we do not support: call it within
    `records.reading`.
    """
    kinds = {each.fixed["model_type"]: each for each in FAMILIES.values()}
    stated = config.get("model_type", "bert")
    family = next((each for kind, each in kinds.items() if kind == stated), None)
    if family is None:
        raise ValueError(f"model_type is {in_brief(stated)}, not {' or '.join(map(str, kinds))}")
    for name, value in family.fixed.items():
        stated = config.get(name, value)
        if stated != value:
            problem = f"{name} is {in_brief(stated)}, this program computes {value!r} only"
            raise ValueError(problem)
    found: dict[str, Any] = {"architecture": family.architecture}
    found["vocab_size"] = _size(config, "vocab_size")
    for theirs, ours in SIZES.items():
        found[ours] = _size(config, theirs)
    if family is _BERT and config.get("type_vocab_size") not in (None, 1, TOKEN_TYPES):
        stated = in_brief(config["type_vocab_size"])
        raise ValueError(f"type_vocab_size is {stated}, this program computes {TOKEN_TYPES} only")
    found |= {**family.defaults, **_read_numbers(config, family)}
    return found | (_read_pattern(config, found["num_layers"]) if family is _MODERN else {})


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {in_brief(value)}, not an integer of at least 1")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config[name]
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise ValueError(f"{name} is {in_brief(value)}, not a number")
    return float(value)


def _read_numbers(config: Mapping[str, Any], family: Family) -> dict[str, float]:
    found: dict[str, float] = {}
    for theirs, ours in family.numbers.items():
        if config.get(theirs) is not None:
            value = _number(config, theirs)
            if found.setdefault(ours, value) != value:
                raise ValueError(f"{theirs} is {value}, not {found[ours]} as elsewhere")
    return found


def _read_pattern(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """ModernBERT's settings of its two kinds of layers, in either spelling.

    Where a config has both spellings, the newer one counts, as in transformers 5.
    """
    for name in _NOT_OURS:
        if config.get(name) is not None:
            raise ValueError(f"{name} is set, which this program does not compute")
    found: dict[str, Any] = {}
    if (every := _read_period(config, num_layers)) is not None:
        found["global_attention_every"] = every
    if _WINDOW in config:
        found["attention_window"] = _size(config, _WINDOW)
    return found | _read_bases(config)


def _read_bases(config: Mapping[str, Any]) -> dict[str, float]:
    rope = config.get("rope_parameters") or {}
    for kind in rope.keys() - _ROPE_BASES.keys():
        raise ValueError(f"rope_parameters has {in_brief(kind)}, no kind of this model's layers")
    found = {}
    for kind, (ours, older) in _ROPE_BASES.items():
        if rope.get(kind) is not None:
            if rope[kind].get("rope_type", "default") != "default":
                raise ValueError(f"{kind} has positions that this program does not compute")
            found[ours] = _number(rope[kind], "rope_theta")
        elif older in config:
            found[ours] = _number(config, older)
    return found


def _read_period(config: Mapping[str, Any], num_layers: int) -> int | None:
    """Every so many layers one sees whole sequences, the first among them; None: not stated."""
    every = _size(config, _EVERY) if _EVERY in config else None
    kinds = config.get("layer_types")
    if kinds is None:
        return every
    if every is None:
        others = [i for i, kind in enumerate(kinds) if kind == _FULL and i > 0]
        every = others[0] if others else num_layers
    if kinds != [_LOCAL if i % every else _FULL for i in range(num_layers)]:
        between = f"every {every:,} on, {_LOCAL} between"
        raise ValueError(f"layer_types is not {_FULL} in the first layer and {between}")
    return every


def stated_settings(model: ModelSection) -> dict[str, Any]:
    """The settings of config.json that describe a model, but for its vocabulary.

    ModernBERT's layers are described as `transformers` 5 and as 4.48 read it, and no token id is
    that of a larger vocabulary.
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
    """A tensor of a source that is one of our parameters; it is not in memory before `read`.

    Args:
        shape: in our layout, checked against the file's size.
        dtype: name of the number type in the file, such as float32 or bfloat16.
        load: returns its numbers in our layout, bfloat16 as float32; may raise CheckpointError.
        where: file and name, for messages.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], NDArray[Any]]
    where: str

    def read(self) -> NDArray[np.float32]:
        """Read it as float32, contiguous.

        Raises CheckpointError if its numbers are not floating-point, such as 8-bit integers, or not
        finite.
        """
        if self.dtype not in _FLOATS:
            problem = f"holds {in_brief(self.dtype)}, which is none of {', '.join(_FLOATS)}"
            raise CheckpointError(self.where, problem, "give weights that are not quantised")
        found = np.ascontiguousarray(self.load(), dtype=np.float32)
        if not np.isfinite(found).all():
            problem = "holds numbers that are not finite in float32"
            raise CheckpointError(self.where, problem, "give weights of a run that did not diverge")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Weights of another program.

    Args:
        folder: the directory that holds them, where a vocabulary may lie.
        name: of the checkpoint, without its directories.
        form: what it is, in a word or two: "BertForMaskedLM", "TensorFlow checkpoint".
        weights: by our names; tensors outside the model keep their names.
        ignored: names of the source, and the reason for ignoring each.
        settings: of our section [model].
        stated_in: the file that states them, for messages.
        published: a description, if its owner has published its digest.
    """

    folder: Path
    name: str
    form: str
    weights: Mapping[str, Weight]
    ignored: Mapping[str, str]
    settings: Mapping[str, Any]
    stated_in: Path
    published: str = ""

    @property
    def family(self) -> Family:
        """Names and settings of its architecture."""
        return FAMILIES[self.settings["architecture"]]

    @property
    def origin(self) -> dict[str, str]:
        """The origin for a checkpoint's manifest."""
        origin = {"name": self.name, "form": self.form, "published": self.published}
        return {key: value for key, value in origin.items() if value}

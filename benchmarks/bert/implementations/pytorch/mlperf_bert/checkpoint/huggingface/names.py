"""Hugging Face's names of BERT's tensors and settings, as data that import and export both read.

Our parameters have the names of its BertForPreTraining, so that only what other forms and older
releases write differently stands here. Also what every reader of foreign weights gives
(`SourceTensor`), and settings as a config.json has them.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Protocol

from numpy.typing import NDArray

from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import in_brief

BODY = "bert."  # begins the names of all but the heads; BertModel leaves it out
BODY_PARTS = ("embeddings.", "encoder.", "pooler.")
# Releases before 2020 took over TensorFlow's words.
OLD_ENDINGS = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))

WORDS = "bert.embeddings.word_embeddings.weight"
WORD_BIAS = "cls.predictions.bias"
# Tensors that many files hold a second time, and which of ours they must be equal to.
COPIES = MappingProxyType(
    {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": WORD_BIAS}
)
# Numbers 0 .. n and zeros, which older releases kept among the weights.
BUFFERS = frozenset(("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"))
# What a form may leave out: beginning of its names, and what it is called.
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
# What our model is, where a config says anything of it at all; also what an export says.
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


class SourceTensor(Protocol):
    """One tensor of a file that anybody may have written; nothing of it is in memory before `read`.

    `open_tensorflow` and `open_huggingface` return a mapping of names to such.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file says, and as fits its size."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the numbers in the file, such as float32 or bfloat16."""
        ...

    def read(self) -> NDArray[Any]:
        """All numbers, in the dtype's own kind (bfloat16 as float32). Raises CheckpointError."""
        ...


def our_names(theirs: Iterable[str]) -> dict[str, str]:
    """Their name of each tensor -> ours; what is no part of BERT keeps its name."""
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
    """Of our section [model]. Raises DataError where it is a model that we do not compute."""
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

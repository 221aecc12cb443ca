"""TensorFlow's names of BERT's tensors to ours, by the data that name ours for MLPerf's logs.

A checkpoint of training holds more than weights: the optimizer's tensors, named after the weight
that they belong to, and counters. They are known here, so that anything else is noticed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bert_tools.convert.tensorflow_objects import OBJECT_GRAPH
from mlperf_bert.model.tensor_names import ENDINGS, WHOLE_NAMES, tensorflow_name

_TRANSPOSED = "/kernel"  # end of the name of what is [in, out], where our weight is [out, in]
_OF_THE_MODEL = ("bert/", "cls/")
_COUNTERS = frozenset(
    (
        "global_step",
        "save_counter",
        "beta1_power",
        "beta2_power",
        "current_loss_scale",
        "loss_scale",
        "good_steps",
    )
)


@dataclass(frozen=True, slots=True)
class OurTensor:
    """What a tensor of theirs is here."""

    name: str
    is_transposed: bool


@dataclass(frozen=True, slots=True)
class SortedNames:
    """Names of a checkpoint: what each weight is here, and why each other one is passed over.

    A name of the model's own scopes, `bert` and `cls`, that is no weight's stands among the weights
    as it is, so that whoever takes them over can refuse it.
    """

    weights: dict[str, OurTensor]
    ignored: dict[str, str]


def parameter_name(theirs: str) -> str:
    """The inverse of `tensorflow_name`. Raises ValueError for what is no parameter's name."""
    for ours, whole in WHOLE_NAMES.items():
        if theirs == whole:
            return ours
    for ours, end in ENDINGS:
        if theirs.endswith(end):
            stem = theirs.removesuffix(end).replace("encoder/layer_", "encoder/layer/")
            name = stem.replace("/", ".") + ours
            if tensorflow_name(name) == theirs:
                return name
    raise ValueError(f"{theirs!r} is not the name of a parameter")


def to_ours(theirs: str) -> OurTensor:
    """What a weight is here. Raises ValueError for what is no parameter's name."""
    return OurTensor(parameter_name(theirs), theirs.endswith(_TRANSPOSED))


def sort_names(names: Iterable[str]) -> SortedNames:
    """Tell weights from the optimizer's tensors, counters and what is no part of pre-training."""
    weights, others = {}, []
    for name in names:
        try:
            if not name.startswith(_OF_THE_MODEL):
                raise ValueError
            weights[name] = to_ours(name)
        except ValueError:
            others.append(name)
    ignored = {}
    for name in others:
        if any(parent in weights for parent in _parents(name)):
            ignored[name] = "the optimizer's"
        elif name in _COUNTERS or name == OBJECT_GRAPH:
            ignored[name] = "counts and settings of training"
        elif name.startswith(_OF_THE_MODEL):
            weights[name] = OurTensor(name, is_transposed=False)
        else:
            ignored[name] = "no part of pre-training"
    return SortedNames(weights, ignored)


def _parents(name: str) -> Iterable[str]:
    """The names of the scopes that a name lies in."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name

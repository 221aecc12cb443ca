"""Translation of the names of BERT's tensors in TensorFlow's checkpoints to ours.

Names of the first release use the table that names ours for MLPerf's logs. A checkpoint of training
also holds the optimizer's tensors, named after their weights, and counters. They are known here, so
that anything else is noticed.
"""

from collections.abc import Iterable

from mlperf_bert.model.bert import ENDINGS, WHOLE_NAMES, tensorflow_name

_OF_THE_MODEL = ("bert/", "cls/")
_COUNTERS = (
    *("global_step", "save_counter", "beta1_power", "beta2_power"),
    *("current_loss_scale", "loss_scale", "good_steps"),
)
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of TensorFlow 2's checkpoints of objects


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
        elif name in _COUNTERS:
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

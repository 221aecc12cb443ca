"""The config of a converted checkpoint: what the source says of its model, or what a user gives.

Everything but [model] is there because a config is complete; training takes its own.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlperf_bert.checkpoint.huggingface.weights import Sizes, Source
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.config.files import config_from_tables, load_config
from mlperf_bert.config.run_config import RunConfig

USUAL_HEAD_SIZE = 64  # of every published BERT
_MOST_PREDICTIONS = 255  # that an index can hold
_PAIRS = "cls.seq_relationship.weight"


def config_of(
    source: Source, sizes: Sizes, num_tokens: int, config_path: Path | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The complete config, and what had to be assumed.

    Raises ConfigError or CheckpointError where file, tensors and `config_path` contradict.
    """
    _check_stated(source, sizes)
    if config_path is not None:
        config = load_config(config_path)
        _check_given(config, source, sizes, num_tokens)
        return config, ()
    model: dict[str, Any] = {**source.settings, **sizes.settings, "vocab_size": num_tokens}
    model["objective"] = "mlm_nsp" if _PAIRS in source.weights else "mlm"
    remarks: tuple[str, ...] = ()
    if "num_heads" not in model:
        heads, rest = divmod(model["hidden_size"], USUAL_HEAD_SIZE)
        if rest or not heads:
            remedy = "give a config that says model.num_heads with --config"
            raise CheckpointError(str(source.path), "does not say how many heads it has", remedy)
        model["num_heads"] = heads
        remarks = (f"{heads} heads of {USUAL_HEAD_SIZE} are assumed, as the source does not say",)
    tables = {
        "model": model,
        "data": {
            "max_seq_length": min(model["max_position_embeddings"], 65_535),
            "max_predictions": _MOST_PREDICTIONS,
        },
        "parallel": {"local_batch_size": 1},
        "optim": {"name": "lamb", "learning_rate": 0.0},
        "schedule": {"decay_steps": 1},
        "eval": {"target_accuracy": 0.72},
    }
    return config_from_tables(tables, source.stated_in or str(source.path)), remarks


def _check_stated(source: Source, sizes: Sizes) -> None:
    """What the source's own config says must be what its tensors are."""
    found = {**sizes.settings, "vocab_size": sizes.word_rows}
    for name, value in found.items():
        stated = source.settings.get(name, value)
        if stated != value:
            problem = f"says {name} {stated}, the tensors have {value}"
            raise CheckpointError(source.stated_in, problem, "give config and weights of one model")


def _check_given(config: RunConfig, source: Source, sizes: Sizes, num_tokens: int) -> None:
    """A config that a user gives must describe these weights."""
    given = asdict(config.model)
    names = ("num_heads", "layer_norm_epsilon")
    stated = {name: source.settings[name] for name in names if name in source.settings}
    for name, value in {**sizes.settings, **stated, "vocab_size": num_tokens}.items():
        if given[name] != value:
            problem = f"is {given[name]}, the weights in {source.path} have {value}"
            raise ConfigError(f"model.{name}", problem, "set it to theirs")

"""What a config.json says of a BERT, as our settings; others than we compute are refused."""

from typing import Any

from mlperf_bert.checkpoint.huggingface.names import FIXED, NUMBERS, SIZES
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import in_brief


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

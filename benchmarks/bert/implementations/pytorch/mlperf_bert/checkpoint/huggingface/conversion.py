"""Conversion of foreign weights to our model, with every tensor and setting matched.

`bert_tools.convert` writes the result as a checkpoint; a run may begin with it (`load.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.checkpoint.huggingface.tokenizer import find_vocabulary, setting_against_ours
from mlperf_bert.checkpoint.huggingface.weights import (
    MOST_SPARE_ROWS,
    PAIRS,
    PATTERN,
    UNSEEN,
    Sizes,
    Source,
    check_floats,
    missing_heads,
    sizes_of,
    with_rows,
)
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ARCHITECTURES, ModelSection
from mlperf_bert.model.bert import BertForPretraining, initial_weights
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.word_pieces import Vocabulary

Missing = Literal["refuse", "draw"]
USUAL_HEAD_SIZE = 64  # of every published BERT
_WORD_PIECES_DROP = "`prepare --vocab vocab.txt` drops capitals and accents"
_NEXT_SENTENCE = frozenset(
    f"{layer}.{part}"
    for layer in ("bert.pooler.dense", "cls.seq_relationship")
    for part in ("weight", "bias")
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion, made before anything is written.

    `shapes` has our parameters; `drawn` those that the source lacks; `unused` the tensors of the
    source without a place in this model, with the reason.
    """

    source: Source
    config: RunConfig
    vocabulary: AnyVocabulary
    shapes: Mapping[str, tuple[int, ...]]
    drawn: Mapping[str, str]
    unused: Mapping[str, str]
    word_rows: int
    remarks: tuple[str, ...]

    def weight(self, name: str, seed: int = 0) -> Tensor:
        """One of our parameters, float32 in our shape; `seed` draws those that the source lacks.

        Raises CheckpointError.
        """
        shape, family = self.shapes[name], self.source.family
        if name in self.drawn and name != family.word_bias:
            generator = torch.Generator().manual_seed(derive_seed(seed, f"drawn {name}"))
            return initial_weights(name, torch.Size(shape), self.config.model, generator)
        if name in self.drawn:
            found = np.zeros(self.word_rows, np.float32)
        else:
            found = self.source.weights[name].read()
        if name in family.fills:
            found = with_rows(found, shape[0], family.fills[name])
        return torch.from_numpy(found)


def plan_conversion(
    source: Source, given_vocabulary: Path | None, config: RunConfig | None, missing: Missing
) -> Conversion:
    """Match every tensor and check the settings against them; it reads only duplicate weights.

    Without a `config` the source decides the model.

    Raises CheckpointError, ConfigError or DataError.
    """
    check_floats(source)
    sizes = sizes_of(source)
    vocabulary = find_vocabulary(source.folder, given_vocabulary)
    _check_rows(source, sizes, vocabulary)
    config, remarks = _config_of(source, sizes, len(vocabulary), config)
    shapes = parameter_shapes(config.model)
    drawn = missing_heads(source, shapes)
    if drawn and missing == "refuse":
        heads = " and no ".join(dict.fromkeys(drawn.values()))
        remedy = "give weights that have it, or let it be drawn at random with --missing draw"
        raise CheckpointError(str(source.path), f"has no {heads}", remedy)
    unused = _unused(source, shapes, config.model.objective)
    _check_shapes(source, shapes)
    _check_copies(source)
    setting = setting_against_ours(source.folder)
    if setting and isinstance(vocabulary, Vocabulary):
        remarks = (*remarks, f"its tokenizer has no {setting}, {_WORD_PIECES_DROP}")
    remarks = (*source.remarks, *remarks)
    return Conversion(source, config, vocabulary, shapes, drawn, unused, sizes.word_rows, remarks)


def parameter_shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Shapes of our parameters by name; no memory is allocated for them."""
    parameters = BertForPretraining(model, torch.device("meta")).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def _config_of(
    source: Source, sizes: Sizes, num_tokens: int, config: RunConfig | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The complete config, and the assumptions behind it.

    Sections other than [model] only complete the config; training uses its own. Raises ConfigError
    or CheckpointError if file, tensors and `config` contradict each other.
    """
    _check_stated(source, sizes)
    if config is not None:
        _check_given(config, source, sizes, num_tokens)
        return config, ()
    model: dict[str, Any] = {**source.settings, **sizes.settings, "vocab_size": num_tokens}
    model["objective"] = "mlm_nsp" if PAIRS in source.weights else "mlm"
    remarks: tuple[str, ...] = ()
    if "num_heads" not in model:
        heads, rest = divmod(model["hidden_size"], USUAL_HEAD_SIZE)
        if rest or not heads:
            remedy = "give a config that says model.num_heads with --config"
            raise CheckpointError(str(source.path), "does not say how many heads it has", remedy)
        model["num_heads"] = heads
        remarks = (f"{heads} heads of {USUAL_HEAD_SIZE} are assumed, as the source does not say",)
    longest = min(model["max_position_embeddings"], 65_535)
    tables = {
        "model": model,
        "data": {
            "max_seq_length": longest,
            "max_predictions": longest,  # takes data with any masks
        },
        "parallel": {"local_batch_size": 1},
        "optim": {"name": "lamb", "learning_rate": 0.0},
        "schedule": {"decay_steps": 1},
        "eval": {"target_accuracy": 0.72},
    }
    return config_from_tables(tables, source.stated_in or str(source.path)), remarks


def _check_stated(source: Source, sizes: Sizes) -> None:
    """Check that the source's own config agrees with its tensors."""
    found = {**sizes.settings, "vocab_size": sizes.word_rows}
    for name, value in found.items():
        stated = source.settings.get(name, value)
        if stated != value:
            problem = f"says {name} {stated}, the tensors have {value}"
            raise CheckpointError(source.stated_in, problem, "give config and weights of one model")


def _check_given(config: RunConfig, source: Source, sizes: Sizes, num_tokens: int) -> None:
    """Check that the user's config describes these weights."""
    given = asdict(config.model)
    names = (*UNSEEN, *PATTERN)
    stated = {name: source.settings[name] for name in names if name in source.settings}
    for name, value in {**stated, **sizes.settings, "vocab_size": num_tokens}.items():
        if given[name] != value:
            problem = f"is {given[name]}, the weights in {source.path} have {value}"
            raise ConfigError(f"model.{name}", problem, "set it to theirs")


def _check_rows(source: Source, sizes: Sizes, vocabulary: AnyVocabulary) -> None:
    rows, tokens = sizes.word_rows, len(vocabulary)
    if not tokens <= rows <= tokens + MOST_SPARE_ROWS:
        problem = f"has {rows:,} words, its vocabulary {tokens:,}"
        remedy = "give the vocabulary that it was trained with by --vocab"
        raise CheckpointError(str(source.path), problem, remedy)


def _unused(source: Source, shapes: Mapping[str, object], objective: str) -> dict[str, str]:
    """Tensors without a place in our model; CheckpointError for one that changes its results."""
    unused, kind = {}, ARCHITECTURES[source.family.architecture]
    may_lack_use = _NEXT_SENTENCE if objective == "mlm" else frozenset()
    for name, weight in source.weights.items():
        if name in shapes or name in source.copies:
            continue
        if name not in may_lack_use:
            problem = f"is no part of the {kind} that this program computes"
            raise CheckpointError(weight.where or name, problem, f"give weights of a plain {kind}")
        unused[name] = "not used without next-sentence prediction"
    return unused


def _check_shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    fills, words = source.family.fills, source.weights[source.family.words].shape[0]
    for name, shape in shapes.items():
        if name not in source.weights:
            continue
        weight = source.weights[name]
        wanted = (words, *shape[1:]) if name in fills else shape
        if weight.shape != wanted:
            problem = f"has the shape {list(weight.shape)}, the model's is {list(wanted)}"
            kind = ARCHITECTURES[source.family.architecture]
            raise CheckpointError(weight.where, problem, f"give weights of a plain {kind}")


def _check_copies(source: Source) -> None:
    for copy, original in source.copies.items():
        ours, theirs = source.weights[original], source.weights[copy]
        if ours.shape != theirs.shape or not np.array_equal(ours.read(), theirs.read()):
            problem = f"is not equal to {original}, to which this program ties it"
            raise CheckpointError(theirs.where, problem, "give a BERT with a tied decoder")

"""Settings of a fine-tuning run and their checks.

Each setting is an option of the command `squad`. This module does not import torch, because the
command line reads settings before it starts ranks.
"""

import argparse
import math
import re
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from mlperf_bert.config.bounds import Bounds, check_bounds, option_name
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError

EngineKind = Literal["single", "ddp", "fsdp", "pipeline"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SquadPrecision = Literal["fp32", "bf16", "fp64"]

# The number of stages per rank for schedules that need several (arXiv 2104.04473, 2401.10241).
VIRTUAL_STAGES = 2
FORMS = "single, ddp:N, fsdp:N or pipeline:N, and for pipelines a schedule: @gpipe, @1f1b (the "
FORMS += "default), @interleaved or @zero_bubble"
QUICK = Path(__file__).with_name("quick")
QUICK_TRAIN, QUICK_DEV = QUICK / "train.json", QUICK / "dev.json"

_INTERMEDIATE = 4  # ratio of the feed-forward size to the hidden size
_COUNT = Bounds(1, 10**8)
_TOKENS = Bounds(1, 65_535)
_NAME = re.compile(
    r"single|(?P<kind>ddp|fsdp):(?P<copies>[1-9]\d{0,3})"
    r"|pipeline:(?P<stages>[2-9]|[1-9]\d{1,3})(?:@(?P<schedule>gpipe|1f1b|interleaved|zero_bubble))?"
)
_SIZES = ("layers", "hidden", "heads")
_GROUPS = {
    "questions and weights": ("train", "dev", "vocab", "init_checkpoint"),
    "the model": ("device", "precision", *_SIZES),
    "the windows and updates": (
        *("global_batch", "microbatches", "learning_rate", "max_length", "stride"),
        *("epochs", "updates", "noise_every"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName:
    """The name of an engine and the number of its ranks.

    Depending on the engine, each rank has a copy of the model, a shard of it, or stages of a
    pipeline.
    """

    kind: EngineKind
    ranks: int = 1
    schedule: Schedule | None = None  # only for a pipeline

    @property
    def num_parts(self) -> int:
        """Return the number of parts into which a pipeline divides the model.

        Each rank has one or two of these parts.
        """
        several = self.schedule in ("interleaved", "zero_bubble")
        return self.ranks * (VIRTUAL_STAGES if several else 1)

    def __str__(self) -> str:
        """Return the name as `parse_engine` accepts it. The default schedule is omitted."""
        if self.kind == "single":
            return "single"
        is_default = self.schedule in (None, "1f1b")
        return f"{self.kind}:{self.ranks}" + ("" if is_default else f"@{self.schedule}")


def parse_engine(text: str) -> EngineName:
    """Parse the name of an engine, such as `single`, `ddp:4`, `fsdp:2` or `pipeline:4@gpipe`.

    Raises ConfigError if the text is not such a name.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--engine", f"unknown engine {text!r}", f"use {FORMS}")
    kind: Any = match["kind"]
    if kind is not None:
        return EngineName(kind=kind, ranks=int(match["copies"]))
    if match["stages"] is not None:
        schedule: Any = match["schedule"] or "1f1b"
        return EngineName(kind="pipeline", ranks=int(match["stages"]), schedule=schedule)
    return EngineName(kind="single")


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadSettings:
    """All settings of a run. The annotation of a field includes the help text of its option.

    `layers`, `hidden` and `heads` are the sizes of a model with random initial weights. An update
    trains on `global_batch` windows, divided into `microbatches` micro-batches with similar token
    counts. Every `noise_every` updates, the gradient is computed in two halves to measure the noise
    scale. Creating an instance raises ConfigError for settings that cannot run.
    """

    engine: EngineName
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 1
    train: Annotated[Path, "training questions in SQuAD v2.0's JSON"] = QUICK_TRAIN
    dev: Annotated[Path, "questions to score, in SQuAD v2.0's JSON"] = QUICK_DEV
    vocab: Annotated[
        Path | None,
        "vocab.txt of word pieces (default: the checkpoint's, or one made from the questions)",
    ] = None
    init_checkpoint: Annotated[
        Path | None, "checkpoint of `train` or `convert` to start from (default: random weights)"
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], "device to train on"] = "auto"
    precision: Annotated[SquadPrecision, "precision of matrix products"] = "fp32"
    layers: Annotated[int, Bounds(1, 1000), "layers of a model with random weights"] = 4
    hidden: Annotated[int, Bounds(1, 2**16), "width of a model with random weights"] = 64
    heads: Annotated[int, Bounds(1, 1024), "attention heads of a model with random weights"] = 2
    global_batch: Annotated[int, _COUNT, "windows per update, over all ranks"] = 16
    microbatches: Annotated[int, _COUNT, "micro-batches per update"] = 4
    learning_rate: Annotated[
        float, Bounds(0.0, 1e38), "highest learning rate, after the warm-up"
    ] = 5e-5
    max_length: Annotated[int, _TOKENS, "length of a window in tokens"] = 384
    stride: Annotated[int, _TOKENS, "tokens from the start of one window to the next"] = 128
    epochs: Annotated[float, Bounds(1e-6, 1e6), "passes over the windows"] = 2.0
    updates: Annotated[int | None, _COUNT, "number of updates, instead of --epochs"] = None
    noise_every: Annotated[
        int,
        Bounds(0, 10**8),
        "number of updates between measurements of gradient noise, or 0 for none",
    ] = 0

    def __post_init__(self) -> None:
        """Check the settings. Raises ConfigError if a run with them is not possible."""
        check_bounds(self)
        if self.vocab is not None and self.vocab.suffix == ".json":
            problem = f"is {self.vocab.name}, but squad reads only word pieces in a vocab.txt"
            raise ConfigError("--vocab", problem, "pass a vocab.txt, or leave out --vocab")
        if self.hidden % self.heads:
            problem = f"is {self.hidden}, which is not divisible by {self.heads} heads"
            raise ConfigError("--hidden", problem, "use a multiple of --heads")
        count, ranks, where = self.microbatches, self.engine.ranks, "--microbatches"
        if self.global_batch % count:
            problem = f"is {count}, which does not divide the global batch of {self.global_batch}"
            raise ConfigError(where, problem, "use a divisor of --global-batch")
        shares = 1 if self.engine.kind == "pipeline" else ranks
        if self.noise_every:
            shares *= 2  # because the noise is measured on two halves
        if count % shares:
            halves = " in two halves (--noise-every)" if self.noise_every else ""
            problem = f"is {count}, which {self.engine} cannot divide among its ranks{halves}"
            raise ConfigError(where, problem, f"use a multiple of {shares}")
        if self.engine.schedule == "1f1b" and count < ranks:
            problem = f"is {count}, which is fewer than the {ranks} stages of the pipeline"
            raise ConfigError(where, problem, "raise --microbatches, or use the schedule gpipe")
        rounds = max(1, count // ranks)
        if self.engine.schedule == "interleaved" and count % rounds:
            problem = f"is {count}, which is not a multiple of the {ranks} ranks of the pipeline"
            raise ConfigError(where, problem, f"use a multiple of {ranks}")

    def num_updates(self, num_windows: int) -> int:
        """Return the number of updates of a run with this many windows.

        This is `updates` or, if that is None, as many as `epochs` epochs need, rounded up.
        """
        if self.updates is not None:
            return self.updates
        return max(1, -(-int(self.epochs * num_windows) // self.global_batch))

    def to_record(self) -> dict[str, Any]:
        """Return all settings except engine and seed, as values for `squad_result.json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value.absolute()) if isinstance(value, Path) else value
            for name, value in values.items()
            if name not in ("engine", "seed")
        }

    def as_words(self) -> list[str]:
        """Return these settings as command-line options.

        Settings with their default value are omitted. Paths are absolute, because ranks may run in
        another directory.
        """
        words: list[str] = []
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value != DEFAULTS[name]:
                word = value.absolute() if isinstance(value, Path) else value
                words += [option_name(name), str(word)]
        return words

    def random_model(self, vocab_size: int) -> ModelSection:
        """Return the model settings of a run that starts from random weights."""
        return ModelSection(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            intermediate_size=_INTERMEDIATE * self.hidden,
            max_position_embeddings=self.max_length,
            # A narrower model has a wider range (arXiv 1910.05895, section 2.2). At a width of
            # 1,024 the range is BERT's, 0.02.
            initializer_range=math.sqrt(2 / (5 * self.hidden)),
        )


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SquadSettings)}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of all settings except engine and seed to a parser."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, hint in typing.get_type_hints(SquadSettings, include_extras=True).items():
        if name in ("engine", "seed"):
            continue
        (kind, *_, text), default = get_args(hint), DEFAULTS[name]
        shown: dict[str, Any]
        if typing.get_origin(kind) is Literal:
            shown = {"choices": get_args(kind)}
        elif Path in (kind, *get_args(kind)):
            is_directory = name == "init_checkpoint"
            shown = {"type": Path, "metavar": "DIR" if is_directory else "FILE"}
            default = None if default is None else "a small set that is included"
        else:
            shown = {"type": float if kind is float else int, "metavar": "N"}
        if default is not None:
            text += f" (default: {default})"
        title = next(title for title, fields in _GROUPS.items() if name in fields)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(option_name(name), help=text, **shown)


def settings_of(
    args: argparse.Namespace, engine: EngineName, seed: int, **changes: Any
) -> SquadSettings:
    """Return the settings of one run from the parsed options, changed by `changes`.

    Raises ConfigError for settings that cannot run, and for model sizes together with a checkpoint.
    """
    given = {name: getattr(args, name, None) for name in DEFAULTS} | changes
    values = {name: value for name, value in given.items() if value is not None}
    sizes = [option_name(name) for name in _SIZES if name in values]
    if sizes and args.init_checkpoint is not None:
        problem = "cannot be used with --init-checkpoint, because the checkpoint sets the size"
        raise ConfigError(sizes[0], problem, f"remove {sizes[0]} or --init-checkpoint")
    return SquadSettings(**values | {"engine": engine, "seed": seed})

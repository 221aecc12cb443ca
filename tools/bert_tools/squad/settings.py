"""Settings of a fine-tuning run, checked; the fields are options of `squad`.

No torch, as the command line reads settings before it starts ranks.
"""

import argparse
import math
import re
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from mlperf_bert.config.sections import Bounds, ModelSection, check_bounds, option_name
from mlperf_bert.errors import ConfigError

EngineKind = Literal["single", "ddp", "fsdp", "pipeline"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SquadPrecision = Literal["fp32", "bf16", "fp64"]

# Stages on each rank of a pipeline for schedules that need several (arXiv 2104.04473,
# 2401.10241: two).
VIRTUAL_STAGES = 2
FORMS = "single, ddp:N, fsdp:N or pipeline:N; pipelines with @gpipe, @1f1b (default), "
FORMS += "@interleaved or @zero_bubble"
QUICK = Path(__file__).with_name("quick")
QUICK_TRAIN, QUICK_DEV = QUICK / "train.json", QUICK / "dev.json"

_INTERMEDIATE = 4  # times the hidden size
_COUNT = Bounds(1, 10**8)
_TOKENS = Bounds(1, 65_535)
_NAME = re.compile(
    r"single|(?P<kind>ddp|fsdp):(?P<copies>[1-9]\d{0,3})"
    r"|pipeline:(?P<stages>[2-9]|[1-9]\d{1,3})(?:@(?P<schedule>gpipe|1f1b|interleaved|zero_bubble))?"
)
_SIZES = ("layers", "hidden", "heads")
_RANDOM = "size of a model with random weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName:
    """An engine of `ranks`: copies of the model, shards of it, or stages of a pipeline."""

    kind: EngineKind
    ranks: int = 1
    schedule: Schedule | None = None  # of a pipeline

    @property
    def num_parts(self) -> int:
        """Pieces of a pipeline's model, one or several on each rank."""
        several = self.schedule in ("interleaved", "zero_bubble")
        return self.ranks * (VIRTUAL_STAGES if several else 1)

    def __str__(self) -> str:
        """The name that `parse_engine` reads, without the default schedule."""
        if self.kind == "single":
            return "single"
        is_default = self.schedule in (None, "1f1b")
        return f"{self.kind}:{self.ranks}" + ("" if is_default else f"@{self.schedule}")


def parse_engine(text: str) -> EngineName:
    """`single`, `ddp:4`, `fsdp:2`, `pipeline:4`, `pipeline:4@gpipe`.

    Raises ConfigError for anything else.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--engine", f"{text!r} is no engine", f"give {FORMS}")
    kind: Any = match["kind"]
    if kind is not None:
        return EngineName(kind=kind, ranks=int(match["copies"]))
    if match["stages"] is not None:
        schedule: Any = match["schedule"] or "1f1b"
        return EngineName(kind="pipeline", ranks=int(match["stages"]), schedule=schedule)
    return EngineName(kind="single")


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadSettings:
    """All settings of a run; the text beside a field is its option's help.

    `layers`, `hidden` and `heads` are those of a model with random weights. `global_batch` counts
    windows of an update, cut into `microbatches` of similar token counts. Every `noise_every`
    updates the gradient is taken in two halves, to measure its noise. Raises ConfigError from
    `__post_init__`.
    """

    engine: EngineName
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 1
    train: Annotated[Path, "SQuAD v2.0's JSON"] = QUICK_TRAIN
    dev: Annotated[Path, "SQuAD v2.0's JSON"] = QUICK_DEV
    vocab: Annotated[
        Path | None, "default: the checkpoint's own; without a checkpoint, made of the questions"
    ] = None
    init_checkpoint: Annotated[
        Path | None, "weights to begin from, as train and convert write them (default: random)"
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], "device of every rank"] = "auto"
    precision: Annotated[SquadPrecision, "precision of matrix products"] = "fp32"
    layers: Annotated[int, Bounds(1, 1000), _RANDOM] = 4
    hidden: Annotated[int, Bounds(1, 2**16), _RANDOM] = 64
    heads: Annotated[int, Bounds(1, 1024), _RANDOM] = 2
    global_batch: Annotated[int, _COUNT, "windows of an update, over all ranks"] = 16
    microbatches: Annotated[int, _COUNT, "parts of an update, the same for all engines"] = 4
    learning_rate: Annotated[float, Bounds(0.0, 1e38), "highest, after warm-up"] = 5e-5
    max_length: Annotated[int, _TOKENS, "tokens of a window"] = 384
    stride: Annotated[int, _TOKENS, "tokens from one window's begin to the next"] = 128
    epochs: Annotated[float, Bounds(1e-6, 1e6), "passes over the windows"] = 2.0
    updates: Annotated[int | None, _COUNT, "instead of --epochs"] = None
    noise_every: Annotated[
        int, Bounds(0, 10**8), "updates between measurements of gradient noise; 0: never"
    ] = 0

    def __post_init__(self) -> None:
        """Refuse settings that cannot run."""
        check_bounds(self)
        if self.hidden % self.heads:
            problem = f"is {self.hidden}, which {self.heads} heads cannot share"
            raise ConfigError("--hidden", problem, "give a multiple of --heads")
        count, ranks, where = self.microbatches, self.engine.ranks, "--microbatches"
        if self.global_batch % count:
            problem = f"is {count}, which does not divide the global batch of {self.global_batch}"
            raise ConfigError(where, problem, "give a divisor of it")
        shares = 1 if self.engine.kind == "pipeline" else ranks
        if self.noise_every:
            shares *= 2  # the noise is measured on two halves
        if count % shares:
            halves = ", in two halves for the noise" if self.noise_every else ""
            problem = f"is {count}, which the ranks of {self.engine} cannot share{halves}"
            raise ConfigError(where, problem, f"give a multiple of {shares}")
        if self.engine.schedule == "1f1b" and count < ranks:
            problem = f"is {count}, fewer than the pipeline's {ranks} stages"
            raise ConfigError(where, problem, "give more, or use the schedule gpipe")
        rounds = max(1, count // ranks)
        if self.engine.schedule == "interleaved" and count % rounds:
            problem = f"is {count}, not {rounds} equal rounds of {ranks} stages"
            raise ConfigError(where, problem, f"give a multiple of {ranks}")

    def num_updates(self, num_windows: int) -> int:
        """Updates of the run: `updates`, or enough for `epochs` passes over so many windows."""
        if self.updates is not None:
            return self.updates
        return max(1, -(-int(self.epochs * num_windows) // self.global_batch))

    def to_record(self) -> dict[str, Any]:
        """Settings for `squad_result.json`: all but engine and seed."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value.absolute()) if isinstance(value, Path) else value
            for name, value in values.items()
            if name not in ("engine", "seed")
        }

    def as_words(self) -> list[str]:
        """Options that give a rank these settings; absolute paths, as its directory may differ."""
        words: list[str] = []
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value != DEFAULTS[name]:
                word = value.absolute() if isinstance(value, Path) else value
                words += [option_name(name), str(word)]
        return words

    def random_model(self, vocab_size: int) -> ModelSection:
        """The shape of a model with random first weights."""
        return ModelSection(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            intermediate_size=_INTERMEDIATE * self.hidden,
            max_position_embeddings=self.max_length,
            # arXiv 1910.05895, section 2.2: BERT's 0.02 at a width of 1,024, more for small ones.
            initializer_range=math.sqrt(2 / (5 * self.hidden)),
        )


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SquadSettings)}


def add_settings(parser: argparse.ArgumentParser, names: str | None = None) -> None:
    """Add the options of all settings but engine and seed, or of some names."""
    for name, hint in typing.get_type_hints(SquadSettings, include_extras=True).items():
        if name in ("engine", "seed") or (names is not None and name not in names.split()):
            continue
        (kind, *_, text), default = get_args(hint), DEFAULTS[name]
        shown: dict[str, Any]
        if typing.get_origin(kind) is Literal:
            shown = {"choices": get_args(kind)}
        elif Path in (kind, *get_args(kind)):
            is_directory = name == "init_checkpoint"
            shown = {"type": Path, "metavar": "DIR" if is_directory else "FILE"}
            default = None if default is None else f"ours, {default.name} of the quick set"
        else:
            shown = {"type": float if kind is float else int, "metavar": "N"}
        if default is not None:
            text += f" (default {default})"
        parser.add_argument(option_name(name), help=text, **shown)


def settings_of(
    args: argparse.Namespace, engine: EngineName, seed: int, **changes: Any
) -> SquadSettings:
    """The settings of one run: options with `changes` applied.

    Raises ConfigError for settings that cannot run, and for model sizes beside a checkpoint.
    """
    given = {name: getattr(args, name, None) for name in DEFAULTS} | changes
    values = {name: value for name, value in given.items() if value is not None}
    sizes = [option_name(name) for name in _SIZES if name in values]
    if sizes and args.init_checkpoint is not None:
        problem = "is given, and the checkpoint has its own"
        raise ConfigError(sizes[0], problem, "leave one of them out")
    return SquadSettings(**values | {"engine": engine, "seed": seed})

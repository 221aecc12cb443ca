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

from mlperf_bert.config.sections import Bounds, ModelSection, bounds_of, check_bounds, option_name
from mlperf_bert.errors import ConfigError

EngineKind = Literal["single", "ddp", "fsdp", "pipeline"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SquadPrecision = Literal["fp32", "bf16", "fp64"]
DeviceChoice = Literal["auto", "cpu", "cuda"]

# Stages on each rank of a pipeline for schedules that need several (arXiv 2104.04473,
# 2401.10241: two).
VIRTUAL_STAGES = 2
MOST_SAMPLES = 10**8  # windows of a run; all are planned before the first update, in 16 bytes each
FORMS = "single, ddp:N, fsdp:N, pipeline:S or pipeline:Sxddp:R; pipelines with @gpipe, @1f1b "
FORMS += "(default), @interleaved or @zero_bubble"
QUICK = Path(__file__).with_name("quick")
QUICK_TRAIN, QUICK_DEV = QUICK / "train.json", QUICK / "dev.json"

_INTERMEDIATE = 4  # times the hidden size
_COUNT = Bounds(1, MOST_SAMPLES)
_TOKENS = Bounds(1, 65_535)
_NAME = re.compile(
    r"single|(?P<kind>ddp|fsdp):(?P<copies>\d{1,4})"
    r"|pipeline:(?P<stages>\d{1,4})(?:\s*x\s*ddp:(?P<replicas>\d{1,4}))?(?:@(?P<schedule>\w+))?"
)
_SIZES = ("layers", "hidden", "heads")
_RANDOM = "size of a model with random weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName:
    """An engine: `replicas` data-parallel copies, each cut into `stages` ranks.

    The replicas of `fsdp` share the weights.
    """

    kind: EngineKind
    stages: int = 1  # ranks of a pipeline
    replicas: int = 1
    schedule: Schedule | None = None  # schedule of a pipeline

    @property
    def ranks(self) -> int:
        """Number of ranks in the run."""
        return self.stages * self.replicas

    @property
    def num_parts(self) -> int:
        """Pieces of the model: ranks of a pipeline, or several on each of them."""
        several = self.schedule in ("interleaved", "zero_bubble")
        return self.stages * (VIRTUAL_STAGES if several else 1)

    def __str__(self) -> str:
        """The name that `parse_engine` reads, without the default schedule."""
        if self.kind == "single":
            return "single"
        if self.kind != "pipeline":
            return f"{self.kind}:{self.replicas}"
        by_replicas = f"xddp:{self.replicas}" if self.replicas > 1 else ""
        schedule = "" if self.schedule == "1f1b" else f"@{self.schedule}"
        return f"pipeline:{self.stages}{by_replicas}{schedule}"


def parse_engine(text: str) -> EngineName:
    """`single`, `ddp:4`, `fsdp:2`, `pipeline:4`, `pipeline:2 x ddp:2`, `pipeline:4@gpipe`.

    Raises ConfigError for anything else.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--engine", f"{text!r} is no engine", f"give {FORMS}")
    if match["stages"] is not None:
        schedule: Any = match["schedule"] or "1f1b"
        if schedule not in get_args(Schedule):
            known = ", ".join(get_args(Schedule))
            raise ConfigError("--engine", f"{schedule!r} is no schedule", f"use {known}")
        stages, replicas = int(match["stages"]), int(match["replicas"] or 1)
        name = EngineName(kind="pipeline", stages=stages, replicas=replicas, schedule=schedule)
    elif match["kind"] is not None:
        kind: Any = match["kind"]
        name = EngineName(kind=kind, replicas=int(match["copies"]))
    else:
        name = EngineName(kind="single")
    if name.replicas < 1 or (name.kind == "pipeline" and name.stages < 2):
        remedy = "give one copy or more, and a pipeline two stages or more"
        raise ConfigError("--engine", f"{text!r} has an impossible number", remedy)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadSettings:
    """All settings of a run; a text beside a field's bounds is its option's help.

    `vocab` None: the checkpoint's own, or without a checkpoint one made from the questions; then
    `layers`, `hidden` and `heads` are those of a model with random weights. `global_batch` counts
    windows of an update, cut into `microbatches` of similar token counts. `updates` None: enough
    for `epochs` passes over the windows. `warmup` is a share of the updates. `dropout` None: the
    model's own. Every `noise_every` updates (0: never) the gradient is taken in two halves, to
    measure its noise. Raises ConfigError from `__post_init__`.
    """

    engine: EngineName
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 1
    precision: SquadPrecision = "fp32"
    train: Path = QUICK_TRAIN
    dev: Path = QUICK_DEV
    vocab: Path | None = None
    init_checkpoint: Path | None = None
    device: DeviceChoice = "auto"
    layers: Annotated[int, Bounds(1, 1000), _RANDOM] = 4
    hidden: Annotated[int, Bounds(1, 2**16), _RANDOM] = 64
    heads: Annotated[int, Bounds(1, 1024), _RANDOM] = 2
    global_batch: Annotated[int, _COUNT, "windows of an update, over all ranks"] = 16
    microbatches: Annotated[int, _COUNT, "parts of an update, the same for all engines"] = 4
    learning_rate: Annotated[float, Bounds(0.0, 1e38), "highest, after warm-up"] = 5e-5
    warmup: Annotated[float, Bounds(0.0, 0.999), "share of the updates in which it rises"] = 0.1
    max_length: Annotated[int, _TOKENS, "tokens of a window"] = 384
    stride: Annotated[int, _TOKENS, "tokens from one window's begin to the next"] = 128
    epochs: Annotated[float, Bounds(1e-6, 1e6), "passes over the windows"] = 2.0
    updates: Annotated[int, _COUNT, "instead of --epochs"] | None = None
    dropout: Annotated[float, Bounds(0.0, 0.999), "default: the model's own"] | None = None
    noise_every: Annotated[
        int, Bounds(0, MOST_SAMPLES), "updates between measurements of gradient noise; 0: never"
    ] = 0

    def __post_init__(self) -> None:
        """Refuse settings that cannot run."""
        check_bounds(self)
        if self.hidden % self.heads:
            problem = f"is {self.hidden}, which {self.heads} heads cannot share"
            raise ConfigError("--hidden", problem, "give a multiple of --heads")
        self._check_microbatches()

    def _check_microbatches(self) -> None:
        count, where = self.microbatches, "--microbatches"
        if self.global_batch % count:
            problem = f"is {count}, which does not divide the global batch of {self.global_batch}"
            raise ConfigError(where, problem, "give a divisor of it")
        if count % self.engine.replicas:
            problem = f"is {count}, which {self.engine.replicas} replicas cannot share"
            raise ConfigError(where, problem, "give a multiple of them")
        if self.noise_every and count % 2:
            problem = f"is {count}, and the noise is measured on two halves of them"
            raise ConfigError(where, problem, "give an even number, or set --noise-every to 0")
        if self.engine.kind == "pipeline":
            self._check_pipeline(count // self.engine.replicas)

    def _check_pipeline(self, count: int) -> None:
        """Check that torch's schedule takes so many microbatches."""
        where, stages = "--microbatches", self.engine.stages
        if self.noise_every and count % 2:
            problem = f"gives a pipeline {count}, of which there is no half for the noise"
            raise ConfigError(where, problem, "give twice as many, or set --noise-every to 0")
        if self.engine.schedule == "1f1b" and count < stages:
            problem = f"gives a pipeline {count}, fewer than its {stages} stages"
            raise ConfigError(where, problem, "give more, or use the schedule gpipe")
        rounds = max(1, count // stages)
        if self.engine.schedule == "interleaved" and count % rounds:
            problem = f"gives a pipeline {count}, not {rounds} equal rounds of {stages} stages"
            raise ConfigError(where, problem, f"give a multiple of {stages} for each pipeline")

    def num_updates(self, num_windows: int) -> int:
        """Updates of the run: `updates`, or enough for `epochs` passes over so many windows."""
        updates = self.updates
        if updates is None:
            updates = max(1, -(-int(self.epochs * num_windows) // self.global_batch))
        if updates * self.global_batch > MOST_SAMPLES:
            problem = f"are {updates:,} of {self.global_batch:,} windows"
            remedy = f"plan {MOST_SAMPLES:,} windows at most"
            raise ConfigError("--updates, --epochs", problem, remedy)
        return updates

    def to_record(self) -> dict[str, Any]:
        """Settings for `squad_result.json`: all but engine, seed, device and question sets."""
        begins = self.init_checkpoint
        left_out = _SIZES if begins is not None else ()
        return {
            "precision": self.precision,
            "init_checkpoint": None if begins is None else str(begins.absolute()),
            **{name: getattr(self, name) for name in help_texts() if name not in left_out},
        }

    def as_words(self) -> list[str]:
        """Options that give a rank these settings; absolute paths, as its directory may differ."""
        words: list[str] = []
        left_out = _SIZES if self.init_checkpoint is not None else ()
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and name not in left_out:
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


def help_texts() -> dict[str, str]:
    """The help of each setting that has one beside its bounds, in order."""
    found = {}
    for name, hint in typing.get_type_hints(SquadSettings, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            for extra in getattr(part, "__metadata__", ()):
                if isinstance(extra, str):
                    found[name] = extra
    return found


def add_dev(parser: argparse.ArgumentParser, name: str = "dev") -> None:
    """Add `--dev`, or `--train`."""
    path: Path = DEFAULTS[name]
    text = f"SQuAD's JSON, v2.0 or v1.1 (default: ours, {path.name} of the quick set)"
    parser.add_argument(f"--{name}", type=Path, default=path, metavar="FILE", help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", choices=get_args(DeviceChoice), default="auto")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of data, model and settings, all but engine and seed."""
    add_dev(parser, "train")
    add_dev(parser)
    text = "default: the checkpoint's own; without a checkpoint, made of the questions"
    parser.add_argument("--vocab", type=Path, metavar="FILE", help=text)
    text = "weights to begin from, as `train` and `convert` write them (default: random)"
    parser.add_argument("--init-checkpoint", type=Path, metavar="DIR", help=text)
    bounds = bounds_of(SquadSettings)
    for name, text in help_texts().items():
        default = DEFAULTS[name]
        shown = text if default is None else f"{text} (default {default:g})"
        kind = type(bounds[name].low)
        parser.add_argument(option_name(name), type=kind, metavar="N", help=shown)
    add_device(parser)
    parser.add_argument("--precision", choices=get_args(SquadPrecision), default="fp32")


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

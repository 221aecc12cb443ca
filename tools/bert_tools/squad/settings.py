"""Settings of a fine-tuning run, checked; the fields are options of `squad`.

No torch, as the command line reads settings before it starts ranks.
"""

import argparse
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import Bounds, ModelSection, bounds_of, check_bounds, option_name

EngineKind = Literal["single", "ddp", "fsdp", "pipeline"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SquadPrecision = Literal["fp32", "bf16", "fp64"]
DeviceChoice = Literal["auto", "cpu", "cuda"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# Stages on each rank of a pipeline for schedules that need several (arXiv 2104.04473,
# 2401.10241: two).
VIRTUAL_STAGES = 2
MOST_SAMPLES = 10**8  # windows of a run; all are planned before the first update, in 16 bytes each
QUICK = Path(__file__).with_name("quick")
QUICK_TRAIN, QUICK_DEV = QUICK / "train.json", QUICK / "dev.json"

_INTERMEDIATE = 4  # times the hidden size
_COUNT = Bounds(1, MOST_SAMPLES)
_TOKENS = Bounds(1, 65_535)
_FROM_ZERO = Bounds(0.0, 1e38)
_NAME = re.compile(r"([a-z]+)(?::(\d{1,4}))?(?:\s*x\s*ddp:(\d{1,4}))?(?:@([a-z0-9_]+))?")
_FORMS = "single, ddp:N, fsdp:N, pipeline:S or pipeline:Sxddp:R, pipelines with @schedule"
_SIZES = ("layers", "hidden", "heads")
_NUMBERS = {  # also the keys of a run's record, in this order
    "global_batch": "windows of an update, over all ranks",
    "microbatches": "parts that an update is cut into, the same for all engines",
    "learning_rate": "highest, after warm-up",
    "warmup": "share of the updates in which it rises",
    "weight_decay": "of AdamW",
    "epsilon": "of AdamW",
    "max_grad_norm": "gradients are clipped to this norm",
    "max_length": "tokens of a window",
    "stride": "tokens from one window's begin to the next",
    "max_question_length": "tokens that a question is cut to",
    "max_answer_length": "tokens of an answer",
    "epochs": "passes over the windows",
    "updates": "instead of --epochs",
    "dropout": "default: the model's own",
    "noise_every": "updates between two measurements of the gradient's noise; 0: never",
    "evaluate_every": "updates between two evaluations on the way, which rates leave out; 0: none",
}


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
        """The name that `parse_engine` reads, without the schedule."""
        if self.kind == "single":
            return "single"
        if self.kind != "pipeline":
            return f"{self.kind}:{self.replicas}"
        by_replicas = f"xddp:{self.replicas}" if self.replicas > 1 else ""
        return f"pipeline:{self.stages}{by_replicas}"


def parse_engine(text: str, schedule: Schedule = "1f1b", ranks: int = 2) -> EngineName:
    """`single`, `ddp:4`, `fsdp:2`, `pipeline:4`, `pipeline:2 x ddp:2`, `pipeline:4@gpipe`.

    `schedule` is for a pipeline without its own, `ranks` for an engine without a number. Raises
    ConfigError for anything else.
    """

    def refused(problem: str, remedy: str = f"give {_FORMS}") -> ConfigError:
        return ConfigError("--engine", problem, remedy)

    match = _NAME.fullmatch(text.strip())
    if match is None or match[1] not in get_args(EngineKind):
        raise refused(f"{text!r} is no engine")
    kind: Any
    kind, number, replicas, chosen = match.groups()
    count, copies = int(number or ranks), int(replicas or 1)
    if kind != "pipeline" and (replicas or chosen):
        raise refused(f"{text!r}: {kind} has no stages")
    if chosen not in (None, *SCHEDULES):
        raise refused(f"{chosen!r} is no schedule", f"use {', '.join(SCHEDULES)}")
    if count < 1 or copies < 1 or (kind == "single" and number not in (None, "1")):
        raise refused(f"{text!r} has an impossible number")
    if kind == "pipeline":
        if count < 2:
            raise refused(f"{text!r} has one stage", "use single or ddp, or more stages")
        named: Any = chosen or schedule
        return EngineName(kind=kind, stages=count, replicas=copies, schedule=named)
    return EngineName(kind=kind, replicas=1 if kind == "single" else count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadSettings:
    """All settings of a run. Raises ConfigError from `__post_init__`.

    `vocab` None: the checkpoint's own, or without a checkpoint one made from the questions; then
    `layers`, `hidden` and `heads` are those of a model with random weights. `global_batch` counts
    windows of an update, cut into `microbatches` of similar token counts. `updates` None: enough
    for `epochs` passes over the windows. `warmup` is a share of the updates. `dropout` None: the
    model's own. Every `noise_every` updates (0: never) the gradient is taken in two halves, to
    measure its noise. Every `evaluate_every` updates (0: never) the dev questions are answered.
    `max_grad_norm` 0: no limit.
    """

    engine: EngineName
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 1
    precision: SquadPrecision = "fp32"
    train: Path = QUICK_TRAIN
    dev: Path = QUICK_DEV
    vocab: Path | None = None
    init_checkpoint: Path | None = None
    layers: Annotated[int, Bounds(1, 1000)] = 4
    hidden: Annotated[int, Bounds(1, 2**16)] = 64
    heads: Annotated[int, Bounds(1, 1024)] = 2
    device: DeviceChoice = "auto"
    global_batch: Annotated[int, _COUNT] = 16
    microbatches: Annotated[int, _COUNT] = 4
    learning_rate: Annotated[float, _FROM_ZERO] = 5e-5
    warmup: Annotated[float, Bounds(0.0, 0.999)] = 0.1
    weight_decay: Annotated[float, _FROM_ZERO] = 0.01
    epsilon: Annotated[float, _FROM_ZERO] = 1e-6
    max_grad_norm: Annotated[float, _FROM_ZERO] = 1.0
    max_length: Annotated[int, _TOKENS] = 384
    stride: Annotated[int, _TOKENS] = 128
    max_question_length: Annotated[int, _TOKENS] = 64
    max_answer_length: Annotated[int, _TOKENS] = 30
    epochs: Annotated[float, Bounds(1e-6, 1e6)] = 2.0
    updates: Annotated[int, _COUNT] | None = None
    dropout: Annotated[float, Bounds(0.0, 0.999)] | None = None
    noise_every: Annotated[int, Bounds(0, MOST_SAMPLES)] = 0
    evaluate_every: Annotated[int, Bounds(0, MOST_SAMPLES)] = 0

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
        """Settings for `squad_result.json`: all but engine, data and those with own keys."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def as_words(self) -> list[str]:
        """Options that give a rank these settings; absolute paths, as its directory may differ."""
        schedule = self.engine.schedule
        words = ["--engine", f"{self.engine}@{schedule}" if schedule else str(self.engine)]
        left_out = ("engine", *(_SIZES if self.init_checkpoint is not None else ()))
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
    texts = {name: "size of a model with random weights" for name in _SIZES} | _NUMBERS
    for name, text in texts.items():
        default = DEFAULTS[name]
        shown = text if default is None else f"{text} (default {default:g})"
        kind = type(bounds[name].low)
        parser.add_argument(option_name(name), type=kind, metavar="N", help=shown)
    add_device(parser)
    parser.add_argument("--precision", choices=get_args(SquadPrecision), default="fp32")
    text = "schedule of pipelines that name none (default 1f1b)"
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help=text)


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

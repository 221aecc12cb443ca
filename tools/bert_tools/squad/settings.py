"""What a fine-tuning run is asked to do: the engine by name, and all settings, checked.

No torch: the command line reads settings before it starts ranks.
"""

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import Bounds, check_bounds

EngineKind = Literal["single", "ddp", "fsdp", "pipeline"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SquadPrecision = Literal["fp32", "bf16", "fp64"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# Each rank of a pipeline has that many stages where a schedule needs several (arXiv 2104.04473,
# 2401.10241: two).
VIRTUAL_STAGES = 2
MOST_SAMPLES = 10**8  # of a run; all are planned before the first update, in 16 bytes each
_COUNT = Bounds(1, MOST_SAMPLES)
_TOKENS = Bounds(1, 65_535)
_NAME = re.compile(r"([a-z]+)(?::(\d{1,4}))?(?:\s*x\s*ddp:(\d{1,4}))?(?:@([a-z0-9_]+))?")
_FORMS = "single, ddp:N, fsdp:N, pipeline:S or pipeline:Sxddp:R, pipelines with @schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName:
    """Which engine: `replicas` copies of the data's way, each cut into `stages` ranks.

    Of `fsdp` the replicas share their weights.
    """

    kind: EngineKind
    stages: int = 1  # ranks of a pipeline
    replicas: int = 1
    schedule: Schedule | None = None  # of a pipeline

    @property
    def ranks(self) -> int:
        """Processes of the run."""
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

    Args:
        text: the name, as a user writes it.
        schedule: of a pipeline that does not name its own.
        ranks: where there is no number.

    Raises:
        ConfigError: no such engine.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None or match[1] not in get_args(EngineKind):
        raise ConfigError("--engine", f"{text!r} is no engine", f"give {_FORMS}")
    kind, number, replicas, own_schedule = match.groups()
    count = ranks if number is None else int(number)
    is_pipeline = kind == "pipeline"
    if not is_pipeline and (replicas or own_schedule):
        raise ConfigError("--engine", f"{text!r}: {kind} has no stages", f"give {_FORMS}")
    if own_schedule is not None and own_schedule not in SCHEDULES:
        problem = f"{own_schedule!r} is no schedule"
        raise ConfigError("--engine", problem, f"use {', '.join(SCHEDULES)}")
    if count < 1 or int(replicas or 1) < 1 or (kind == "single" and number not in (None, "1")):
        raise ConfigError("--engine", f"{text!r} has an impossible number", f"give {_FORMS}")
    if is_pipeline and count < 2:
        raise ConfigError(
            "--engine", f"{text!r} has one stage", "use single or ddp, or more stages"
        )
    if is_pipeline:
        chosen: Any = own_schedule or schedule
        return EngineName(
            kind="pipeline", stages=count, replicas=int(replicas or 1), schedule=chosen
        )
    if kind == "single":
        return EngineName(kind="single")
    return EngineName(kind="ddp" if kind == "ddp" else "fsdp", replicas=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquadSettings:
    """Everything that decides a run beside model, weights and questions; equal for all engines.

    `global_batch` counts windows of an update, cut into `microbatches` of similar token counts.
    `updates` None: as many as `epochs` passes over the windows take. `warmup` is a share of them.
    `dropout` None: the model's own. Every `noise_every` updates (0: never) the gradient is taken in
    two halves, to measure its noise. `max_grad_norm` 0: no limit.

    Raises ConfigError from `__post_init__`.
    """

    engine: EngineName
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 1
    precision: SquadPrecision = "fp32"
    global_batch: Annotated[int, _COUNT] = 16
    microbatches: Annotated[int, _COUNT] = 4
    learning_rate: Annotated[float, Bounds(0.0, 1e38)] = 5e-5
    warmup: Annotated[float, Bounds(0.0, 0.999)] = 0.1
    weight_decay: Annotated[float, Bounds(0.0, 1e38)] = 0.01
    epsilon: Annotated[float, Bounds(0.0, 1e38)] = 1e-6
    max_grad_norm: Annotated[float, Bounds(0.0, 1e38)] = 1.0
    max_length: Annotated[int, _TOKENS] = 384
    stride: Annotated[int, _TOKENS] = 128
    max_question_length: Annotated[int, _TOKENS] = 64
    max_answer_length: Annotated[int, _TOKENS] = 30
    epochs: Annotated[float, Bounds(1e-6, 1e6)] = 2.0
    updates: Annotated[int, _COUNT] | None = None
    dropout: Annotated[float, Bounds(0.0, 0.999)] | None = None
    noise_every: Annotated[int, Bounds(0, MOST_SAMPLES)] = 0

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_bounds(self)
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
        """That a schedule of torch takes so many microbatches."""
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
        """Of the run: `updates`, or what `epochs` passes over so many windows take, rounded up."""
        updates = self.updates
        if updates is None:
            updates = max(1, -(-int(self.epochs * num_windows) // self.global_batch))
        if updates * self.global_batch > MOST_SAMPLES:
            problem = f"are {updates:,} of {self.global_batch:,} windows"
            raise ConfigError(
                "--updates, --epochs", problem, f"plan {MOST_SAMPLES:,} windows at most"
            )
        return updates

    def to_record(self) -> dict[str, Any]:
        """What `squad_result.json` says of them: all but the engine and what stands beside it."""
        aside = ("engine", "seed", "precision")
        return {name: value for name, value in asdict(self).items() if name not in aside}

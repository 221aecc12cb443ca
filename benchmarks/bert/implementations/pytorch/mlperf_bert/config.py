"""The configuration of one run: frozen, typed sections; derived values are properties.

Every field is one setting of a TOML file (section.field); `config_io` reads and writes those.
Cross-field checks live here and say which option to change.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from mlperf_bert.errors import ConfigError

CLOSED_TARGET_ACCURACY = 0.72
# Raised whenever the embedded corpus, its vocabulary or the format of prepared sets changes,
# so that older sets are not mistaken for what this program makes.
EMBEDDED_RECIPE = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """What runs where, and for how long at most."""

    max_steps: int
    seed: int | Literal["random"] = "random"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_interval_steps: int = 20
    warm_up_steps: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """Shape, precision and attention policy of the encoder. Defaults are BERT-large."""

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_range: float = 0.02
    attention: Literal["auto", "reference", "grouped", "varlen"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: the vocabulary rounded up to a multiple of 8."""
        return -(-self.vocab_size // 8) * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Which examples, and in which order. `dupe_factor` matters to the embedded corpus only."""

    corpus: Literal["prepared", "embedded"] = "prepared"
    max_seq_length: int = 512
    max_predictions: int = 76
    dupe_factor: int = 10
    sampler: Literal["uniform"] = "uniform"
    balance: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSection:
    """Ranks, and how a global batch is cut into forward passes.

    `share_gpu = "allow"` lets more ranks run on a machine than it has GPUs, talking over gloo.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    local_batch_size: int
    grad_accum_steps: int = 1
    bucket_cap_mb: float = 25.0
    share_gpu: Literal["refuse", "allow"] = "refuse"

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer update over all ranks."""
        return self.world_size * self.local_batch_size * self.grad_accum_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection:
    """Update rule and its constants; `loss_normalization` says whose mean the loss is."""

    name: Literal["adamw", "lamb"]
    learning_rate: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    loss_normalization: Literal["global", "per_rank"] = "global"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection:
    """Polynomial decay after a linear warm-up, in optimizer steps."""

    decay_steps: int
    form: Literal["continuous", "published"] = "continuous"
    warmup_steps: int = 0
    start_warmup_step: int = 0
    end_learning_rate: float = 0.0
    power: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSection:
    """Which gradient norm is limited, and to what."""

    policy: Literal["none", "after_allreduce"] = "after_allreduce"
    max_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection:
    """When to evaluate, and the masked-LM accuracy that ends the run.

    `batch_size` is in sequences per forward, the same on any number of ranks.
    """

    target_accuracy: float
    interval_samples: int | Literal["mlperf"] = "mlperf"
    batch_size: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MlperfSection:
    """What the log says of the submission; `enforce_rules = false` is for tests only."""

    division: Literal["closed", "open"] = "open"
    submission_org: str = "unnamed"
    submission_platform: str = "unnamed"
    submission_status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    enforce_rules: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """When weights are written."""

    save: Literal["end", "never"] = "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, complete and checked. Raises ConfigError where two settings contradict."""

    run: RunSection
    model: ModelSection
    data: DataSection
    parallel: ParallelSection
    optim: OptimSection
    schedule: ScheduleSection
    clip: ClipSection
    eval: EvalSection
    mlperf: MlperfSection
    checkpoint: CheckpointSection

    @property
    def eval_interval_samples(self) -> int:
        """Samples between two evaluations: set, or MLPerf's formula (rules, section 7)."""
        if self.eval.interval_samples != "mlperf":
            return self.eval.interval_samples
        samples = 0.05 * (230.23 * self.parallel.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    @property
    def embedded_corpus_name(self) -> str:
        """Directory name for the embedded corpus: all that its contents depend on."""
        python = ".".join(str(number) for number in sys.version_info[:3])
        return (
            f"embedded-{EMBEDDED_RECIPE}-py{python}-v{self.model.vocab_size}"
            f"-s{self.data.max_seq_length}-p{self.data.max_predictions}-d{self.data.dupe_factor}"
        )

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_shapes(self)
        if self.mlperf.division == "closed" and self.mlperf.enforce_rules:
            _check_closed_rules(self)


def _check_ranges(config: RunConfig) -> None:
    positive = {
        "run.max_steps": config.run.max_steps,
        "run.log_interval_steps": config.run.log_interval_steps,
        "model.vocab_size": config.model.vocab_size,
        "model.hidden_size": config.model.hidden_size,
        "model.num_layers": config.model.num_layers,
        "model.num_heads": config.model.num_heads,
        "model.intermediate_size": config.model.intermediate_size,
        "data.max_predictions": config.data.max_predictions,
        "data.dupe_factor": config.data.dupe_factor,
        "parallel.nodes": config.parallel.nodes,
        "parallel.ranks_per_node": config.parallel.ranks_per_node,
        "parallel.local_batch_size": config.parallel.local_batch_size,
        "parallel.grad_accum_steps": config.parallel.grad_accum_steps,
        "parallel.bucket_cap_mb": config.parallel.bucket_cap_mb,
        "optim.epsilon": config.optim.epsilon,
        "schedule.decay_steps": config.schedule.decay_steps,
        "clip.max_norm": config.clip.max_norm,
        "eval.interval_samples": config.eval_interval_samples,
        "eval.batch_size": config.eval.batch_size,
    }
    for field, value in positive.items():
        if not 0 < value < float("inf"):
            raise ConfigError(field, f"is {value}", "set it to a finite number above zero")
    fractions = {
        "model.hidden_dropout": config.model.hidden_dropout,
        "model.attention_dropout": config.model.attention_dropout,
        "optim.beta_1": config.optim.beta_1,
        "optim.beta_2": config.optim.beta_2,
    }
    for field, value in fractions.items():
        if not 0 <= value < 1:
            raise ConfigError(field, f"is {value}", "set it to at least 0 and below 1")
    if not 0 < config.eval.target_accuracy < 1:
        problem = f"is {config.eval.target_accuracy}"
        raise ConfigError("eval.target_accuracy", problem, "set it above 0 and below 1")
    at_least_zero = {
        "optim.learning_rate": config.optim.learning_rate,
        "optim.weight_decay": config.optim.weight_decay,
        "schedule.end_learning_rate": config.schedule.end_learning_rate,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule.power": config.schedule.power,
        "run.warm_up_steps": config.run.warm_up_steps,
    }
    for field, value in at_least_zero.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(field, f"is {value}", "set it to a finite number of at least 0")
    if config.model.type_vocab_size < 2:
        raise ConfigError("model.type_vocab_size", "is below 2", "BERT has two segments: set 2")
    if config.run.seed != "random" and not 0 <= config.run.seed < 2**63:
        raise ConfigError("run.seed", f"is {config.run.seed}", "set it within 0 .. 2**63 - 1")


def _check_shapes(config: RunConfig) -> None:
    if config.model.hidden_size % config.model.num_heads:
        raise ConfigError(
            "model.num_heads",
            f"{config.model.num_heads} does not divide hidden_size {config.model.hidden_size}",
            "change one of them",
        )
    if not 8 <= config.data.max_seq_length <= config.model.max_position_embeddings:
        raise ConfigError(
            "data.max_seq_length",
            f"is {config.data.max_seq_length}",
            f"set it between 8 and {config.model.max_position_embeddings} (position embeddings)",
        )
    if config.data.max_predictions > 255:
        raise ConfigError(
            "data.max_predictions",
            f"is {config.data.max_predictions}",
            "the index holds at most 255",
        )
    warm_up_end = config.schedule.warmup_steps + config.schedule.start_warmup_step
    if config.schedule.decay_steps <= max(warm_up_end, config.schedule.warmup_steps):
        raise ConfigError(
            "schedule.decay_steps",
            f"{config.schedule.decay_steps} ends before the warm-up does",
            "raise it above schedule.warmup_steps",
        )


def _check_closed_rules(config: RunConfig) -> None:
    if config.optim.name != "lamb":
        raise ConfigError(
            "optim.name", f"{config.optim.name!r} in the closed division", "use 'lamb' or go open"
        )
    if config.eval.target_accuracy < CLOSED_TARGET_ACCURACY:
        raise ConfigError(
            "eval.target_accuracy",
            f"{config.eval.target_accuracy} in the closed division",
            f"set it to {CLOSED_TARGET_ACCURACY} or go open",
        )
    if config.eval.interval_samples != "mlperf":
        raise ConfigError(
            "eval.interval_samples",
            f"{config.eval.interval_samples} in the closed division",
            "use 'mlperf' or go open",
        )

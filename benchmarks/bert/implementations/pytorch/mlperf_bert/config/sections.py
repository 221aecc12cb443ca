"""The sections of a run's config: frozen and typed; derived values are properties.

Every field is one setting of a TOML file (section.field), every number has its range:
`Annotated[int, Bounds]`. Ranges are wide: they state what this software can hold, not what is wise.
A value is checked as soon as its dataclass is built. `run_config` puts the sections together.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief

Architecture = Literal["bert", "modern"]
ARCHITECTURES: dict[Architecture, str] = {"bert": "BERT", "modern": "ModernBERT"}  # as published
AttentionName = Literal["auto", "reference", "grouped", "flash", "triton"]
KernelsName = Literal["auto", "reference", "fused"]
Objective = Literal["mlm_nsp", "mlm"]
Masking = Literal["static", "dynamic"]
SamplerName = Literal["uniform", "quantile", "stratified_6_3_2_5", "stratified_4_2_2_4"]
BalancePolicy = Literal[
    "none", "exchange_global", "exchange_local", "presort_local", "presort_global"
]
CountsPerRank = Literal["equal", "unequal"]
LossNormalization = Literal["global", "per_rank"]
Precision = Literal["fp32", "bf16", "bf16_autocast", "fp8"]
DataParallel = Literal["ddp", "flat", "zero1_node", "zero1"]
AllreduceDtype = Literal["as_gradients", "bf16"]
StepMode = Literal["eager", "captured"]
OptimImplementation = Literal["ours", "apex"]
ClipPolicy = Literal["none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce"]
# The clip policies whose result does not depend on which rank has which samples.
CLIPPED_TOGETHER = frozenset(("none", "after_allreduce"))
PUBLISHED_STRATA = frozenset(("stratified_6_3_2_5", "stratified_4_2_2_4"))  # samplers of the record
MAX_PREDICTIONS = 76  # masked positions of a sample, as in MLPerf's data
# Settings of ModernBERT's layers.
OF_MODERN = ("attention_window", "global_attention_every", "rope_base_global", "rope_base_local")
TOKEN_TYPES = 2  # segments of a pair, each with its embedding


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range from `low` to `high`, both included."""

    low: float
    high: float

    def check(self, where: str, value: float) -> None:
        """Raise ConfigError naming `where` and the range for a number outside it, or for NaN."""
        if not self.low <= value <= self.high:
            raise ConfigError(where, f"is {in_brief(value)}", f"set it within {self}")

    def __str__(self) -> str:
        return f"{_in_words(self.low)} .. {_in_words(self.high)}"


@cache
def bounds_of(kind: type) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields by name, also of parts of a union."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for part in (hint, *typing.get_args(hint))
        for extra in getattr(part, "__metadata__", ())
        if isinstance(extra, Bounds)
    }


def option_name(field: str) -> str:
    """The option of the command line that sets a field."""
    return f"--{field.replace('_', '-')}"


def check_bounds(values: Any, name_of: Callable[[str], str] = option_name) -> None:
    """Check the numbers of a dataclass; `name_of` gives a field's name in messages.

    Raises ConfigError. A word or None in the place of a number is not checked.
    """
    for field, bounds in bounds_of(values.__class__).items():
        value = getattr(values, field)
        if isinstance(value, int | float):
            bounds.check(name_of(field), value)


def _in_words(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"


STORED_MASKING_RATE = 0.15  # of every prepared set: BERT's
# 0.15 to 0.3 are usual; above 0.4 the shortest sequences have fewer tokens than are to be masked.
MASKING_RATES = Bounds(0.05, 0.4)

MOST_BATCH = 2**20  # sequences an update; the samplers hold some numbers for each
_MOST_PARAMETERS = 2**36  # 256 GiB of fp32 weights
_MOST_STEPS = 10**7  # the learning rates of all steps are on the device: 80 MB
_STEPS = Bounds(1, _MOST_STEPS)
_STEPS_OR_NONE = Bounds(0, _MOST_STEPS)
_MOST_SAMPLES = 10**13
_SAMPLES_OR_NONE = Bounds(0, _MOST_SAMPLES)
_SEED = Bounds(0, 2**63 - 1)
_DROPOUT = Bounds(0.0, 0.999)
_BETA = Bounds(0.0, 0.999999999)
_FROM_ZERO, _ABOVE_ZERO = Bounds(0.0, 1e38), Bounds(1e-38, 1e38)  # of fp32


class _Section:
    """A section that checks its numbers' bounds. Raises ConfigError with `section.field`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Section").lower()
        check_bounds(self, lambda field: f"{section}.{field}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection(_Section):
    """Device, step mode and limits of a run; `max_steps` "schedule" means `decay_steps`.

    `step_mode = "captured"` pads every micro-batch to a capacity planned ahead and, on CUDA,
    replays each update as one graph. A rank that waits `hang_timeout_s` for others or for such a
    graph ends the run, so the slowest rank must have started by then. `init_checkpoint` is a
    directory of first weights ("": none). `init_state = "training"` takes the optimizer's state
    from there too: a phase of training that follows another (docs/concepts/encoder_recipe.md).
    """

    max_steps: Annotated[int, _STEPS] | Literal["schedule"] = "schedule"
    seed: Annotated[int, _SEED] | Literal["random"] = "random"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_interval_steps: Annotated[int, _STEPS] = 20
    warm_up_steps: Annotated[int, Bounds(0, 10_000)] = 3
    step_mode: StepMode = "eager"
    hang_timeout_s: Annotated[float, Bounds(0.1, 604_800.0)] = 600.0
    init_checkpoint: str = ""
    init_state: Literal["weights", "training"] = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection(_Section):
    """Shape, precision and attention policy of the encoder. Defaults are BERT-large.

    In `bf16` weights and gradients are 16-bit and the optimizer keeps fp32 masters;
    `bf16_autocast` keeps the weights fp32. `fp8` is `bf16` with the encoder's products in FP8.
    `kernels` chooses the operations around the products (`model/blocks.py`). `objective = "mlm"`
    leaves out next-sentence prediction, and with it the pooler (docs/concepts/encoder_recipe.md).

    `architecture = "modern"` is ModernBERT's (arXiv 2412.13663, `model/modern.py`): it has rotary
    positions in place of a table, and no token types. One layer in `global_attention_every` sees
    whole sequences; in the others a token sees `attention_window // 2` tokens to each side.
    """

    architecture: Architecture = "bert"
    vocab_size: Annotated[int, Bounds(1, 2**22)] = 30522
    hidden_size: Annotated[int, Bounds(1, 2**16)] = 1024
    num_layers: Annotated[int, Bounds(1, 1000)] = 24
    num_heads: Annotated[int, Bounds(1, 1024)] = 16
    intermediate_size: Annotated[int, Bounds(1, 2**18)] = 4096
    max_position_embeddings: Annotated[int, Bounds(1, 2**20)] = 512
    hidden_dropout: Annotated[float, _DROPOUT] = 0.1
    attention_dropout: Annotated[float, _DROPOUT] = 0.1
    layer_norm_epsilon: Annotated[float, Bounds(0.0, 1.0)] = 1e-12
    initializer_range: Annotated[float, Bounds(0.0, 100.0)] = 0.02
    attention: AttentionName = "auto"
    precision: Precision = "fp32"
    kernels: KernelsName = "auto"
    objective: Objective = "mlm_nsp"
    global_attention_every: Annotated[int, Bounds(1, 1000)] = 3
    attention_window: Annotated[int, Bounds(2, 2**20)] = 128
    rope_base_global: Annotated[float, Bounds(1.0, 1e12)] = 160_000.0
    rope_base_local: Annotated[float, Bounds(1.0, 1e12)] = 10_000.0

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.hidden_size % self.num_heads:
            problem = f"{self.num_heads} does not divide hidden_size {self.hidden_size}"
            raise ConfigError("model.num_heads", problem, "change one of them")
        if self.architecture == "modern" and self.head_size % 2:
            problem = f"makes heads of {self.head_size} channels, turned in pairs by positions"
            raise ConfigError("model.num_heads", problem, "choose an even number of channels")
        if self.architecture == "modern" and self.objective != "mlm":
            problem = f"is {self.objective!r} with model.architecture 'modern'"
            raise ConfigError("model.objective", problem, "use 'mlm': it has no sentence pairs")
        for name in OF_MODERN:
            default = ModelSection.__dataclass_fields__[name].default
            if self.architecture == "bert" and getattr(self, name) != default:
                remedy = "leave it out, or set model.architecture to 'modern'"
                raise ConfigError(f"model.{name}", "is set, and BERT has none", remedy)
        count = self.num_parameters
        if count > _MOST_PARAMETERS:
            remedy = f"{_MOST_PARAMETERS:,} at most: use fewer layers, or narrower ones"
            raise ConfigError("model.hidden_size", f"makes {count:,} parameters", remedy)

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: the vocabulary rounded up to a multiple of 8."""
        return -(-self.vocab_size // 8) * 8

    @property
    def num_parameters(self) -> int:
        """Parameters of `BertForPretraining`."""
        hidden, wide, vocabulary = self.hidden_size, self.intermediate_size, self.padded_vocab_size
        if self.architecture == "modern":  # the first layer has no norm before its attention
            layer = 4 * hidden**2 + 3 * hidden * wide + 2 * hidden
            return (vocabulary + hidden + 2) * hidden + self.num_layers * layer + vocabulary
        dense = hidden * (hidden + 1)
        tables = (vocabulary + self.max_position_embeddings + TOKEN_TYPES) * hidden
        layer = 4 * dense + 2 * hidden * wide + wide + hidden + 4 * hidden
        heads = dense + 2 * hidden + vocabulary
        if self.objective == "mlm_nsp":
            heads += dense + 2 * hidden + 2
        return tables + 2 * hidden + self.num_layers * layer + heads

    def is_global(self, layer: int) -> bool:
        """True if every token of this layer sees its whole sequence."""
        return self.architecture == "bert" or layer % self.global_attention_every == 0

    @property
    def reach(self) -> int:
        """Tokens to each side that a token sees in the layers that are not global."""
        return self.attention_window // 2 if self.architecture == "modern" else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection(_Section):
    """Training examples, their order, and their assignment to ranks (docs/concepts/data.md).

    `masking = "dynamic"` masks `masking_rate` of a sequence's tokens anew each time it is trained
    on; the masks of `prepare` are undone first, but stay in the held-out set
    (docs/concepts/encoder_recipe.md). `skip_samples` are passed over, the first of the sampler's order:
    those that the phases of training before this one have seen.
    """

    corpus: Literal["prepared", "embedded"] = "prepared"
    max_seq_length: Annotated[int, Bounds(8, 65_535)] = 512
    max_predictions: Annotated[int, Bounds(1, 65_535)] = MAX_PREDICTIONS
    masking: Masking = "static"
    masking_rate: Annotated[float, MASKING_RATES] = STORED_MASKING_RATE
    sampler: SamplerName = "uniform"
    skip_samples: Annotated[int, _SAMPLES_OR_NONE] = 0
    balance: BalancePolicy = "none"
    counts_per_rank: CountsPerRank = "equal"
    loader: Literal["thread", "dali", "mpi_readers"] = "thread"

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.masking == "static" and self.masking_rate != STORED_MASKING_RATE:
            problem = f"is {self.masking_rate} with data.masking 'static'"
            remedy = f"use 'dynamic': prepared sets are masked at {STORED_MASKING_RATE}"
            raise ConfigError("data.masking_rate", problem, remedy)
        needed = int(self.masking_rate * self.max_seq_length)  # 76 of 512, as in MLPerf
        if self.masking == "dynamic" and needed > self.max_predictions:
            problem = f"is {self.max_predictions}, data.masking_rate asks for {needed}"
            raise ConfigError(
                "data.max_predictions", problem, "raise it to that, or lower the rate"
            )
        if self.skip_samples and self.sampler in PUBLISHED_STRATA:
            problem = f"is {self.skip_samples} with data.sampler {self.sampler!r}"
            remedy = "set it to 0, or use a sampler that draws every sample once an epoch"
            raise ConfigError("data.skip_samples", problem, remedy)

    @property
    def dupe_factor(self) -> int:
        """Passes over the embedded corpus: each masks a text anew, which dynamic masking does."""
        return 10 if self.masking == "static" else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSection(_Section):
    """Ranks, and how a global batch is cut into forward passes.

    `share_gpu = "allow"` lets more ranks run on a machine than it has GPUs, talking over gloo.
    `data_parallel` says what averages gradients: torch's DistributedDataParallel, or our own
    reducer, with the optimizer's state whole on every rank or sharded over the ranks of a node or
    of the job.
    """

    nodes: Annotated[int, Bounds(1, 2**16)] = 1
    ranks_per_node: Annotated[int, Bounds(1, 256)] = 1
    local_batch_size: Annotated[int, Bounds(1, MOST_BATCH)]
    grad_accum_steps: Annotated[int, Bounds(1, 2**16)] = 1
    bucket_cap_mb: Annotated[float, Bounds(1e-6, 1e6)] = 25.0
    share_gpu: Literal["refuse", "allow"] = "refuse"
    data_parallel: DataParallel = "ddp"
    allreduce_dtype: AllreduceDtype = "as_gradients"

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def num_micro_batches(self) -> int:
        """Forwards per optimizer update over all ranks."""
        return self.world_size * self.grad_accum_steps

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer update over all ranks."""
        return self.num_micro_batches * self.local_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection(_Section):
    """Update rule and its constants; `loss_normalization` says over what the loss is a mean.

    `implementation = "apex"` uses NVIDIA apex's kernels for the updates. The betas are of all
    but Muon's matrices, whose momentum is 0.95.
    """

    name: Literal["adamw", "lamb", "muon"]
    implementation: OptimImplementation = "ours"
    learning_rate: Annotated[float, _FROM_ZERO]
    beta_1: Annotated[float, _BETA] = 0.9
    beta_2: Annotated[float, _BETA] = 0.999
    epsilon: Annotated[float, _ABOVE_ZERO] = 1e-6
    weight_decay: Annotated[float, _FROM_ZERO] = 0.01
    loss_normalization: LossNormalization = "global"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection(_Section):
    """Linear warm-up and decay, in optimizer steps: linear, or in the last `cooldown_steps`.

    The forms are those of `optim/schedule.py`; `cooldown_steps` is for "wsd".
    """

    decay_steps: Annotated[int, _STEPS]
    form: Literal["continuous", "published", "wsd"] = "continuous"
    warmup_steps: Annotated[int, _STEPS_OR_NONE] = 0
    start_warmup_step: Annotated[int, Bounds(-_MOST_STEPS, _MOST_STEPS)] = 0
    end_learning_rate: Annotated[float, _FROM_ZERO] = 0.0
    cooldown_steps: Annotated[int, _STEPS_OR_NONE] = 0

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        warm_up_end = self.warmup_steps + self.start_warmup_step
        if self.decay_steps <= max(warm_up_end, self.warmup_steps):
            problem = f"{self.decay_steps} ends before the warm-up does"
            remedy = "raise it above schedule.warmup_steps"
            raise ConfigError("schedule.decay_steps", problem, remedy)
        if self.form != "wsd" and self.cooldown_steps:
            problem = f"is {self.cooldown_steps} with schedule.form {self.form!r}"
            raise ConfigError("schedule.cooldown_steps", problem, "set it to 0, or use 'wsd'")
        if warm_up_end + self.cooldown_steps > self.decay_steps:
            problem = f"is {self.cooldown_steps}: the cool-down begins before the warm-up ends"
            raise ConfigError("schedule.cooldown_steps", problem, "lower it, or raise decay_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSection(_Section):
    """The limited gradient norm and its limit (`distributed/clipping.py`).

    `bucket_limit = "equal_share"` gives each bucket max_norm / sqrt(22), as in the published runs.
    """

    policy: ClipPolicy = "after_allreduce"
    max_norm: Annotated[float, _ABOVE_ZERO] = 1.0
    bucket_limit: Literal["by_size", "equal_share"] = "by_size"

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.bucket_limit == "equal_share" and self.policy != "bucket_before_allreduce":
            problem = f"'equal_share' with clip.policy {self.policy!r}"
            raise ConfigError("clip.bucket_limit", problem, "use policy 'bucket_before_allreduce'")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection(_Section):
    """Evaluation, and the masked-LM accuracy that ends the run; with "none" `max_steps` ends it."""

    target_accuracy: Annotated[float, Bounds(1e-6, 0.999999)] | Literal["none"]
    interval_samples: Annotated[int, Bounds(1, _MOST_SAMPLES)] | Literal["mlperf"] = "mlperf"

    @property
    def target(self) -> float | None:
        """The target accuracy, 0 .. 1; None for a run without one."""
        return None if self.target_accuracy == "none" else self.target_accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class MlperfSection(_Section):
    """The submission's entries in the log; `enforce_rules = false` is for tests only."""

    division: Literal["closed", "open"] = "open"
    submission_org: str = "unnamed"
    submission_platform: str = "unnamed"
    submission_status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    enforce_rules: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(_Section):
    """Times of saving, and the number of checkpoints kept (docs/reference/reliability.md).

    `interval_steps` lie between two checkpoints; the last is saved at the end. "auto" is about ten
    minutes, 0 the end only; "never" saves nothing. The newest `keep_last` stay.
    """

    interval_steps: Annotated[int, _STEPS_OR_NONE] | Literal["auto", "never"] = "auto"
    keep_last: Annotated[int, Bounds(1, 10**6)] = 2

"""The config of one run: all sections, complete, and what they must fulfil together.

What a field takes is in `sections`; `files` reads and writes TOML. Every error says which option to
change.
"""

import sys
from dataclasses import dataclass

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import (
    CLIPPED_TOGETHER,
    MOST_BATCH,
    STORED_MASKING_RATE,
    CheckpointSection,
    ClipSection,
    DataSection,
    EvalSection,
    MlperfSection,
    ModelSection,
    OptimSection,
    ParallelSection,
    RunSection,
    ScheduleSection,
)

CLOSED_TARGET_ACCURACY = 0.72
CLOSED_MOST_BATCH = 16_384  # of the largest reference convergence point
_CLOSED_CLIP_POLICIES = ("after_allreduce", "whole_before_allreduce")
_BERT_LARGE_SIZES = {
    "vocab_size": 30_522,
    "hidden_size": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "intermediate_size": 4096,
}
_BERT_LARGE = _BERT_LARGE_SIZES | {
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
_CLOSED = {f"model.{field}": value for field, value in _BERT_LARGE.items()} | {
    "data.corpus": "prepared",
    "data.max_seq_length": 512,
    "data.max_predictions": 76,
    "data.masking": "static",
    "model.objective": "mlm_nsp",
    "optim.name": "lamb",
    "clip.max_norm": 1.0,
    "eval.interval_samples": "mlperf",
}
_BIASED_SAMPLERS = frozenset(("strata_6_3_2_5", "strata_4_2_2_4"))
_MOST_TOKENS = 2**31 - 1  # positions in a batch are int32
_MOST_IN_WINDOW = 2**24
MOST_OF_UNEQUAL_COUNTS = 4  # sequences a forward; above that, equal counts are as even
# Raised whenever the embedded corpus, its vocabulary or the format of prepared sets changes,
# so that older sets are not mistaken for what this program makes.
EMBEDDED_RECIPE = "2"


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
    def max_steps(self) -> int:
        """Steps after which a run that has not reached its target ends."""
        steps = self.run.max_steps
        return self.schedule.decay_steps if steps == "schedule" else steps

    @property
    def eval_interval_samples(self) -> int:
        """Samples between two evaluations: set, or MLPerf's formula (rules, section 7)."""
        if self.eval.interval_samples != "mlperf":
            return self.eval.interval_samples
        samples = 0.05 * (230.23 * self.parallel.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    def evaluation_is_due(self, samples: int) -> bool:
        """Whether the step that ends at `samples` passed a multiple of the evaluation interval."""
        interval = self.eval_interval_samples
        return samples // interval > (samples - self.parallel.global_batch_size) // interval

    @property
    def processes_per_node(self) -> int:
        """What a launcher starts on a node: the ranks, and a reader process beside each."""
        return self.parallel.ranks_per_node * (2 if self.data.loader == "mpi_readers" else 1)

    @property
    def cost_coefficients(self) -> tuple[float, float]:
        """Linear and quadratic cost of a token; "flops" counts the encoder's multiply-adds."""
        if self.data.cost_b != "flops":
            return self.data.cost_a, self.data.cost_b
        return self.data.cost_a, self.data.cost_a * self.model.attention_share

    @property
    def embedded_corpus_name(self) -> str:
        """Directory name for the embedded corpus: all that its contents depend on."""
        objective = "" if self.model.objective == "mlm_nsp" else f"-{self.model.objective}"
        python = ".".join(str(number) for number in sys.version_info[:3])
        return (
            f"embedded-{EMBEDDED_RECIPE}-py{python}-v{self.model.vocab_size}"
            f"-s{self.data.max_seq_length}-p{self.data.max_predictions}-d{self.data.dupe_factor}"
            f"{objective}"
        )

    def __post_init__(self) -> None:
        _check_shapes(self)
        if self.mlperf.division == "closed" and self.mlperf.enforce_rules:
            _check_closed_rules(self)


def has_bert_large_sizes(model: ModelSection) -> bool:
    """Whether steps cost what BERT-large's do, which dropout does not matter to."""
    return all(getattr(model, field) == value for field, value in _BERT_LARGE_SIZES.items())


def is_bert_large(model: ModelSection) -> bool:
    """Whether it is the model of the closed division, dropout included."""
    return all(getattr(model, field) == value for field, value in _BERT_LARGE.items())


def _check_masking(config: RunConfig) -> None:
    data = config.data
    if data.masking == "static":
        if data.masking_rate != STORED_MASKING_RATE:
            problem = f"is {data.masking_rate} with data.masking 'static'"
            remedy = f"use 'dynamic': prepared sets are masked at {STORED_MASKING_RATE}"
            raise ConfigError("data.masking_rate", problem, remedy)
        return
    needed = int(data.masking_rate * data.max_seq_length)  # 76 of 512, as MLPerf has it
    if needed > data.max_predictions:
        problem = f"is {data.max_predictions}, data.masking_rate asks for {needed}"
        raise ConfigError("data.max_predictions", problem, "raise it to that, or lower the rate")


def _check_shapes(config: RunConfig) -> None:
    """Settings that must fit each other. Raises ConfigError."""
    if config.model.hidden_size % config.model.num_heads:
        raise ConfigError(
            "model.num_heads",
            f"{config.model.num_heads} does not divide hidden_size {config.model.hidden_size}",
            "change one of them",
        )
    if config.data.max_seq_length > config.model.max_position_embeddings:
        raise ConfigError(
            "data.max_seq_length",
            f"is {config.data.max_seq_length}",
            f"set it to {config.model.max_position_embeddings} (position embeddings) at most",
        )
    _check_sizes(config)
    _check_masking(config)
    _check_quantiles(config)
    _check_counts_per_rank(config)
    _check_clip(config)
    _check_apex(config)
    _check_captured(config)
    _check_noise(config)
    warm_up_end = config.schedule.warmup_steps + config.schedule.start_warmup_step
    if config.schedule.decay_steps <= max(warm_up_end, config.schedule.warmup_steps):
        raise ConfigError(
            "schedule.decay_steps",
            f"{config.schedule.decay_steps} ends before the warm-up does",
            "raise it above schedule.warmup_steps",
        )


def _check_sizes(config: RunConfig) -> None:
    """Products of numbers that are each within their own bounds."""
    parallel, data = config.parallel, config.data
    batch, local = parallel.global_batch_size, parallel.local_batch_size
    sizes = (
        ("parallel.local_batch_size", "sequences an update", batch, MOST_BATCH),
        ("data.max_seq_length", "tokens a forward", local * data.max_seq_length, _MOST_TOKENS),
        (
            *("data.exchange_window_steps", "sequences a window"),
            *(batch * data.exchange_window_steps, _MOST_IN_WINDOW),
        ),
    )
    for where, what, size, most in sizes:
        if size > most:
            raise ConfigError(where, f"makes {size:,} {what}", f"{most:,} at most: lower it")


def _check_quantiles(config: RunConfig) -> None:
    quantiles, batch = config.data.quantiles, config.parallel.global_batch_size
    if quantiles != "auto" and batch % quantiles:
        problem = f"{quantiles} does not divide the global batch of {batch}"
        raise ConfigError("data.quantiles", problem, "use a divisor of it, or 'auto'")


def _check_counts_per_rank(config: RunConfig) -> None:
    if config.data.counts_per_rank == "equal":
        return
    field = "data.counts_per_rank"
    if config.data.balance != "presort_global":
        problem = f"'unequal' with data.balance {config.data.balance!r}"
        raise ConfigError(field, problem, "use balance 'presort_global', or equal counts")
    if config.optim.loss_normalization != "global":
        problem = "'unequal' with optim.loss_normalization 'per_rank'"
        raise ConfigError(field, problem, "use 'global', which weighs every token the same")
    if config.clip.policy not in CLIPPED_TOGETHER:
        problem = f"'unequal' with clip.policy {config.clip.policy!r}"
        raise ConfigError(field, problem, "clip after the all-reduce, or use equal counts")
    most = MOST_OF_UNEQUAL_COUNTS
    if not 2 <= config.parallel.local_batch_size <= most:
        problem = f"'unequal' with {config.parallel.local_batch_size} sequences a forward"
        raise ConfigError(field, problem, f"use 'equal'; unequal counts are for 2 to {most}")


def _check_clip(config: RunConfig) -> None:
    clip = config.clip
    if clip.accumulation == "each_forward" and clip.policy in CLIPPED_TOGETHER:
        problem = f"'each_forward' with clip.policy {clip.policy!r}"
        raise ConfigError("clip.accumulation", problem, "use 'accumulated', or clip before")
    if clip.bucket_limit == "equal_share" and clip.policy != "bucket_before_allreduce":
        problem = f"'equal_share' with clip.policy {clip.policy!r}"
        raise ConfigError("clip.bucket_limit", problem, "use policy 'bucket_before_allreduce'")
    if clip.accumulation == "each_forward" and config.parallel.allreduce_dtype != "as_gradients":
        problem = f"{config.parallel.allreduce_dtype!r} with clip.accumulation 'each_forward'"
        raise ConfigError("parallel.allreduce_dtype", problem, "use 'as_gradients'")


def _check_captured(config: RunConfig) -> None:
    if config.run.step_mode == "captured" and config.data.loader == "dali":
        problem = "'captured' with data.loader 'dali', whose batches are not padded on the host"
        raise ConfigError("run.step_mode", problem, "use 'eager', or data.loader 'thread'")


def _check_noise(config: RunConfig) -> None:
    interval = config.run.noise_interval_steps
    if interval and config.run.step_mode == "captured":
        problem = f"is {interval} with run.step_mode 'captured', whose graphs measure nothing"
        raise ConfigError("run.noise_interval_steps", problem, "set it to 0, or use 'eager'")


def _check_apex(config: RunConfig) -> None:
    if config.optim.implementation != "apex":
        return
    needs = (
        ("run.device", config.run.device, ("cuda",)),
        ("model.precision", config.model.precision, ("fp32", "bf16_autocast")),
        ("parallel.data_parallel", config.parallel.data_parallel, ("ddp",)),
    )
    for field, value, allowed in needs:
        if value not in allowed:
            remedy = f"set {field} to {' or '.join(map(repr, allowed))}, or use 'ours'"
            raise ConfigError("optim.implementation", f"'apex' with {field} {value!r}", remedy)


def _check_closed_rules(config: RunConfig) -> None:
    """What the closed division fixes (MLPerf Training rules, BERT). Raises ConfigError."""
    for where, required in _CLOSED.items():
        section, field = where.split(".")
        value = getattr(getattr(config, section), field)
        if value != required:
            problem = f"{value!r} in the closed division"
            raise ConfigError(where, problem, f"set it to {required!r} or go open")
    if config.data.sampler in _BIASED_SAMPLERS:
        raise ConfigError(
            "data.sampler",
            f"{config.data.sampler!r}, which draws lengths unevenly, in the closed division",
            "use 'uniform' or go open",
        )
    if config.clip.policy not in _CLOSED_CLIP_POLICIES:
        raise ConfigError(
            "clip.policy",
            f"{config.clip.policy!r} in the closed division, which limits the whole norm",
            f"use {' or '.join(map(repr, _CLOSED_CLIP_POLICIES))}, or go open",
        )
    if config.eval.target_accuracy < CLOSED_TARGET_ACCURACY:
        raise ConfigError(
            "eval.target_accuracy",
            f"{config.eval.target_accuracy} in the closed division",
            f"set it to {CLOSED_TARGET_ACCURACY} or go open",
        )
    if config.parallel.global_batch_size > CLOSED_MOST_BATCH:
        raise ConfigError(
            "parallel.local_batch_size",
            f"makes a global batch of {config.parallel.global_batch_size:,} in the closed division",
            f"the largest reference convergence point is {CLOSED_MOST_BATCH:,}: lower it",
        )

"""The config of one run: all sections, and the rules that they must fulfil together.

A field's type and range stand in `sections`; `files` reads and writes TOML. Every error says which
option to change.
"""

import sys
from dataclasses import dataclass
from typing import Any

from mlperf_bert.config.sections import (
    CLIPPED_TOGETHER,
    MOST_BATCH,
    PUBLISHED_STRATA,
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
from mlperf_bert.errors import ConfigError

CLOSED_TARGET_ACCURACY = 0.72
CLOSED_MOST_BATCH = 16_384  # global batch of the largest reference convergence point
_CLOSED = {
    "model.vocab_size": 30_522,
    "model.hidden_size": 1024,
    "model.num_layers": 24,
    "model.num_heads": 16,
    "model.intermediate_size": 4096,
    "model.max_position_embeddings": 512,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "run.init_state": "weights",
    "data.corpus": "prepared",
    "data.max_seq_length": 512,
    "data.max_predictions": 76,
    "data.masking": "static",
    "data.skip_samples": 0,
    "model.architecture": "bert",
    "model.objective": "mlm_nsp",
    "optim.name": "lamb",
    "clip.max_norm": 1.0,
    "eval.interval_samples": "mlperf",
}
_MOST_TOKENS = 2**31 - 1  # positions in a batch are int32
MOST_OF_UNEQUAL_COUNTS = 4  # sequences a micro-batch; above that, equal counts are just as even
# Raised whenever the embedded corpus, its vocabulary or the format of prepared sets changes,
# so that older sets are not mistaken for this program's.
EMBEDDED_RECIPE = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, complete and checked. Raises ConfigError if two settings contradict."""

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
        """Steps after which a run ends that has not reached its target."""
        steps = self.run.max_steps
        return self.schedule.decay_steps if steps == "schedule" else steps

    @property
    def eval_interval_samples(self) -> int:
        """Samples between two evaluations: the setting, or MLPerf's formula (rules, section 7)."""
        if self.eval.interval_samples != "mlperf":
            return self.eval.interval_samples
        samples = 0.05 * (230.23 * self.parallel.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    def evaluation_is_due(self, samples: int) -> bool:
        """True if the step that ends at `samples` passed a multiple of the evaluation interval."""
        interval = self.eval_interval_samples
        return samples // interval > (samples - self.parallel.global_batch_size) // interval

    @property
    def processes_per_node(self) -> int:
        """Processes that a launcher starts on a node: the ranks, and a reader process for each."""
        return self.parallel.ranks_per_node * (2 if self.data.loader == "mpi_readers" else 1)

    @property
    def embedded_corpus_name(self) -> str:
        """Directory name for the embedded corpus, made of all that its contents depend on."""
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


def may_begin_with(weights: str | None, division: str) -> bool:
    """True if a division's runs may begin with "checkpoint" or "random" weights; None: unknown.

    The closed division prescribes them (MLPerf Training rules, BERT).
    """
    return division != "closed" or weights == "checkpoint"


def _setting(config: RunConfig, where: str) -> Any:
    """The value of `section.field`."""
    section, field = where.split(".")
    return getattr(getattr(config, section), field)


def _check_shapes(config: RunConfig) -> None:
    """Raise ConfigError for settings that do not fit each other."""
    model, data = config.model, config.data
    if data.max_seq_length > model.max_position_embeddings:
        remedy = f"set it to {model.max_position_embeddings} (position embeddings) at most"
        raise ConfigError("data.max_seq_length", f"is {data.max_seq_length}", remedy)
    _check_sizes(config)
    if data.counts_per_rank == "unequal":
        _check_unequal_counts(config)
    if config.optim.implementation == "apex":
        _check_apex(config)
    if config.run.step_mode == "captured":
        _check_captured(config)
    _check_first_buckets(config)


def _check_unequal_counts(config: RunConfig) -> None:
    """Raise ConfigError for settings that do not go with unequal counts of sequences."""
    where, balance, policy = "data.counts_per_rank", config.data.balance, config.clip.policy
    normalization, local = config.optim.loss_normalization, config.parallel.local_batch_size
    if balance != "presort_global":
        problem = f"'unequal' with data.balance {balance!r}"
        raise ConfigError(where, problem, "use balance 'presort_global', or equal counts")
    if normalization != "global":
        problem = f"'unequal' with optim.loss_normalization {normalization!r}"
        raise ConfigError(where, problem, "use 'global', which weighs every token the same")
    if policy not in CLIPPED_TOGETHER:
        problem = f"'unequal' with clip.policy {policy!r}"
        raise ConfigError(where, problem, "clip after the all-reduce, or use equal counts")
    if not 2 <= local <= MOST_OF_UNEQUAL_COUNTS:
        problem = f"'unequal' with {local} sequences a micro-batch"
        remedy = f"use 'equal'; unequal counts are for 2 to {MOST_OF_UNEQUAL_COUNTS}"
        raise ConfigError(where, problem, remedy)


def _check_apex(config: RunConfig) -> None:
    """Raise ConfigError for settings that apex's optimizers do not go with."""
    where, parallel, precision = "optim.implementation", config.parallel, config.model.precision
    if config.run.device != "cuda":
        problem = f"'apex' with run.device {config.run.device!r}"
        raise ConfigError(where, problem, "set run.device to 'cuda', or use 'ours'")
    if precision == "fp8":
        problem = f"'apex' with model.precision {precision!r}"
        remedy = "set model.precision to 'fp32', 'bf16_autocast' or 'bf16', or use 'ours'"
        raise ConfigError(where, problem, remedy)
    # apex's FusedAdam keeps no masters of bf16 weights.
    if config.optim.name == "adamw" and precision == "bf16":
        problem = f"'apex' with model.precision {precision!r}"
        remedy = "set model.precision to 'bf16_autocast', optim.name to 'lamb', or use 'ours'"
        raise ConfigError(where, problem, remedy)
    if parallel.data_parallel not in ("ddp", "flat"):
        problem = f"'apex' with parallel.data_parallel {parallel.data_parallel!r}"
        remedy = "set parallel.data_parallel to 'ddp' or 'flat', or use 'ours'"
        raise ConfigError(where, problem, remedy)
    # The flat reducer's gradients stay in the wire's dtype.
    if parallel.data_parallel == "flat" and parallel.allreduce_dtype != "as_gradients":
        problem = f"'apex' with parallel.allreduce_dtype {parallel.allreduce_dtype!r}"
        remedy = "set parallel.allreduce_dtype to 'as_gradients', or use 'ours'"
        raise ConfigError(where, problem, remedy)


def _check_first_buckets(config: RunConfig) -> None:
    """Raise ConfigError if the first step would clip in other buckets than all later ones.

    DistributedDataParallel cuts its buckets anew after its first step, which is a warm-up step. A
    resumed run would take such a first step again, and not repeat the one without a break.
    """
    parallel = config.parallel
    by_bucket = config.clip.policy == "bucket_before_allreduce"
    by_torch = parallel.data_parallel == "ddp" and parallel.world_size > 1
    if by_bucket and by_torch and config.run.warm_up_steps == 0:
        problem = "is 0 with clip.policy 'bucket_before_allreduce' and "
        problem += "parallel.data_parallel 'ddp', whose first step has other buckets"
        raise ConfigError("run.warm_up_steps", problem, "set it to 1 or more, or use 'flat'")


def _check_captured(config: RunConfig) -> None:
    """Raise ConfigError for what a captured step cannot do (docs/concepts/captured_step.md)."""
    parallel = config.parallel
    if parallel.data_parallel != "ddp" or parallel.world_size == 1:
        return
    # Clipping before the all-reduce and another dtype on the wire use a communication hook of
    # DistributedDataParallel (distributed/clipping.py). It returns futures, and no run on several
    # GPUs has shown that a capture follows their streams.
    hooks = []
    if config.clip.policy not in CLIPPED_TOGETHER:
        hooks.append(f"clip.policy {config.clip.policy!r}")
    if parallel.allreduce_dtype != "as_gradients":
        hooks.append(f"parallel.allreduce_dtype {parallel.allreduce_dtype!r}")
    if hooks:
        problem = f"is 'ddp' on several ranks, with run.step_mode 'captured' and {hooks[0]}"
        remedy = "set parallel.data_parallel to 'flat', or run.step_mode to 'eager'"
        raise ConfigError("parallel.data_parallel", problem, remedy)


def _check_sizes(config: RunConfig) -> None:
    """Check products of numbers that are each within their own bounds. Raises ConfigError."""
    parallel, data = config.parallel, config.data
    batch, local = parallel.global_batch_size, parallel.local_batch_size
    sizes = (
        ("parallel.local_batch_size", "sequences an update", batch, MOST_BATCH),
        ("data.max_seq_length", "tokens a micro-batch", local * data.max_seq_length, _MOST_TOKENS),
    )
    for where, what, size, most in sizes:
        if size > most:
            raise ConfigError(where, f"makes {size:,} {what}", f"{most:,} at most: lower it")


def _check_closed_rules(config: RunConfig) -> None:
    """Raise ConfigError unless the closed rules are kept (MLPerf Training rules, BERT)."""
    for where, required in _CLOSED.items():
        value = _setting(config, where)
        if value != required:
            problem = f"{value!r} in the closed division"
            raise ConfigError(where, problem, f"set it to {required!r} or go open")
    sampler, policy, target = config.data.sampler, config.clip.policy, config.eval.target
    if config.schedule.form == "wsd":
        problem = "'wsd' in the closed division, whose rate falls by a power"
        raise ConfigError("schedule.form", problem, "use 'continuous' or go open")
    if sampler in PUBLISHED_STRATA:
        problem = f"{sampler!r}, which draws lengths unevenly, in the closed division"
        raise ConfigError("data.sampler", problem, "use 'uniform' or go open")
    allowed = ("after_allreduce", "whole_before_allreduce")
    if policy not in allowed:
        problem = f"{policy!r} in the closed division, which limits the whole norm"
        raise ConfigError(
            "clip.policy", problem, f"use {' or '.join(map(repr, allowed))}, or go open"
        )
    if target is None or target < CLOSED_TARGET_ACCURACY:
        remedy = f"set it to {CLOSED_TARGET_ACCURACY} or go open"
        problem = f"{config.eval.target_accuracy!r} in the closed division"
        raise ConfigError("eval.target_accuracy", problem, remedy)
    batch = config.parallel.global_batch_size
    if batch > CLOSED_MOST_BATCH:
        problem = f"makes a global batch of {batch:,} in the closed division"
        remedy = f"the largest reference convergence point is {CLOSED_MOST_BATCH:,}: lower it"
        raise ConfigError("parallel.local_batch_size", problem, remedy)

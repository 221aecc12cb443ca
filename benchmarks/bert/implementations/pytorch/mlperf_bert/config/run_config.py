"""The config of one run, with all sections and the rules for settings that interact.

`sections.py` defines the type and range of each setting, and `files.py` reads and writes TOML.
Every error names the setting to change.
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
CLOSED_EVAL_SAMPLES = 10_000
CLOSED_MOST_BATCH = 16_384  # global batch size of the largest reference convergence point
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
    "schedule.end_learning_rate": 0.0,
    "clip.max_norm": 1.0,
    "eval.interval_samples": "mlperf",
}
_GO_OPEN = "set mlperf.division to 'open'"
_MOST_TOKENS = 2**31 - 1  # because positions in a batch are int32
# Sequences per micro-batch. With more of them, equal counts balance just as well.
MOST_OF_UNEQUAL_COUNTS = 4
# Increased whenever the embedded corpus, its vocabulary or the format of prepared sets changes, so
# that sets of an earlier version are not used by mistake.
EMBEDDED_RECIPE = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A complete and checked config. Raises ConfigError if settings contradict each other."""

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
        """Number of steps after which a run ends even if it has not reached its target."""
        steps = self.run.max_steps
        return self.schedule.decay_steps if steps == "schedule" else steps

    @property
    def eval_interval_samples(self) -> int:
        """Number of samples between evaluations, as set or as in MLPerf's rules (section 7)."""
        if self.eval.interval_samples != "mlperf":
            return self.eval.interval_samples
        samples = 0.05 * (230.23 * self.parallel.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    def evaluation_is_due(self, samples: int) -> bool:
        """Return True if an evaluation is due after the step that ends at `samples`.

        An evaluation is due if the step reached or passed a multiple of the evaluation interval.
        """
        interval = self.eval_interval_samples
        return samples // interval > (samples - self.parallel.global_batch_size) // interval

    def counts_as_result(self, samples: int) -> bool:
        """Return True if an evaluation after `samples` may reach the target.

        A run also evaluates after its last step. In the closed division, this evaluation only
        counts if it was due, because the rules fix when a run may evaluate.
        """
        is_closed = self.mlperf.division == "closed" and self.mlperf.enforce_rules
        return not is_closed or self.evaluation_is_due(samples)

    @property
    def processes_per_node(self) -> int:
        """Number of processes that a launcher starts per node, including reader processes."""
        return self.parallel.ranks_per_node * (2 if self.data.loader == "mpi_readers" else 1)

    @property
    def embedded_corpus_name(self) -> str:
        """Directory name of the embedded corpus.

        The name contains everything on which the data of the corpus depends.
        """
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
    """Return True if a run of this division may start from weights of this origin.

    `weights` is "checkpoint", "random", or None if the origin is unknown. The closed division
    requires the reference checkpoint (MLPerf Training rules, BERT).
    """
    return division != "closed" or weights == "checkpoint"


def _setting(config: RunConfig, where: str) -> Any:
    """Return the value of the setting `where`, a name like `section.field`."""
    section, field = where.split(".")
    return getattr(getattr(config, section), field)


def _check_shapes(config: RunConfig) -> None:
    """Raise ConfigError if settings contradict each other."""
    model, data = config.model, config.data
    if data.max_seq_length > (most := model.max_position_embeddings):
        problem = f"{data.max_seq_length} exceeds model.max_position_embeddings, which is {most}"
        raise ConfigError("data.max_seq_length", problem, "use a lower value, or raise that limit")
    _check_sizes(config)
    if data.counts_per_rank == "unequal":
        _check_unequal_counts(config)
    if config.optim.implementation == "apex":
        _check_apex(config)
    if config.run.step_mode == "captured":
        _check_captured(config)
    _check_first_buckets(config)


def _check_unequal_counts(config: RunConfig) -> None:
    """Raise ConfigError for a setting that does not work with `counts_per_rank = "unequal"`."""
    where, balance, policy = "data.counts_per_rank", config.data.balance, config.clip.policy
    normalization, local = config.optim.loss_normalization, config.parallel.local_batch_size
    if balance != "presort_global":
        problem = f"'unequal' does not work with data.balance {balance!r}"
        raise ConfigError(where, problem, "set data.balance to 'presort_global', or use 'equal'")
    if normalization != "global":
        problem = f"'unequal' does not work with optim.loss_normalization {normalization!r}"
        remedy = "set optim.loss_normalization to 'global', or use 'equal'"
        raise ConfigError(where, problem, remedy)
    if policy not in CLIPPED_TOGETHER:
        problem = f"'unequal' does not work with clip.policy {policy!r}"
        raise ConfigError(where, problem, "set clip.policy to 'after_allreduce', or use 'equal'")
    if not 2 <= local <= MOST_OF_UNEQUAL_COUNTS:
        problem = f"'unequal' does not work with a parallel.local_batch_size of {local}"
        remedy = f"set parallel.local_batch_size to 2 .. {MOST_OF_UNEQUAL_COUNTS}, or use 'equal'"
        raise ConfigError(where, problem, remedy)


def _check_apex(config: RunConfig) -> None:
    """Raise ConfigError for a setting that does not work with the optimizers of apex."""
    where, parallel, precision = "optim.implementation", config.parallel, config.model.precision
    if config.run.device != "cuda":
        problem = f"'apex' does not work with run.device {config.run.device!r}"
        raise ConfigError(where, problem, "set run.device to 'cuda', or use 'ours'")
    if precision == "fp8":
        problem = f"'apex' does not work with model.precision {precision!r}"
        remedy = "set model.precision to 'fp32', 'bf16_autocast' or 'bf16', or use 'ours'"
        raise ConfigError(where, problem, remedy)
    # apex's FusedAdam keeps no fp32 master copies of bf16 weights.
    if config.optim.name == "adamw" and precision == "bf16":
        problem = f"'apex' does not work with optim.name 'adamw' and model.precision {precision!r}"
        remedy = "set model.precision to 'bf16_autocast', optim.name to 'lamb', or use 'ours'"
        raise ConfigError(where, problem, remedy)
    if parallel.data_parallel not in ("ddp", "flat"):
        problem = f"'apex' does not work with parallel.data_parallel {parallel.data_parallel!r}"
        remedy = "use 'ours', or set parallel.data_parallel to 'ddp' or 'flat'"
        raise ConfigError(where, problem, remedy)
    # The flat reducer leaves gradients in the dtype in which they were sent.
    if parallel.data_parallel == "flat" and parallel.allreduce_dtype != "as_gradients":
        problem = f"'apex' does not work with parallel.allreduce_dtype {parallel.allreduce_dtype!r}"
        remedy = "set parallel.allreduce_dtype to 'as_gradients', or use 'ours'"
        raise ConfigError(where, problem, remedy)


def _check_first_buckets(config: RunConfig) -> None:
    """Raise ConfigError if the first step would have other gradient buckets than later steps.

    DistributedDataParallel rebuilds its buckets after its first step, so that step must be a
    warm-up step. Otherwise a resumed run would again have the initial buckets in its first step.
    Buckets decide which gradients are clipped together, and in which order the ranks' gradients are
    added, so the results would differ from those of an uninterrupted run.
    """
    parallel = config.parallel
    by_torch = parallel.data_parallel == "ddp" and parallel.world_size > 1
    if by_torch and config.run.warm_up_steps == 0:
        problem = (
            "0 does not work with parallel.data_parallel 'ddp' on several ranks, because the first "
            "step then has other buckets than later steps"
        )
        remedy = "use at least 1, or set parallel.data_parallel to 'flat'"
        raise ConfigError("run.warm_up_steps", problem, remedy)


def _check_captured(config: RunConfig) -> None:
    """Raise ConfigError for a setting that a captured step does not support.

    docs/concepts/captured_step.md explains captured steps.
    """
    # Attention in fp32, "grouped" and "reference" read lengths on the host (model/choices.py).
    for where, instead in (("model.precision", "bf16"), ("model.attention", "auto")):
        value = _setting(config, where)
        if config.run.device == "cuda" and value in ("fp32", "grouped", "reference"):
            problem = f"'captured' does not work on 'cuda' with {where} {value!r}"
            remedy = f"set {where} to {instead!r}, or run.step_mode to 'eager'"
            raise ConfigError("run.step_mode", problem, remedy)
    parallel = config.parallel
    if parallel.data_parallel != "ddp" or parallel.world_size == 1:
        return
    # Clipping before the all-reduce and sending another dtype need a communication hook of
    # DistributedDataParallel (distributed/clipping.py). The hook returns futures, and no run on
    # several GPUs has shown that a capture follows their streams.
    hooks = (("clip.policy", CLIPPED_TOGETHER), ("parallel.allreduce_dtype", ("as_gradients",)))
    for where, allowed in hooks:
        if (value := _setting(config, where)) not in allowed:
            problem = "'ddp' on several ranks does not work with run.step_mode 'captured' and "
            remedy = "set parallel.data_parallel to 'flat', or run.step_mode to 'eager'"
            raise ConfigError("parallel.data_parallel", f"{problem}{where} {value!r}", remedy)


def _check_sizes(config: RunConfig) -> None:
    """Raise ConfigError if numbers are within their bounds, but their product is too large."""
    parallel, data = config.parallel, config.data
    batch, tokens = parallel.global_batch_size, parallel.local_batch_size * data.max_seq_length
    sizes = (
        ("parallel.local_batch_size", "sequences per update", batch, MOST_BATCH),
        ("data.max_seq_length", "tokens per micro-batch", tokens, _MOST_TOKENS),
    )
    for where, what, size, most in sizes:
        if size > most:
            problem = f"gives {size:,} {what}, but at most {most:,} are possible"
            raise ConfigError(where, problem, "lower it")


def _check_closed_rules(config: RunConfig) -> None:
    """Raise ConfigError if the config breaks a rule of the closed division.

    Source: MLPerf Training rules.
    """
    for where, required in _CLOSED.items():
        value = _setting(config, where)
        if value != required:
            problem = f"{value!r} is not allowed in the closed division"
            raise ConfigError(where, problem, f"set it to {required!r}, or {_GO_OPEN}")
    sampler, policy, target = config.data.sampler, config.clip.policy, config.eval.target
    if config.schedule.form == "wsd":
        problem = "'wsd' is not allowed in the closed division, which requires a linear decay"
        raise ConfigError("schedule.form", problem, f"use 'continuous', or {_GO_OPEN}")
    if sampler in PUBLISHED_STRATA:
        problem = f"{sampler!r} draws lengths unevenly, which the closed division does not allow"
        raise ConfigError("data.sampler", problem, f"use 'uniform', or {_GO_OPEN}")
    allowed = ("after_allreduce", "whole_before_allreduce")
    if policy not in allowed:
        problem = f"{policy!r} is not allowed in the closed division, which clips whole gradients"
        remedy = f"use {' or '.join(map(repr, allowed))}, or {_GO_OPEN}"
        raise ConfigError("clip.policy", problem, remedy)
    if target is None or target < CLOSED_TARGET_ACCURACY:
        remedy = f"set it to {CLOSED_TARGET_ACCURACY}, or {_GO_OPEN}"
        problem = f"{config.eval.target_accuracy!r} is not allowed in the closed division"
        raise ConfigError("eval.target_accuracy", problem, remedy)
    batch = config.parallel.global_batch_size
    if batch > CLOSED_MOST_BATCH:
        problem = (
            f"gives a global batch size of {batch:,}, but the closed division allows at most "
            f"{CLOSED_MOST_BATCH:,}, the batch size of its largest reference convergence point"
        )
        raise ConfigError("parallel.local_batch_size", problem, f"lower it, or {_GO_OPEN}")

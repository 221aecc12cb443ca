"""What a config must fulfil beyond the types of its fields; every error says which to change."""

from typing import TYPE_CHECKING

from mlperf_bert.config_sections import STORED_MASKING_RATE
from mlperf_bert.errors import ConfigError

if TYPE_CHECKING:
    from mlperf_bert.config import RunConfig
    from mlperf_bert.config_sections import ModelSection

CLOSED_TARGET_ACCURACY = 0.72
CLOSED_MOST_BATCH = 16_384  # of the largest reference convergence point
CLOSED_CLIP_POLICIES = ("after_allreduce", "whole_before_allreduce")
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
BIASED_SAMPLERS = frozenset(("strata_6_3_2_5", "strata_4_2_2_4"))
# Of the clip policies, those whose result does not depend on which rank has which samples.
CLIPPED_TOGETHER = frozenset(("none", "after_allreduce"))
# 0.15 to 0.3 are usual; above 0.4 the shortest sequences have fewer tokens than are to be masked.
LEAST_MASKING_RATE, MOST_MASKING_RATE = 0.05, 0.4
MOST_OF_UNEQUAL_COUNTS = 4  # sequences a forward; above that, equal counts are as even


def has_bert_large_sizes(model: "ModelSection") -> bool:
    """Whether steps cost what BERT-large's do, which dropout does not matter to."""
    return all(getattr(model, field) == value for field, value in _BERT_LARGE_SIZES.items())


def is_bert_large(model: "ModelSection") -> bool:
    """Whether it is the model of the closed division, dropout included."""
    return all(getattr(model, field) == value for field, value in _BERT_LARGE.items())


def check_ranges(config: "RunConfig") -> None:
    """Every number within its range. Raises ConfigError."""
    positive = {
        "schedule.decay_steps": config.schedule.decay_steps,
        "run.max_steps": config.max_steps,
        "run.log_interval_steps": config.run.log_interval_steps,
        "run.hang_timeout_s": config.run.hang_timeout_s,
        "checkpoint.keep_last": config.checkpoint.keep_last,
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
        "optim.initial_loss_scale": config.optim.initial_loss_scale,
        "optim.loss_scale_growth_steps": config.optim.loss_scale_growth_steps,
        "clip.max_norm": config.clip.max_norm,
        "clip.bucket_count": config.clip.bucket_count,
        "eval.interval_samples": config.eval_interval_samples,
        "data.cost_a": config.data.cost_a,
        "data.exchange_window_steps": config.data.exchange_window_steps,
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
    _check_run(config)
    _check_masking(config)
    _check_eval(config)
    at_least_zero = {
        "optim.learning_rate": config.optim.learning_rate,
        "optim.weight_decay": config.optim.weight_decay,
        "schedule.end_learning_rate": config.schedule.end_learning_rate,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule.power": config.schedule.power,
        "run.warm_up_steps": config.run.warm_up_steps,
        "run.noise_interval_steps": config.run.noise_interval_steps,
        "checkpoint.interval_steps": _steps(config.checkpoint.interval_steps),
        "data.cost_b": 0.0 if config.data.cost_b == "flops" else config.data.cost_b,
    }
    for field, value in at_least_zero.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(field, f"is {value}", "set it to a finite number of at least 0")
    if config.model.type_vocab_size < 2:
        raise ConfigError("model.type_vocab_size", "is below 2", "BERT has two segments: set 2")


def _check_run(config: "RunConfig") -> None:
    run = config.run
    if run.seed != "random" and not 0 <= run.seed < 2**63:
        raise ConfigError("run.seed", f"is {run.seed}", "set it within 0 .. 2**63 - 1")
    if not 1 < run.straggler_factor < float("inf"):
        problem = f"is {run.straggler_factor}"
        raise ConfigError("run.straggler_factor", problem, "set it to a finite number above 1")


def _check_masking(config: "RunConfig") -> None:
    data = config.data
    if not LEAST_MASKING_RATE <= data.masking_rate <= MOST_MASKING_RATE:
        problem = f"is {data.masking_rate}"
        remedy = f"set it within {LEAST_MASKING_RATE} .. {MOST_MASKING_RATE}"
        raise ConfigError("data.masking_rate", problem, remedy)
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


def _steps(value: int | str) -> int:
    return 0 if isinstance(value, str) else value


def _check_eval(config: "RunConfig") -> None:
    if not 0 < config.eval.target_accuracy < 1:
        problem = f"is {config.eval.target_accuracy}"
        raise ConfigError("eval.target_accuracy", problem, "set it above 0 and below 1")
    tokens = config.eval.tokens_per_forward
    if tokens != "auto" and tokens < 1:
        raise ConfigError("eval.tokens_per_forward", f"is {tokens}", "set it above 0, or to 'auto'")


def check_shapes(config: "RunConfig") -> None:
    """Settings that must fit each other. Raises ConfigError."""
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


def _check_quantiles(config: "RunConfig") -> None:
    quantiles, batch = config.data.quantiles, config.parallel.global_batch_size
    if quantiles != "auto" and (quantiles < 1 or batch % quantiles):
        problem = f"{quantiles} does not divide the global batch of {batch}"
        raise ConfigError("data.quantiles", problem, "use a divisor of it, or 'auto'")


def _check_counts_per_rank(config: "RunConfig") -> None:
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


def _check_clip(config: "RunConfig") -> None:
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


def _check_captured(config: "RunConfig") -> None:
    if config.run.step_mode == "captured" and config.data.loader == "dali":
        problem = "'captured' with data.loader 'dali', whose batches are not padded on the host"
        raise ConfigError("run.step_mode", problem, "use 'eager', or data.loader 'thread'")


def _check_noise(config: "RunConfig") -> None:
    interval = config.run.noise_interval_steps
    if interval and config.run.step_mode == "captured":
        problem = f"is {interval} with run.step_mode 'captured', whose graphs measure nothing"
        raise ConfigError("run.noise_interval_steps", problem, "set it to 0, or use 'eager'")


def _check_apex(config: "RunConfig") -> None:
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


def check_closed_rules(config: "RunConfig") -> None:
    """What the closed division fixes (MLPerf Training rules, BERT). Raises ConfigError."""
    for where, required in _CLOSED.items():
        section, field = where.split(".")
        value = getattr(getattr(config, section), field)
        if value != required:
            problem = f"{value!r} in the closed division"
            raise ConfigError(where, problem, f"set it to {required!r} or go open")
    if config.data.sampler in BIASED_SAMPLERS:
        raise ConfigError(
            "data.sampler",
            f"{config.data.sampler!r}, which draws lengths unevenly, in the closed division",
            "use 'uniform' or go open",
        )
    if config.clip.policy not in CLOSED_CLIP_POLICIES:
        raise ConfigError(
            "clip.policy",
            f"{config.clip.policy!r} in the closed division, which limits the whole norm",
            f"use {' or '.join(map(repr, CLOSED_CLIP_POLICIES))}, or go open",
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

"""Check a run's initial weights and training state before the run starts.

The weights are in a checkpoint that this program wrote. `mlperf_bert convert` creates such a
checkpoint from the weights of other programs. The checks are quick, because they read only small
files and do not import torch. `load.py` checks the weights themselves.
"""

from pathlib import Path
from typing import Any

from mlperf_bert.checkpoint.manifest import (
    INITIALIZED_FROM,
    MODEL,
    SHARDS,
    read_config,
    read_manifest,
    read_state,
    resolve,
)
from mlperf_bert.config.run_config import RunConfig, may_begin_with
from mlperf_bert.config.sections import OF_MODERN, ModelSection
from mlperf_bert.data.index import Manifest as Prepared
from mlperf_bert.data.index import sets_sha256
from mlperf_bert.data.sampler import num_quantiles
from mlperf_bert.errors import CheckpointError, ConfigError

# Learning rate for further training on a user's text. It is a tenth of pretrain_cpu's rate, and it
# has not been tuned.
RATE_TO_CONTINUE = 2e-4
# Settings that a phase may change, because later phases of ModernBERT have longer texts and other
# RoPE bases (arXiv 2412.13663, section 2.2).
_OF_A_PHASE = frozenset(("rope_base_global", "rope_base_local", "max_position_embeddings"))
# Settings in which a config must match its weights, except those that a phase may change.
MODEL_OF_WEIGHTS = (
    *("vocab_size", "hidden_size", "num_layers", "intermediate_size", "objective"),
    *("architecture", "num_heads", "layer_norm_epsilon", "max_position_embeddings"),
    *OF_MODERN,
)


def check_first_weights(config: RunConfig, data_dir: Path) -> list[str]:
    """Check that a run of `config` on the data in `data_dir` can start.

    If `run.init_checkpoint` is set, the function checks that checkpoint, and returns a remark for
    each setting that a phase may change and that differs there. Otherwise it checks that the run
    may start without a checkpoint.

    Raises:
        ConfigError: the division requires weights and the config has none, the checkpoint's model
            has other settings, or the run cannot continue the checkpoint's training state or data
            order.
        CheckpointError: there is no checkpoint, or it has no weights, or its vocabulary differs
            from that of the data.
        DataError: the manifest of a prepared set is missing or damaged.
    """
    given = config.run.init_checkpoint
    if not given:
        _refuse_state(config, "run.init_checkpoint is not set")
        if not may_begin_with("random", config.mlperf.division):
            problem = "is not set, but the closed division requires MLPerf's weights"
            remedy = (
                "pass them with --init-checkpoint (run_and_time.sh: INIT_CHECKPOINT), or set "
                "mlperf.division to 'open'"
            )
            raise ConfigError("run.init_checkpoint", problem, remedy)
        return []
    directory = resolve(Path(given))
    check_model(directory, config.model)
    _check_phase(directory, config, data_dir)
    if MODEL not in read_manifest(directory).files:
        remedy = "pass a checkpoint written by a run or by `mlperf_bert convert`"
        raise CheckpointError(str(directory), f"has no {MODEL}", remedy)
    check_vocabulary(directory, Prepared.load(data_dir / "train").vocabulary_sha256)
    ours, theirs = config.model, read_config(directory).model
    return [
        f"model.{name} is {getattr(ours, name)}, but the weights in {directory} were trained with "
        f"{getattr(theirs, name)}"
        for name in sorted(_OF_A_PHASE)
        if theirs.architecture == "modern" and getattr(ours, name) != getattr(theirs, name)
    ]


def _refuse_state(config: RunConfig, problem: str) -> None:
    """Raise ConfigError if `run.init_state` is "training".

    `problem` says why there is no training state to start from.
    """
    if config.run.init_state == "training":
        remedy = "pass a run's checkpoint with --init-checkpoint, or use 'weights'"
        raise ConfigError("run.init_state", f"is 'training', but {problem}", remedy)


def _check_phase(directory: Path, config: RunConfig, data_dir: Path) -> None:
    """Raise ConfigError if a run cannot continue the training state or data order of a checkpoint.

    The function checks the training state if `run.init_state` is "training", and the data order if
    `data.skip_samples` is not 0.
    """
    if not any(name.startswith(SHARDS) for name in read_manifest(directory).files):
        _refuse_state(config, f"{directory} has weights without a training state")
        return
    before, run = read_config(directory), f"the run in {directory}"
    check_state_of_phase(config, before, run)
    if config.data.skip_samples:
        state = read_state(directory)
        _check_same(run, {"run.seed": (config.run.seed, state.seed)}, "data.skip_samples")
        check_order_of_phase(config, before, run, data_dir, state.data_sha256)


def check_state_of_phase(config: RunConfig, before: RunConfig, run: str) -> None:
    """Raise ConfigError if a phase of `config` cannot use the training state of an earlier run.

    `before` is the config of that run, and `run` names it in messages.
    """
    if config.run.init_state == "training":
        kinds: dict[str, tuple[Any, Any]] = {
            "optim.name": (config.optim.name, before.optim.name),
            # Without the training state, a head of the weights may be ignored.
            "model.objective": (config.model.objective, before.model.objective),
        }
        _check_same(run, kinds, "run.init_state 'training'")


def check_order_of_phase(
    config: RunConfig, before: RunConfig, run: str, data_dir: Path, data_sha256: str
) -> None:
    """Raise ConfigError if `data.skip_samples` is set, and an earlier run has other data or order.

    `before` is the config of that run, `run` names it in messages, and `data_sha256` is the digest
    of its data.
    """
    if config.data.skip_samples:
        orders: dict[str, tuple[Any, Any]] = {
            "data.sampler": (config.data.sampler, before.data.sampler)
        }
        if config.data.sampler == "quantile":
            batch, theirs = (each.parallel.global_batch_size for each in (config, before))
            name = "number of quantiles (the largest divisor of the global batch up to 64)"
            orders[name] = (num_quantiles(batch), num_quantiles(theirs))
        _check_same(run, orders, "data.skip_samples")
        if sets_sha256(data_dir / "train", data_dir / "eval") != data_sha256:
            problem = f"is {config.data.skip_samples}, but {run} has other data"
            raise ConfigError("data.skip_samples", problem, "use 0, or pass the data of that run")


def _check_same(run: str, settings: dict[str, tuple[Any, Any]], for_what: str) -> None:
    """Raise ConfigError for the first setting that differs between this run and an earlier one.

    `settings` maps each setting to the pair (value in this run, value in the earlier run), and
    `run` names the earlier run. `for_what` is the setting that requires the values to be equal.
    """
    for name, (ours, theirs) in settings.items():
        if ours != theirs:
            problem = f"is {ours!r}, but {run} has {theirs!r}"
            remedy = f"use {theirs!r}, because {for_what} requires the same value"
            raise ConfigError(name, problem, remedy)


def settings_of(model: ModelSection) -> dict[str, Any]:
    """Return the names and values of the [model] settings that a model's weights determine."""
    unused = () if model.architecture == "modern" else OF_MODERN
    return {name: getattr(model, name) for name in MODEL_OF_WEIGHTS if name not in unused}


def check_model(directory: Path, model: ModelSection) -> None:
    """Raise ConfigError if settings in `model` do not match the weights in `directory`."""
    check_model_settings(model, read_config(directory).model, f"the weights in {directory}")


def check_model_settings(model: ModelSection, theirs: ModelSection, weights: str) -> None:
    """Raise ConfigError if settings in `model` do not match weights of a model `theirs`.

    `weights` names these weights in messages.
    """
    free = _OF_A_PHASE if theirs.architecture == "modern" else frozenset()
    for name, value in settings_of(theirs).items():
        if name not in free:
            _check_setting(weights, name, getattr(model, name), value)


def _check_setting(weights: str, name: str, ours: Any, theirs: Any) -> None:
    if name == "objective":
        if (ours, theirs) == ("mlm_nsp", "mlm"):
            problem = f"is 'mlm_nsp', but {weights} have no next-sentence head"
            remedy = "use 'mlm', or pass weights that have this head"
            raise ConfigError("model.objective", problem, remedy)
    elif name == "vocab_size" and -(-ours // 8) == -(-theirs // 8):
        return  # both are padded to the same number of rows
    elif ours != theirs:
        problem = f"is {ours}, but {weights} have {theirs}"
        raise ConfigError(f"model.{name}", problem, f"set it to {theirs!r}")


def origin_of_phase(checkpoint: Path) -> str:
    """Return one line that describes the training state in `checkpoint` and its weights' origin."""
    found = read_manifest(resolve(checkpoint))
    state = (
        f"training state after {found.samples:,} samples",
        f"{MODEL} {found.files[MODEL].sha256}",
    )
    return ", ".join((*state, *found.origin.values()))


def origin_of_run(
    first: Path | None, checkpoint: Path | None, *, begins_phase: bool
) -> dict[str, str]:
    """Return manifest entries for the weights or the training state from which a run started.

    Args:
        first: `run.init_checkpoint`, or None if it is not set.
        checkpoint: the checkpoint from which the run resumes, or None. Its manifest entries are
            kept.
        begins_phase: True if the run starts from the training state of `first`.
    """
    if begins_phase and first is not None:
        return {INITIALIZED_FROM: origin_of_phase(first)}
    saved = checkpoint or first
    known = {} if saved is None else read_manifest(resolve(saved)).origin
    if not known or INITIALIZED_FROM in known:
        return dict(known)
    return {INITIALIZED_FROM: ", ".join(known.values())}


def check_vocabulary(directory: Path, vocabulary_sha256: str) -> None:
    """Raise CheckpointError if `vocabulary_sha256` is not the digest of the weights' vocabulary."""
    if read_manifest(directory).vocabulary_sha256 != vocabulary_sha256:
        problem = "was trained with another vocabulary than that of the data"
        remedy = "pass data that was prepared with the checkpoint's vocabulary"
        raise CheckpointError(str(directory), problem, remedy)

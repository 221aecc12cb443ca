"""Checks of a run's initial weights and state, or of their absence, before the run starts.

The weights are a checkpoint of ours; `mlperf_bert convert` makes one of other programs' weights.
Only small files are read, without torch, so the checks are quick. `load.py` checks the weights
themselves.
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
from mlperf_bert.files import is_there

RATE_TO_CONTINUE = 2e-4  # learning rate for own text: a tenth of pretrain_cpu's, not tuned
# A later phase of ModernBERT has longer texts and other bases (arXiv 2412.13663, section 2.2).
_OF_A_PHASE = frozenset(("rope_base_global", "rope_base_local", "max_position_embeddings"))
# Settings that weights and config must share; ModernBERT's may differ in those of a phase.
MODEL_OF_WEIGHTS = (
    *("vocab_size", "hidden_size", "num_layers", "intermediate_size", "objective"),
    *("architecture", "num_heads", "layer_norm_epsilon", "max_position_embeddings"),
    *OF_MODERN,
)


def check_first_weights(config: RunConfig, data_dir: Path) -> None:
    """Raise unless a run of this config on this data may begin from `run.init_checkpoint`.

    Raises ConfigError if the division requires weights and there are none, the model has other
    settings, or the state or order to go on with is of another kind;
    CheckpointError if their vocabulary differs or is missing; DataError if the vocabulary of the
    data is not known.
    """
    given = config.run.init_checkpoint
    if not given:
        _refuse_state(config, "there is no run.init_checkpoint")
        if not may_begin_with("random", config.mlperf.division):
            problem = "is not set; the closed division starts from MLPerf's weights"
            remedy = "give INIT_CHECKPOINT=DIR (train: --init-checkpoint), from mlperf_bert convert"
            raise ConfigError("run.init_checkpoint", problem, remedy)
        return
    if not is_there(Path(given)):
        remedy = "give a checkpoint directory; containers see only the one in INIT_CHECKPOINT"
        raise ConfigError("run.init_checkpoint", f"is {given}, which is not there", remedy)
    directory = resolve(Path(given))
    check_model(directory, config.model)
    _check_phase(directory, config, data_dir)
    if MODEL not in read_manifest(directory).files:
        raise CheckpointError(str(directory), "holds no weights", "give one that convert made")
    check_vocabulary(directory, Prepared.load(data_dir / "train").vocabulary_sha256)


def _refuse_state(config: RunConfig, problem: str) -> None:
    if config.run.init_state == "training":
        remedy = "give the checkpoint of a run (INIT_CHECKPOINT=DIR), or set it to 'weights'"
        raise ConfigError("run.init_state", f"is 'training', and {problem}", remedy)


def _check_phase(directory: Path, config: RunConfig, data_dir: Path) -> None:
    """Raise ConfigError if a run cannot begin with a checkpoint's state or go on in its order."""
    if not any(name.startswith(SHARDS) for name in read_manifest(directory).files):
        _refuse_state(config, f"{directory} holds weights without a state")
        return
    before = read_config(directory)
    if config.run.init_state == "training":
        kinds: dict[str, tuple[Any, Any]] = {
            "optim.name": (config.optim.name, before.optim.name),
            # Weights alone may leave a head out; sizes have been compared.
            "model.objective": (config.model.objective, before.model.objective),
        }
        _check_same(directory, kinds, "run.init_state 'training'")
    if config.data.skip_samples:
        state = read_state(directory)
        orders: dict[str, tuple[Any, Any]] = {
            "run.seed": (config.run.seed, state.seed),
            "data.sampler": (config.data.sampler, before.data.sampler),
        }
        if config.data.sampler == "quantile":
            batch, theirs = (each.parallel.global_batch_size for each in (config, before))
            name = "quantiles (the largest divisor of the global batch up to 64)"
            orders[name] = (num_quantiles(batch), num_quantiles(theirs))
        _check_same(directory, orders, "data.skip_samples")
        if sets_sha256(data_dir / "train", data_dir / "eval") != state.data_sha256:
            problem = f"is {config.data.skip_samples}, and {directory} was made on other data"
            raise ConfigError("data.skip_samples", problem, "set it to 0, or give those data")


def _check_same(directory: Path, settings: dict[str, tuple[Any, Any]], for_what: str) -> None:
    """Raise ConfigError for the first setting, ours and theirs, that differs."""
    for name, (ours, theirs) in settings.items():
        if ours != theirs:
            problem = f"is {ours!r}, the run in {directory} has {theirs!r}"
            raise ConfigError(name, problem, f"set it to that, as {for_what} needs")


def settings_of(model: ModelSection) -> dict[str, Any]:
    """The settings of [model] that a model's weights decide."""
    unused = () if model.architecture == "modern" else OF_MODERN
    return {name: getattr(model, name) for name in MODEL_OF_WEIGHTS if name not in unused}


def check_model(directory: Path, model: ModelSection) -> None:
    """Raise ConfigError if weights have other sizes, heads or epsilon than the model."""
    theirs = read_config(directory).model
    free = _OF_A_PHASE if theirs.architecture == "modern" else frozenset()
    for name, value in settings_of(theirs).items():
        if name not in free:
            _check_setting(directory, name, getattr(model, name), value)


def _check_setting(directory: Path, name: str, ours: Any, theirs: Any) -> None:
    if name == "objective":
        if (ours, theirs) == ("mlm_nsp", "mlm"):
            problem = f"is 'mlm_nsp', the weights in {directory} have no head for pairs"
            raise ConfigError("model.objective", problem, "set it to 'mlm', or give other weights")
    elif name == "vocab_size" and -(-ours // 8) == -(-theirs // 8):
        return  # rows that pad
    elif ours != theirs:
        problem = f"is {ours}, the weights in {directory} have {theirs}"
        raise ConfigError(f"model.{name}", problem, f"set it to {theirs!r}")


def origin_of_phase(checkpoint: Path) -> str:
    """The training state that a run began with, and what that began with, in such words."""
    found = read_manifest(resolve(checkpoint))
    state = (
        f"training state after {found.samples:,} samples",
        f"{MODEL} {found.files[MODEL].sha256}",
    )
    return ", ".join((*state, *found.origin.values()))


def origin_of_run(
    first: Path | None, checkpoint: Path | None, *, begins_phase: bool
) -> dict[str, str]:
    """Manifest entries: the weights or state that the run, or the one it resumes, began with.

    Args:
        first: `run.init_checkpoint`.
        checkpoint: from which the run starts, if it does.
        begins_phase: it begins with the training state of `first`.
    """
    if begins_phase and first is not None:
        return {INITIALIZED_FROM: origin_of_phase(first)}
    saved = checkpoint or first
    known = {} if saved is None else read_manifest(resolve(saved)).origin
    if not known or INITIALIZED_FROM in known:
        return dict(known)
    return {INITIALIZED_FROM: ", ".join(known.values())}


def check_vocabulary(directory: Path, vocabulary_sha256: str) -> None:
    """Raise CheckpointError if the vocabulary of weights has another digest."""
    if read_manifest(directory).vocabulary_sha256 != vocabulary_sha256:
        problem, remedy = "was trained with another vocabulary", "use the data it was made from"
        raise CheckpointError(str(directory), problem, remedy)

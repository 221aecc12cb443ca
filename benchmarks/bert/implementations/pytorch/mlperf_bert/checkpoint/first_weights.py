"""Whether a run may begin with the weights that it is given, or with none: asked before it starts.

Reads two small files and no weights, so the answer takes no time; no torch. The weights' own digest
is checked where they are loaded (`load.py`).
"""

from pathlib import Path

from mlperf_bert.checkpoint.manifest import MODEL, read_config, read_manifest, resolve
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.common.untrusted import is_there
from mlperf_bert.config.run_config import RunConfig, may_begin_with
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.index import Manifest as Prepared

# What a checkpoint's model and the config's must share; the last two show in no tensor's shape.
_MODEL = (
    *("padded_vocab_size", "hidden_size", "num_layers", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size", "num_heads", "layer_norm_epsilon"),
)


def check_first_weights(config: RunConfig, data_dir: Path) -> None:
    """Raise unless a run of this config on this data may begin as `run.init_checkpoint` says.

    ConfigError where the division or `run.init_checkpoint_sha256` asks for other weights, or the
    model has other settings; CheckpointError where they are of another vocabulary, or none;
    DataError where the data cannot say which vocabulary they have.
    """
    given, wanted = config.run.init_checkpoint, config.run.init_checkpoint_sha256
    if not given:
        if not may_begin_with("random", config.mlperf.division) or wanted:
            problem = "is not set; the closed division starts from MLPerf's weights"
            if wanted:
                problem = f"is not set; run.init_checkpoint_sha256 asks for {wanted}"
            remedy = "give INIT_CHECKPOINT=DIR (train: --init-checkpoint), from mlperf_bert convert"
            raise ConfigError("run.init_checkpoint", problem, remedy)
        return
    if not is_there(Path(given)):
        remedy = "give a checkpoint directory; containers see only the one in INIT_CHECKPOINT"
        raise ConfigError("run.init_checkpoint", f"is {given}, which is not there", remedy)
    directory = resolve(Path(given))
    check_model(directory, config.model)
    manifest = read_manifest(directory)
    if MODEL not in manifest.files:
        raise CheckpointError(str(directory), "holds no weights", "give one that convert made")
    found = manifest.files[MODEL].sha256
    if wanted and found != wanted:
        problem = f"is {wanted}, the weights in {directory} have {found}"
        remedy = "give the weights that it names, or set it to theirs"
        raise ConfigError("run.init_checkpoint_sha256", problem, remedy)
    check_vocabulary(directory, Prepared.load(data_dir / "train").vocabulary_sha256)


def check_model(directory: Path, model: ModelSection) -> None:
    """Raise ConfigError where a checkpoint's model has other sizes, heads or epsilon."""
    stated = read_config(directory).model
    for name in _MODEL:
        ours, theirs = getattr(model, name), getattr(stated, name)
        if ours != theirs:
            problem = f"is {ours}, the weights in {directory} were trained with {theirs}"
            field = name.removeprefix("padded_")
            raise ConfigError(f"model.{field}", problem, "set it to the checkpoint's")
    if (model.objective, stated.objective) == ("mlm_nsp", "mlm"):
        problem = f"is 'mlm_nsp', the weights in {directory} have no head for pairs"
        raise ConfigError("model.objective", problem, "set it to 'mlm', or give other weights")


def check_vocabulary(directory: Path, vocabulary_sha256: str) -> None:
    """Raise CheckpointError where a checkpoint's vocabulary is not the one of this digest."""
    if read_manifest(directory).vocabulary_sha256 != vocabulary_sha256:
        problem, remedy = "was trained with another vocabulary", "use the data it was made from"
        raise CheckpointError(str(directory), problem, remedy)

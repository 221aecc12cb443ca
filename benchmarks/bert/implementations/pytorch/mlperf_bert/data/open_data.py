"""Both prepared sets of a run, held against the config and each other before anything is built.

Only vocabularies, manifests, sidecars and index are read. Every rank checks what it will use; what
else can be found without a sample, the first rank of each node looks for.
"""

from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.set_checks import (
    check_index_file,
    check_index_ranges,
    check_sidecar_digest,
    check_stage,
    check_vocabulary_digest,
    repeated_texts,
    shared_texts,
    wrong_settings,
)
from mlperf_bert.data.shards import SampleReader

LOWEST_TARGET_OVER_GUESS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Both prepared sets, checked against the config and each other; no sample read."""

    train: LengthIndex
    train_reader: SampleReader
    held_out: LengthIndex
    held_out_reader: SampleReader
    target_in_words: str


def open_data(config: RunConfig, data_dir: Path, rank: int) -> RunData:
    """Open `data_dir`/train and /eval. Raises ConfigError or DataError for what contradicts."""
    train = open_index(data_dir / "train", config)
    check_stage(data_dir / "train", config, rank)
    held_out = open_index(data_dir / "eval", config)
    _check_same_vocabulary(train, held_out, data_dir)
    check_batch_fits(config, train, data_dir)
    data = RunData(
        train=train,
        train_reader=SampleReader(data_dir / "train", train.manifest),
        held_out=held_out,
        held_out_reader=SampleReader(data_dir / "eval", held_out.manifest),
        target_in_words=_check_target(config, held_out),
    )
    if rank % config.parallel.ranks_per_node == 0:
        _check_for_node(data)
    return data


def _check_for_node(data: RunData) -> None:
    """Whether every file but the shards is the one that was prepared, and each text there once."""
    for index, reader in ((data.train, data.train_reader), (data.held_out, data.held_out_reader)):
        set_dir, manifest = reader.set_dir, index.manifest
        check_vocabulary_digest(set_dir, manifest)
        for entry in manifest.shards:
            check_sidecar_digest(set_dir, entry)
        sidecars = reader.sidecars()
        for problem in wrong_settings(set_dir, manifest, sidecars):
            raise problem
        for problem in repeated_texts(set_dir, sidecars):
            raise problem
        for file in manifest.index_files:
            check_index_file(set_dir, file)
        check_index_ranges(set_dir, index)
    held_out = data.held_out_reader
    for problem in shared_texts(
        held_out.set_dir, data.train_reader.sidecars(), held_out.sidecars()
    ):
        raise problem


def open_index(set_dir: Path, config: RunConfig) -> LengthIndex:
    """Open a prepared set and hold it against the config."""
    index = LengthIndex.open(set_dir)
    manifest = index.manifest
    if manifest.vocab_size != config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, the data in {set_dir} has {manifest.vocab_size}",
            "set it to the data's, or give other data",
        )
    if manifest.segments == "single" and config.model.objective == "mlm_nsp":
        raise ConfigError(
            "model.objective",
            f"is 'mlm_nsp', the examples in {set_dir} are no sentence pairs",
            "set it to 'mlm', or prepare pairs",
        )
    limits = config.data.max_seq_length, config.data.max_predictions
    used_masks = manifest.max_predictions
    if used_masks > limits[1]:  # as it is where short sequences were prepared with the default
        used_masks = int(index.masked_counts.max())
    for field, limit, used in (
        ("data.max_seq_length", limits[0], manifest.max_seq_length),
        ("data.max_predictions", limits[1], used_masks),
    ):
        if used > limit:
            raise ConfigError(
                field, f"is {limit}, the data in {set_dir} needs {used}", "raise it to that"
            )
    return index


def _check_same_vocabulary(train: LengthIndex, held_out: LengthIndex, data_dir: Path) -> None:
    if train.manifest.vocabulary_sha256 != held_out.manifest.vocabulary_sha256:
        raise ConfigError(
            "--data",
            f"{data_dir}: train and eval were made with different vocabularies",
            "prepare both with the same one",
        )


def check_batch_fits(config: RunConfig, train: LengthIndex, data_dir: Path) -> None:
    """Raise ConfigError for a global batch of more samples than there are."""
    global_batch_size, num_samples = config.parallel.global_batch_size, train.manifest.num_samples
    if global_batch_size > num_samples:
        raise ConfigError(
            "parallel.local_batch_size",
            f"makes a global batch of {global_batch_size:,}, {data_dir} has {num_samples:,} "
            "training samples",
            "lower it, parallel.grad_accum_steps or the ranks, or prepare more data",
        )


def _check_target(config: RunConfig, held_out: LengthIndex) -> str:
    """Hold the target against the best guess that ignores context; return both in words."""
    baseline = held_out.manifest.baseline
    target = config.eval.target_accuracy
    if baseline is None:
        return f"target accuracy {target:.4f}"
    guess = baseline.context_free_accuracy
    lowest = LOWEST_TARGET_OVER_GUESS * guess
    if config.mlperf.enforce_rules and target < lowest:
        raise ConfigError(
            "eval.target_accuracy",
            f"{target} is {target / guess:.2f} x the best context-free guess {guess:.4f}",
            f"set it to at least {lowest:.4f}, {LOWEST_TARGET_OVER_GUESS} x the guess",
        )
    return (
        f"target accuracy {target:.4f} is {target / guess:.2f} x the best context-free guess "
        f"{guess:.4f} ({baseline.masked_tokens:,} held-out masked tokens); most frequent "
        f"token on [MASK] inputs {baseline.mask_only_accuracy:.4f}"
    )

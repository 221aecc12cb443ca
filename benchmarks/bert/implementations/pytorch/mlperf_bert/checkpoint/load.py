"""Takes over a checkpoint: the weights alone, or everything that a run goes on from."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import (
    ELSE,
    FP8,
    MODEL,
    RANK_STATES,
    STATE,
    Manifest,
    read_config,
    read_manifest,
    resolve,
    verify_files,
)
from mlperf_bert.checkpoint.snapshot import read_shards, set_rank_states
from mlperf_bert.checkpoint.state import CheckpointState, read_state, verify
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_every_rank, on_rank_zero
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer

NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")
ITS_CONFIG = "use the config it was made with"
# What decides the model's function and shows in no shape.
_WITHOUT_A_SHAPE = ("num_heads", "layer_norm_epsilon")


def load_checkpoint(
    optimizer: FlatOptimizer,
    directory: Path,
    vocabulary_sha256: str,
    info: RankInfo,
    *,
    is_verified: bool = False,
) -> CheckpointState:
    """Fill an optimizer and its model from a checkpoint of any number of ranks.

    Every rank must call it at the same time; rank 0 reads the digests, unless it has before.
    Raises CheckpointError as `load_weights`, on every rank.
    """

    def check() -> None:
        found = resolve(directory)
        if not is_verified:
            verify(found)
        _check_vocabulary(found, vocabulary_sha256)

    def read() -> tuple[dict[str, Tensor], CheckpointState]:
        found = resolve(directory)
        tensors = _read_tensors(found / MODEL)
        _check_names_and_shapes(found, tensors, optimizer.shapes)
        names = [name for name in read_manifest(found).files if name.startswith("optimizer/")]
        read_shards(optimizer, [found / name for name in names])
        return tensors, read_state(found)

    on_rank_zero(info, check)
    tensors, state = on_every_rank(info, read)
    optimizer.set_weights(tensors)
    return state


def restore_rank_states(
    directory: Path,
    state: CheckpointState,
    model: BertForPretraining,
    info: RankInfo,
    device: torch.device,
) -> None:
    """Go on from this rank's random streams and FP8 units.

    Where the ranks were others there are no streams to go on from, and the units are rank 0's. The
    file's digest was verified by `load_checkpoint`. Raises CheckpointError on every rank.
    """

    def restore() -> None:
        path = resolve(directory) / RANK_STATES
        states, rank = _read_tensors(path), info.rank
        if state.world_size != info.world_size:
            states = {name: each for name, each in states.items() if name not in ("cpu", "cuda")}
            rank = 0
        try:
            set_rank_states(states, model.fp8_state(), rank, device)
        except (IndexError, RuntimeError, TypeError) as error:
            raise CheckpointError(str(path), f"does not fit ({error})", ELSE) from None

    on_every_rank(info, restore)


def load_weights(
    model: BertForPretraining, directory: Path, vocabulary_sha256: str
) -> CheckpointState:
    """Fill `model` with the weights of a checkpoint directory, or of one that holds `LATEST`.

    FP8 scales too, where it has them and the checkpoint does. A model without next-sentence
    prediction leaves out what a checkpoint has for it.

    Raises CheckpointError where files are missing or damaged, or made for another model or
    vocabulary, and ConfigError where the model has other settings that no shape shows.
    """
    directory = resolve(directory)
    manifest = read_manifest(directory)
    verify_files(directory, manifest, (MODEL, STATE))
    _check_vocabulary(directory, vocabulary_sha256)
    tensors = _read_tensors(directory / MODEL)
    if model.config.objective == "mlm":
        tensors = {
            name: each for name, each in tensors.items() if not name.startswith(NEXT_SENTENCE)
        }
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _check_names_and_shapes(directory, tensors, shapes)
    _check_settings(directory, model)
    model.load_state_dict(tensors)
    if FP8 in manifest.files:
        verify_files(directory, manifest, (FP8,))
    _read_scales(model, directory, manifest)
    return read_state(directory)


def _read_scales(model: BertForPretraining, directory: Path, manifest: Manifest) -> None:
    scales = model.fp8_state()
    if not scales or FP8 not in manifest.files:
        return
    found = _read_tensors(directory / FP8)
    wanted = {name: tuple(tensor.shape) for name, tensor in scales.items()}
    _check_names_and_shapes(directory, found, wanted)
    for name, tensor in found.items():
        scales[name].copy_(tensor)


def _check_vocabulary(directory: Path, vocabulary_sha256: str) -> None:
    if read_state(directory).vocabulary_sha256 != vocabulary_sha256:
        problem, remedy = "was trained with another vocabulary", "use the data it was made from"
        raise CheckpointError(str(directory), problem, remedy)


def _check_settings(directory: Path, model: BertForPretraining) -> None:
    stated = read_config(directory).model
    for name in _WITHOUT_A_SHAPE:
        ours, theirs = getattr(model.config, name), getattr(stated, name)
        if ours != theirs:
            problem = f"is {ours}, the weights in {directory} were trained with {theirs}"
            raise ConfigError(f"model.{name}", problem, "set it to the checkpoint's")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # `bench` imports this file and reads no weights
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"unreadable ({error})", ELSE) from None


def _check_names_and_shapes(
    directory: Path, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        side = "missing" if name in wanted else "not part of the model"
        raise CheckpointError(str(directory), f"{name} is {side}", ITS_CONFIG)
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            problem = f"{name} is {list(found[name].shape)}, the model's is {list(shape)}"
            raise CheckpointError(str(directory), problem, ITS_CONFIG)

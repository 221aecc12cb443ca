"""Load the weights of a checkpoint, or the whole state from which a run resumes.

`writer.py` describes the format of the files.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.checkpoint.first_weights import check_model, check_vocabulary
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    FP8,
    FP8_UNIT,
    MODEL,
    RANK_STATES,
    SHARDS,
    STATE,
    CheckpointState,
    read_manifest,
    read_state,
    resolve,
    verify,
    verify_files,
)
from mlperf_bert.checkpoint.tensors import NEXT_SENTENCE, read_tensors
from mlperf_bert.distributed.bucket_plan import Segment
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_every_rank, on_rank_zero
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer

ITS_CONFIG = "use the config that it was trained with"
# Errors that occur when a file is damaged or has another format.
_UNREADABLE = (OSError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)


def load_checkpoint(
    optimizer: FlatOptimizer,
    directory: Path,
    vocabulary_sha256: str,
    info: RankInfo,
    *,
    is_verified: bool = False,
) -> CheckpointState:
    """Load a checkpoint into an optimizer and its model, and return the checkpoint's state.

    The run that wrote the checkpoint may have had a different number of ranks. Rank 0 checks the
    digests of the files, unless `is_verified` is True.

    All ranks must call this function. Raises CheckpointError on every rank if files are
    missing, damaged, or made for another model or vocabulary.
    """

    def check() -> None:
        found = resolve(directory)
        if not is_verified:
            verify(found)
        check_vocabulary(found, vocabulary_sha256)

    def read() -> tuple[dict[str, Tensor], CheckpointState]:
        found = resolve(directory)
        tensors = read_tensors(found / MODEL)
        _check_names_and_shapes(found, tensors, optimizer.shapes)
        names = [name for name in read_manifest(found).files if name.startswith(SHARDS)]
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
    *,
    streams: bool = True,
) -> None:
    """Restore this rank's FP8 scales and, if `streams` is True, its random number generators.

    If the number of ranks has changed, no generator is restored, and every rank gets the FP8 scales
    of rank 0. The caller must have verified the digest of the file, as `load_checkpoint` does.

    Raises CheckpointError on every rank if the states do not fit this run.
    """

    def restore() -> None:
        path = resolve(directory) / RANK_STATES
        states, rank = read_tensors(path), info.rank
        if state.world_size != info.world_size:
            rank = 0
        if not streams or state.world_size != info.world_size:
            states = {name: each for name, each in states.items() if name not in ("cpu", "cuda")}
        try:
            set_rank_states(states, model.fp8_state(), rank, device)
        except (IndexError, RuntimeError, TypeError) as error:
            problem = f"does not fit this run ({error})"
            raise CheckpointError(str(path), problem, ELSE) from None

    on_every_rank(info, restore)


def load_phase(
    optimizer: FlatOptimizer,
    model: BertForPretraining,
    directory: Path,
    vocabulary_sha256: str,
    info: RankInfo,
    device: torch.device,
) -> str:
    """Load an earlier run's training state to start a new phase, and return one line for the log.

    Weights, optimizer moments, FP8 scales and the number of updates continue from the checkpoint.
    The step and sample counters, the schedule, the data order and the random number generators
    start from the beginning.

    The number t of updates is kept together with the moments because bias correction divides a
    moment by 1 - beta^t, where t is the number of updates that contributed to the moment. If t
    started from zero again, the moments would be divided by 1 - beta. AdamW's first update would
    then be multiplied by sqrt(1 - beta_2) / (1 - beta_1), which is 0.32 with the default betas.

    The run that wrote the checkpoint may have had a different number of ranks. All ranks
    must call this function. Raises CheckpointError on every rank if the checkpoint is damaged
    or does not fit this run.
    """
    state = load_checkpoint(optimizer, directory, vocabulary_sha256, info)
    restore_rank_states(directory, state, model, info, device, streams=False)
    return f"started from the training state of {directory}, after {state.samples:,} samples"


def load_weights(
    model: BertForPretraining, directory: Path, vocabulary_sha256: str
) -> CheckpointState:
    """Load the weights of a checkpoint, or of the latest checkpoint in a directory, into `model`.

    The function also loads the FP8 scales if both the model and the checkpoint have them. If the
    model has no next-sentence head, the function ignores that head of the checkpoint. Returns the
    state of the checkpoint.

    Raises CheckpointError if files are missing, damaged, or made for another model or vocabulary.
    Raises ConfigError if another model setting differs, even if all tensor shapes match.
    """
    directory = resolve(directory)
    manifest = read_manifest(directory)
    verify_files(directory, manifest, (MODEL, STATE))
    check_vocabulary(directory, vocabulary_sha256)
    tensors = read_tensors(directory / MODEL)
    if model.config.objective == "mlm":
        tensors = {
            name: each for name, each in tensors.items() if not name.startswith(NEXT_SENTENCE)
        }
    _check_names_and_shapes(directory, tensors, _shapes(model.state_dict()))
    check_model(directory, model.config)
    model.load_state_dict(tensors)
    scales = model.fp8_state()
    if FP8 in manifest.files:
        verify_files(directory, manifest, (FP8,))
        if scales:
            found = read_tensors(directory / FP8)
            _check_names_and_shapes(directory, found, _shapes(scales))
            for name, tensor in found.items():
                scales[name].copy_(tensor)
    return read_state(directory)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_names_and_shapes(
    directory: Path, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        problem = f"has no {name}" if name in wanted else f"has {name}, but the model does not"
        raise CheckpointError(str(directory), problem, ITS_CONFIG)
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            theirs = list(found[name].shape)
            problem = f"{name} has the shape {theirs}, but the model needs {list(shape)}"
            raise CheckpointError(str(directory), problem, ITS_CONFIG)


def read_shards(optimizer: FlatOptimizer, paths: Sequence[Path]) -> None:
    """Load this rank's shard of the optimizer state from the shard files of a checkpoint.

    The checkpoint may have a different number of shards than this run. Raises CheckpointError if a
    file is damaged, or if elements of this rank's shard are in none of the files.
    """
    from safetensors import SafetensorError, safe_open  # here, because `bench` does not need it

    wanted = {segment.tensor.name: segment for segment in optimizer.segments()}
    missing = {name: segment.last - segment.first for name, segment in wanted.items()}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                ranges = json.loads(file.metadata()["ranges"])
                for name in ranges.keys() & wanted.keys():
                    missing[name] -= _copy_part(file, optimizer, wanted[name], *ranges[name])
                for name, scalar in optimizer.scalar_state().items():
                    scalar.copy_(file.get_tensor(name))
        except (SafetensorError, *_UNREADABLE) as error:
            raise CheckpointError(str(path), f"cannot be read ({error})", ELSE) from None
    for name, elements in missing.items():
        if elements:
            where = str(paths[0].parent) if paths else "optimizer"
            problem = f"{elements:,} elements of {name} are missing"
            raise CheckpointError(where, problem, ITS_CONFIG)


def _copy_part(file: Any, optimizer: FlatOptimizer, wanted: Segment, first: int, last: int) -> int:
    """Copy the elements of the segment `wanted` that a file contains, and return their number.

    The file contains the elements [first, last) of the flattened parameter.
    """
    begin, end = max(first, wanted.first), min(last, wanted.last)
    if begin >= end:
        return 0
    for slot, flat in optimizer.flat_state().items():
        part = file.get_tensor(f"{wanted.tensor.name}.{slot}").view(-1)
        start = wanted.start + begin - wanted.first
        flat[start : start + end - begin].copy_(part[begin - first : end - first])
    return end - begin


def set_rank_states(
    states: Mapping[str, Tensor], fp8_state: Mapping[str, Tensor], rank: int, device: torch.device
) -> None:
    """Restore one rank's random number generators and FP8 scales from the states of all ranks.

    Each tensor of `states` has the shape [ranks, ...]. A generator or scale that is not in `states`
    keeps its value. Raises IndexError, RuntimeError or TypeError if the states do not fit this run.
    """
    # Cloned, because torch reads from the start of a tensor's storage even if it gets a view.
    if "cpu" in states:
        torch.set_rng_state(states["cpu"][rank].clone())
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"][rank].clone(), device)
    for name, tensor in fp8_state.items():
        if f"{FP8_UNIT}{name}" in states:
            tensor.copy_(states[f"{FP8_UNIT}{name}"][rank])

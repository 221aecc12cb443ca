"""Checkpoints: safetensors and JSON only, complete or absent, digests checked before use.

`step_00000120/{manifest.json, model.safetensors, optimizer/rank_00000.safetensors, state.json,
rng/rank_00000.safetensors, fp8.safetensors}` beside `LATEST`; the last only where products are FP8.
Parameter names are Hugging Face's.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlperf_bert.config import RunConfig
from mlperf_bert.config_io import config_from_tables, config_to_tables
from mlperf_bert.data.atomic import write_file
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_every_rank, on_rank_zero
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optimizer_state import read_shards, write_shard
from mlperf_bert.random_states import gather_random_states

FORMAT_VERSION = 1
FP8_FILE = "fp8.safetensors"
NO_FP8: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What a checkpoint says of its run, beside the tensors."""

    step: int
    samples: int
    seed: int
    mlm_accuracy: float | None
    vocabulary_sha256: str


def save_checkpoint(
    directory: Path,
    optimizer: FlatOptimizer,
    config: RunConfig,
    state: CheckpointState,
    info: RankInfo,
    device: torch.device,
    fp8_state: Mapping[str, Tensor] = NO_FP8,
) -> Path:
    """Write one checkpoint below `directory` and return its path. Called by every rank.

    Of the model's `fp8_state` rank 0's is kept; a step replaces it by what it finds.

    The first rank that holds a shard of the optimizer's state writes that, rank 0 all else, beside
    first, then it renames: `directory` must be one for all of them. Raises CheckpointError on every
    rank where that fails.
    """
    final = directory / f"step_{state.step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    random_states = gather_random_states(info.world_size, device)
    weights = optimizer.exact_weights(keep=info.rank == 0)

    def write_shard_file() -> None:
        if info.rank < optimizer.num_shards:
            write_shard(optimizer, partial / "optimizer" / f"rank_{info.rank:05d}.safetensors")

    on_rank_zero(info, _writing(final, lambda: _make_folders(partial)))
    on_every_rank(info, _writing(final, write_shard_file))
    on_rank_zero(
        info,
        _writing(
            final,
            lambda: _write(final, partial, weights, fp8_state, config, state, random_states),
        ),
    )
    return final


def _writing(final: Path, action: Callable[[], None]) -> Callable[[], None]:
    """`action`, with what can go wrong on a disk told as a CheckpointError."""

    def write() -> None:
        try:
            action()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                str(final), f"cannot be written ({error})", "check the disk's free space"
            ) from None

    return write


def _make_folders(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    for folder in ("optimizer", "rng"):
        (partial / folder).mkdir(parents=True)


def _write(
    final: Path,
    partial: Path,
    weights: dict[str, Tensor],
    fp8_state: Mapping[str, Tensor],
    config: RunConfig,
    state: CheckpointState,
    random_states: list[dict[str, Tensor]],
) -> None:
    save_file(weights, partial / "model.safetensors")
    if fp8_state:
        save_file({name: each.cpu() for name, each in fp8_state.items()}, partial / FP8_FILE)
    for rank, random_state in enumerate(random_states):
        save_file(random_state, partial / "rng" / f"rank_{rank:05d}.safetensors")
    _write_json(partial / "state.json", {"world_size": len(random_states), **asdict(state)})
    _write_json(partial / "manifest.json", _manifest(partial, config, state))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    write_file(final.with_name("LATEST"), f"{final.name}\n".encode())


def load_checkpoint(
    optimizer: FlatOptimizer, directory: Path, vocabulary_sha256: str, info: RankInfo
) -> CheckpointState:
    """Fill an optimizer and its model from a checkpoint of any number of ranks.

    Every rank must call it at the same time. Raises CheckpointError as `load_weights`, on every
    rank.
    """

    def read() -> tuple[dict[str, Tensor], CheckpointState]:
        found = _resolve(directory)
        tensors, state = _read(found, vocabulary_sha256)
        _check_names_and_shapes(found, tensors, optimizer.shapes)
        manifest = _read_json(found / "manifest.json")
        names = [name for name in manifest["files"] if name.startswith("optimizer/")]
        _verify_files(found, manifest, names)
        read_shards(optimizer, [found / name for name in names])
        return tensors, state

    tensors, state = on_every_rank(info, read)
    optimizer.set_weights(tensors)
    return state


def load_weights(
    model: BertForPretraining, directory: Path, vocabulary_sha256: str
) -> CheckpointState:
    """Fill `model` with the weights of a checkpoint directory, or of one that holds `LATEST`.

    FP8 scales too, where it has them and the checkpoint does.

    Raises CheckpointError where files are missing or damaged, or made for another model or
    vocabulary.
    """
    directory = _resolve(directory)
    tensors, state = _read(directory, vocabulary_sha256)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _check_names_and_shapes(directory, tensors, shapes)
    model.load_state_dict(tensors)
    scales = model.fp8_state()
    if scales and (directory / FP8_FILE).is_file():
        _verify_files(directory, _read_json(directory / "manifest.json"), (FP8_FILE,))
        for name, tensor in load_file(directory / FP8_FILE).items():
            scales[name].copy_(tensor)
    return state


def _read(directory: Path, vocabulary_sha256: str) -> tuple[dict[str, Tensor], CheckpointState]:
    """Weights and state, their files' digests verified, as those of the optimizer's state are."""
    manifest = _read_json(directory / "manifest.json")
    _verify_files(directory, manifest, ("model.safetensors", "state.json"))
    state = _parse_state(directory)
    if state.vocabulary_sha256 != vocabulary_sha256:
        raise CheckpointError(
            str(directory), "was trained with another vocabulary", "use the data it was made from"
        )
    try:
        return load_file(directory / "model.safetensors"), state
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(directory), f"unreadable ({error})", "use another") from None


def read_config(directory: Path) -> RunConfig:
    """The config that a checkpoint was made with."""
    manifest = _read_json(_resolve(directory) / "manifest.json")
    tables = manifest.get("config")
    if not isinstance(tables, dict):
        raise CheckpointError(str(directory), "has no config", "use another checkpoint")
    return config_from_tables(tables, str(directory))


def _manifest(folder: Path, config: RunConfig, state: CheckpointState) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "version": FORMAT_VERSION,
        "step": state.step,
        "samples": state.samples,
        "vocabulary_sha256": state.vocabulary_sha256,
        "config": config_to_tables(config),
        "files": {
            path.relative_to(folder).as_posix(): {
                "size": path.stat().st_size,
                "sha256": _sha256(path),
            }
            for path in files
        },
    }


def _resolve(directory: Path) -> Path:
    if (directory / "manifest.json").is_file():
        return directory
    try:
        name = (directory / "LATEST").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(
            str(directory), "holds no manifest.json and no LATEST", "give a checkpoint directory"
        ) from None
    if name != Path(name).name or not (directory / name / "manifest.json").is_file():
        raise CheckpointError(
            str(directory / "LATEST"), f"names {name!r}, not a checkpoint", "give one of its steps"
        )
    return directory / name


def _verify_files(directory: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    files = manifest.get("files")
    if manifest.get("version") != FORMAT_VERSION or not isinstance(files, dict):
        raise CheckpointError(
            str(directory / "manifest.json"), "is not of this format", "use another checkpoint"
        )
    for name in names:
        entry = files.get(name)
        path = directory / name
        if not (isinstance(entry, dict) and path.is_file()):
            raise CheckpointError(str(path), "is missing", "use another checkpoint")
        if path.stat().st_size != entry.get("size") or _sha256(path) != entry.get("sha256"):
            raise CheckpointError(str(path), "differs from its digest", "use another checkpoint")


def _parse_state(directory: Path) -> CheckpointState:
    values = _read_json(directory / "state.json")
    try:
        return CheckpointState(
            step=int(values["step"]),
            samples=int(values["samples"]),
            seed=int(values["seed"]),
            mlm_accuracy=values["mlm_accuracy"],
            vocabulary_sha256=str(values["vocabulary_sha256"]),
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            str(directory / "state.json"), "is incomplete", "use another checkpoint"
        ) from None


def _check_names_and_shapes(
    directory: Path, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(found.keys() ^ wanted.keys()):
        side = "missing" if name in wanted else "not part of the model"
        raise CheckpointError(
            str(directory), f"{name} is {side}", "use the config it was made with"
        )
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(
                str(directory),
                f"{name} is {list(found[name].shape)}, the model's is {list(shape)}",
                "use the config it was made with",
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(str(path), "is not a JSON object", "use another checkpoint")
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

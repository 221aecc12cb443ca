"""A small checkpoint, and small weights in Hugging Face's form: read as by a run or `convert`."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from fuzz_mutations import mutate_bytes, mutate_json, mutate_tensors
from fuzz_world import Parser
from torch import Tensor

from checkpoint_cases import save_checkpoint
from mlperf_bert.checkpoint.huggingface import conversion
from mlperf_bert.checkpoint.huggingface.export import config_json
from mlperf_bert.checkpoint.huggingface.reader import CONFIG, INDEX, SINGLE, open_huggingface
from mlperf_bert.checkpoint.huggingface.tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    WORD_PIECES,
    tokenizer_files,
)
from mlperf_bert.checkpoint.load import load_checkpoint, restore_rank_states
from mlperf_bert.checkpoint.manifest import CheckpointState, read_config
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer_alone
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, parse_vocabulary
from support import TINY_CONFIG

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
STEP = "checkpoints/step_00000120"
VOCABULARY = "ab"
WORDS = (*SPECIAL_TOKENS, "one", "##two", "caf\u00e9")
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
}
MODEL = ModelSection(**SIZES)
MODERN = ModelSection(**SIZES, architecture="modern", objective="mlm", layer_norm_epsilon=1e-5)
SETTINGS = (*(f"model.{name}={size}" for name, size in SIZES.items()), "data.max_seq_length=8")


def make_checkpoint(directory: Path) -> None:
    config, optimizer, _ = _parts(directory)
    state = CheckpointState(
        step=120,
        samples=1920,
        seed=7,
        mlm_accuracy=0.25,
        vocabulary_sha256=VOCABULARY,
        best_mlm_accuracy=0.25,
        health={"best": 0.25},
    )
    save_checkpoint(directory / "checkpoints", optimizer, config, state, ONE_RANK, CPU)


def parse_checkpoint(directory: Path) -> object:
    """Everything that a resumed run takes over, and the config that `evaluate` reads."""
    _, optimizer, model = _parts(directory)
    saved = directory / "checkpoints"
    state = load_checkpoint(optimizer, saved, VOCABULARY, ONE_RANK)
    restore_rank_states(saved, state, model, ONE_RANK, CPU)
    return read_config(saved)


def repair_checkpoint(directory: Path, target: str) -> None:
    """Give the manifest size and digest of a file as it is now."""
    name = target.removeprefix(f"{STEP}/")
    path = directory / STEP / "manifest.json"
    manifest = json.loads(path.read_bytes()) if name not in ("manifest.json", target) else {}
    if name in manifest.get("files", ()):
        contents = (directory / target).read_bytes()
        digest = hashlib.sha256(contents).hexdigest()
        manifest["files"][name] = {"size": len(contents), "sha256": digest}
        path.write_text(json.dumps(manifest))


@cache
def _parts(directory: Path) -> tuple[RunConfig, FlatOptimizer, BertForPretraining]:
    path = directory / "tiny.toml"
    path.write_text(TINY_CONFIG)
    config = load_config(path, SETTINGS)
    model = BertForPretraining(config.model, CPU, seed=1)
    return config, make_optimizer_alone(config.optim, model), model


def make_huggingface(directory: Path, model: ModelSection = MODEL) -> None:
    _write_settings(directory, model)
    write_tensors(directory / SINGLE, _tensors(model), {"format": "pt"})


def make_huggingface_parts(directory: Path) -> None:
    _write_settings(directory)
    tensors = _tensors()
    places = {name: PARTS[number % 2] for number, name in enumerate(tensors)}
    for part in PARTS:
        own = {name: tensor for name, tensor in tensors.items() if places[name] == part}
        write_tensors(directory / part, own)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index), encoding="ascii")


def parse_huggingface(directory: Path) -> object:
    """As `convert` does, up to the last tensor; nothing is written."""
    found = conversion.plan_conversion(open_huggingface(directory), None, None, "draw")
    return [found.weight(name) for name in found.shapes]


@cache
def _tensors(model: ModelSection = MODEL) -> dict[str, Tensor]:
    return dict(BertForPretraining(model, torch.device("cpu"), seed=1).state_dict())


def _write_settings(directory: Path, model: ModelSection = MODEL) -> None:
    vocabulary = parse_vocabulary("\n".join(WORDS).encode(), "words")
    files = tokenizer_files(vocabulary, model)
    for name in (WORD_PIECES, TOKENIZER, TOKENIZER_CONFIG):
        (directory / name).write_bytes(files[name])
    (directory / CONFIG).write_bytes(config_json(model, "", len(WORDS), 0))


# Modules for the same sizes again and again would take three quarters of the time.
conversion.parameter_shapes = cache(conversion.parameter_shapes)

WEIGHTS_PARSERS: Mapping[str, Parser] = {
    "checkpoint": Parser(
        make=make_checkpoint,
        targets={
            "checkpoints/LATEST": mutate_bytes,
            f"{STEP}/manifest.json": mutate_json,
            f"{STEP}/state.json": mutate_json,
            f"{STEP}/model.safetensors": mutate_tensors,
            f"{STEP}/optimizer/rank_00000.safetensors": mutate_tensors,
            f"{STEP}/rank_states.safetensors": mutate_tensors,
        },
        parse=parse_checkpoint,
        repair=repair_checkpoint,
    ),
    "huggingface": Parser(
        make=make_huggingface,
        targets={
            CONFIG: mutate_json,
            TOKENIZER: mutate_json,
            TOKENIZER_CONFIG: mutate_json,
            SINGLE: mutate_tensors,
        },
        optional=(TOKENIZER_CONFIG, TOKENIZER),
        parse=parse_huggingface,
    ),
    "huggingface_modern": Parser(
        make=lambda directory: make_huggingface(directory, MODERN),
        targets={CONFIG: mutate_json, SINGLE: mutate_tensors},
        parse=parse_huggingface,
    ),
    "huggingface_parts": Parser(
        make=make_huggingface_parts,
        targets={INDEX: mutate_json, **dict.fromkeys(PARTS, mutate_tensors)},
        parse=parse_huggingface,
    ),
}

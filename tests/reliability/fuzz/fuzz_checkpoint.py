"""A small checkpoint as a world to fuzz: written by the real writer, taken over as by a run."""

import hashlib
import json
from functools import cache
from pathlib import Path
from random import Random

import torch
from fuzz_mutations import mutate_bytes, mutate_json

from mlperf_bert.checkpoint.load import load_checkpoint, restore_rank_states
from mlperf_bert.checkpoint.manifest import CheckpointState, read_config
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer_alone
from support import TINY_CONFIG

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
STEP = "checkpoints/step_00000120"
VOCABULARY = "ab"
SMALL = (
    "model.vocab_size=16",
    "model.hidden_size=8",
    "model.num_layers=1",
    "model.num_heads=1",
    "model.intermediate_size=8",
    "model.max_position_embeddings=8",
    "data.max_seq_length=8",
)


def mutate_tensors(rng: Random, contents: bytes) -> bytes:
    """Change the JSON header of a safetensors file, its length, or any bytes."""
    size = int.from_bytes(contents[:8], "little")
    header, rest = contents[8 : 8 + size], contents[8 + size :]
    if rng.random() < 0.3:
        return mutate_bytes(rng, contents)
    if rng.random() < 0.7:
        header = rng.choice((mutate_json, _mutate_ranges))(rng, header)
        size = len(header)
    else:
        size = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + header + rest


def _mutate_ranges(rng: Random, header: bytes) -> bytes:
    """Change the JSON that is a string of the header's own metadata, where it has any."""
    values = json.loads(header)
    if "__metadata__" not in values:
        return mutate_json(rng, header)
    ranges = mutate_json(rng, values["__metadata__"]["ranges"].encode())
    values["__metadata__"]["ranges"] = ranges.decode("utf-8", "replace")
    return json.dumps(values).encode()


def make_checkpoint(directory: Path) -> None:
    """A checkpoint of a model of 800 weights, with the state of its optimizer."""
    config, optimizer, _ = _parts(directory)
    writer = CheckpointWriter(directory / "checkpoints", optimizer, config, ONE_RANK, CPU)
    state = CheckpointState(
        step=120,
        samples=1920,
        seed=7,
        mlm_accuracy=0.25,
        vocabulary_sha256=VOCABULARY,
        best_mlm_accuracy=0.25,
        health={"best": 0.25},
    )
    assert writer.begin(state)
    writer.finish()


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
    config = load_config(path, SMALL)
    model = BertForPretraining(config.model, CPU, seed=1)
    return config, make_optimizer_alone(config.optim, model), model

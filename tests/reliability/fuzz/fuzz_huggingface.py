"""A small BERT in Hugging Face's form as worlds to fuzz: one file, or two and their index."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

import torch
from fuzz_mutations import mutate_bytes, mutate_json
from fuzz_parser import Parser
from torch import Tensor

from bert_tools.convert import convert
from mlperf_bert.checkpoint.huggingface.export import config_json
from mlperf_bert.checkpoint.huggingface.reader import CONFIG, INDEX, SINGLE, open_huggingface
from mlperf_bert.checkpoint.huggingface.tokenizer import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    WORD_PIECES,
    tokenizer_files,
)
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, parse_vocabulary

WORDS = (*SPECIAL_TOKENS, "one", "##two", "caf\u00e9")
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MODEL = ModelSection(
    vocab_size=len(WORDS),
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    intermediate_size=8,
    max_position_embeddings=8,
)


def make_huggingface(directory: Path) -> None:
    """One file of weights, and the files of a tokenizer."""
    _write_settings(directory)
    write_tensors(directory / SINGLE, _tensors(), {"format": "pt"})


def make_huggingface_parts(directory: Path) -> None:
    """The weights in two files."""
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
    conversion = convert.plan_conversion(open_huggingface(directory), None, None, "draw")
    return [conversion.weight(name) for name in conversion.shapes]


def mutate_header(rng: Random, contents: bytes) -> bytes:
    """Change the JSON header of a safetensors file, its length, or any bytes."""
    size = int.from_bytes(contents[:8], "little")
    header, rest = contents[8 : 8 + size], contents[8 + size :]
    what = rng.random()
    if what < 0.2:
        return mutate_bytes(rng, contents)
    if what < 0.9:
        header = mutate_json(rng, header)
        size = len(header)
    else:
        size = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + header + rest


# Modules for the same sizes again and again would take three quarters of the time.
convert.parameter_shapes = cache(convert.parameter_shapes)

HUGGINGFACE_PARSERS: Mapping[str, Parser] = {
    "huggingface": Parser(
        make=make_huggingface,
        targets={
            CONFIG: mutate_json,
            TOKENIZER: mutate_json,
            TOKENIZER_CONFIG: mutate_json,
            SINGLE: mutate_header,
        },
        optional=(TOKENIZER_CONFIG, TOKENIZER),
        parse=parse_huggingface,
    ),
    "huggingface_parts": Parser(
        make=make_huggingface_parts,
        targets={INDEX: mutate_json, **dict.fromkeys(PARTS, mutate_header)},
        parse=parse_huggingface,
    ),
}


@cache
def _tensors() -> dict[str, Tensor]:
    return dict(BertForPretraining(MODEL, torch.device("cpu"), seed=1).state_dict())


def _write_settings(directory: Path) -> None:
    vocabulary = parse_vocabulary("\n".join(WORDS).encode(), "words")
    files = tokenizer_files(vocabulary, MODEL.max_position_embeddings)
    for name in (WORD_PIECES, TOKENIZER, TOKENIZER_CONFIG):
        (directory / name).write_bytes(files[name])
    (directory / CONFIG).write_bytes(config_json(MODEL, "BertForPreTraining", len(WORDS), 0))

"""Loads an encoder with transformers, and computes the mean-pooled vectors of texts.

Only local files and safetensors are read, so that a directory cannot run code.

Shape letters: N texts, B texts of a batch, T tokens, H hidden size.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import LATEST, MANIFEST, checkpoints_inside
from mlperf_bert.checkpoint.weights_directory import check_directory, is_hub_name
from mlperf_bert.errors import CheckpointError, one_line, typed
from mlperf_bert.files import is_there

Vectors = npt.NDArray[np.float32]
BATCH = 32  # texts that are embedded together
_CONFIG, _EXPORTED = "config.json", "exported"
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
_SAVED = "pass one written by save_pretrained(), with config.json and model.safetensors"


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model of transformers and its tokenizer. Longer texts are cut to `max_length` tokens."""

    path: Path
    name: str  # in tables
    model: Any
    tokenizer: Any
    max_length: int

    @property
    def hidden_size(self) -> int:
        """Return H, the size of the vectors."""
        return int(self.model.config.hidden_size)

    def facts(self) -> dict[str, Any]:
        """Return what a record says about the encoder."""
        weights = sum(each.numel() for each in self.model.parameters())
        path = str(self.path)
        return {"name": self.name, "path": path, "weights": weights, "max_length": self.max_length}

    def tokens(self, firsts: Sequence[str], seconds: Sequence[str] | None) -> Any:
        """Return the padded inputs of a batch. A pair of texts is one sequence."""
        pair = None if seconds is None else list(seconds)
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        found = self.tokenizer(list(firsts), pair, max_length=self.max_length, **options)
        return found.to(self.model.device)

    def embed(self, texts: Sequence[str], advance: Callable[[int], None]) -> Vectors:
        """Return the vectors of texts, float32 [N, H]. `advance` is told the size of each batch.

        Texts of similar length share a batch, so that there is little padding.
        """
        vectors = np.empty((len(texts), self.hidden_size), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        self.model.eval()
        advance(0)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            inputs = self.tokens([texts[row] for row in rows], None)
            with torch.inference_mode():
                vectors[rows] = pooled(self.model, inputs).cpu()
            advance(len(rows))
        if not np.isfinite(vectors).all():
            problem = "computes vectors that are not finite"
            raise CheckpointError(str(self.path), problem, "export the model again")
        return vectors


def pooled(model: Any, inputs: Any) -> Tensor:
    """Return the mean of the last layer's outputs over the tokens that are not padding, [B, H]."""
    hidden = model(**inputs).last_hidden_state  # [B, T, H]
    is_token = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean: Tensor = (hidden * is_token).sum(1) / is_token.sum(1)
    return mean


def check_model(path: Path) -> None:
    """Raise CheckpointError unless `path` looks like a directory that transformers loads.

    For a run or a checkpoint of this program, the error contains the command that exports it.
    """
    files = str(path).replace("@", " --revision ")
    published = f"{_SAVED}, or download the published model of this name with "
    published += f"`hf download {files} --local-dir DIR`, and pass DIR"
    check_directory(path, published if is_hub_name(path) else _SAVED)
    if is_there(path / _EXPORTED / _CONFIG):
        problem = "contains a run and its exported model"
        raise CheckpointError(str(path), problem, f"pass {path / _EXPORTED}")
    for folder in filter(None, (path, checkpoints_inside(path))):
        if is_there(folder / MANIFEST) or is_there(folder / LATEST):
            out = path.parent / f"{path.absolute().name}-exported"
            command = typed("export", folder, "--to", "huggingface", "--out", out)
            problem = "contains a checkpoint of this program, which transformers cannot load"
            remedy = f"export it first with `{command}`, and pass {out}"
            raise CheckpointError(str(path), problem, remedy)
    if not is_there(path / _CONFIG):
        raise CheckpointError(str(path), f"has no {_CONFIG}", _SAVED)
    if not any(is_there(path / name) for name in _TOKENIZERS):
        remedy = f"save the tokenizer there, for example as {_TOKENIZERS[0]}"
        raise CheckpointError(str(path), "has no tokenizer", remedy)


def load(path: Path, name: str, device: torch.device, max_length: int) -> Encoder:
    """Load the encoder in a directory. Raises CheckpointError if it cannot be used.

    `name` is what tables call the model. The model's own limit may make `max_length` smaller.
    """
    transformers = quiet_transformers()
    try:
        safe = {"local_files_only": True, "trust_remote_code": False}  # with None, it would ask
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **safe)
        model, report = transformers.AutoModel.from_pretrained(
            path, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **safe
        )
    except Exception as error:  # transformers raises errors of many classes for damaged files
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        problem = f"transformers cannot load it ({one_line(lines[0])[:300]})"
        raise CheckpointError(str(path), problem, _SAVED) from None
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    rows = getattr(model.config, "max_position_embeddings", None) or max_length
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)  # RoBERTa counts positions from the next row
    rows -= 0 if padding is None else padding + 1
    limits = [max_length, tokenizer.model_max_length, rows]
    problem = ""
    if missing:
        problem = f"lacks {len(missing)} weights of its architecture, such as {missing[0]}"
    elif model.config.is_encoder_decoder or not hasattr(model.config, "hidden_size"):
        problem = f"is a {type(model).__name__}, not an encoder"
    elif tokenizer.pad_token is None:
        problem = "has a tokenizer without a padding token"
    elif len(tokenizer) > model.get_input_embeddings().num_embeddings:
        problem = f"has a tokenizer of {len(tokenizer):,} tokens, more than the model's embedding"
    if problem:
        raise CheckpointError(str(path), problem, "pass the directory of an encoder such as BERT")
    return Encoder(path, name, model.to(device), tokenizer, min(limits))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each directory, which is its path if two have the same name."""
    short = [path.absolute().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def quiet_transformers() -> Any:
    """Import transformers as an untyped module, without its progress bars and warnings."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    return transformers

"""First and last weights of fine-tuning: read from a checkpoint, and written for `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bert_tools.huggingface.export import config_json
from bert_tools.huggingface.reader import CONFIG, SINGLE
from bert_tools.huggingface.tokenizer import tokenizer_files
from bert_tools.squad.model import draw_weights
from mlperf_bert import package_version
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    MODEL,
    STATE,
    read_config,
    read_manifest,
    resolve,
    verify_files,
)
from mlperf_bert.checkpoint.tensors import read_tensors, write_tensors
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import new_directory, write_file
from mlperf_bert.vocabulary.any_vocabulary import vocabulary_of
from mlperf_bert.vocabulary.word_pieces import Vocabulary

_SPARE_BYTES = 16 * 2**20  # limit on tokenizer files
_HEAD = "qa_outputs."  # weights for pre-training have all else


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run: the model, its weights (float32, on the host), and their origin.

    `origin` is the digest of a checkpoint's weights, or "random".
    """

    model: ModelSection
    weights: Mapping[str, Tensor]
    origin: str


def start_from(checkpoint: Path, vocabulary: Path | None, seed: int) -> tuple[Vocabulary, Start]:
    """The vocabulary and the body of a checkpoint of this program, with a new head.

    `vocabulary` None: the checkpoint's own. `seed` is for the head. Raises CheckpointError if the
    checkpoint is damaged, incomplete, or was trained with another vocabulary; ConfigError if its
    model is not BERT or its vocabulary no word pieces.
    """
    found = resolve(checkpoint)
    manifest = read_manifest(found)
    words = vocabulary_of(found, manifest.vocabulary_sha256, vocabulary)
    verify_files(found, manifest, (MODEL, STATE))
    trained = read_config(found).model
    if trained.architecture != "bert" or not isinstance(words, Vocabulary):
        problem = "is of another model than BERT, or of another vocabulary than word pieces"
        remedy = "export it, and fine-tune it with `transformers`"
        raise ConfigError("--init-checkpoint", problem, remedy)
    # Attention and kernels are chosen for this machine, not the checkpoint's.
    model = replace(trained, attention="auto", kernels="auto", precision="fp32")
    stored = read_tensors(found / MODEL)
    weights = draw_weights(model, seed)
    for name, drawn in weights.items():
        if name.startswith(_HEAD):
            continue
        if name not in stored or stored[name].shape != drawn.shape:
            problem = f"does not hold {name} of {list(drawn.shape)}"
            raise CheckpointError(str(found / MODEL), problem, ELSE)
        weights[name] = stored[name].float()
    return words, Start(model, weights, manifest.files[MODEL].sha256)


def save_for_transformers(
    out: Path, model: ModelSection, weights: Mapping[str, Tensor], vocabulary: Vocabulary
) -> None:
    """Write, in one step, a directory that `transformers` loads as a model for questions.

    `weights` are those of the whole model on the host, written as float32 beside the vocabulary's
    files. Raises CheckpointError if `out` exists or cannot be written.
    """
    tensors = {name: each.to(torch.float32).contiguous() for name, each in weights.items()}
    num_bytes = sum(each.nbytes for each in tensors.values())
    metadata = {"format": "pt", "source": f"mlperf_bert squad train, {package_version()}"}
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        write_tensors(folder / SINGLE, tensors, metadata)
        architecture, size = "BertForQuestionAnswering", model.padded_vocab_size
        contents = config_json(model, architecture, size, vocabulary.pad_id)
        write_file(folder / CONFIG, contents)
        for name, file in tokenizer_files(vocabulary, model).items():
            write_file(folder / name, file)

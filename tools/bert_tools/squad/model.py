"""BERT for question answering, as a whole model or divided into parts for a pipeline.

The model scores every token as the first and as the last token of an answer. Its initial weights
are random or read from a checkpoint. After training, the weights are written in the format of
`transformers`. A part is a range of consecutive layers. The first part also contains the
embeddings, and the last part contains the layer that computes the scores. A pipeline is a sequence
of parts, and the whole model is a single part.

Shape letters: T tokens, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from bert_tools.huggingface.export import config_json
from bert_tools.huggingface.reader import CONFIG, SINGLE
from bert_tools.huggingface.tokenizer import tokenizer_files, vocabulary_of
from bert_tools.squad.batches import SpanBatch, span_loss_sum
from bert_tools.squad.settings import SquadPrecision
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
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import new_directory, write_file
from mlperf_bert.model.attention import AttentionPolicy
from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.bert import initial_weights
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.choices import choose_attention, choose_blocks
from mlperf_bert.model.dropout_keys import DropoutKeys
from mlperf_bert.model.layers import (
    DROPOUT_STREAM,
    META,
    STREAMS_PER_LAYER,
    Embeddings,
    EncoderLayer,
)
from mlperf_bert.vocabulary.word_pieces import Vocabulary

Result = Literal["scores", "loss_sum"]
_SPARE_BYTES = 16 * 2**20  # upper bound for tokenizer files
_HEAD = "qa_outputs."  # the only weights that a pre-trained checkpoint does not have


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a model's `num_layers` layers, from `first` to `end` (exclusive)."""

    first: int
    end: int
    num_layers: int

    @property
    def has_embeddings(self) -> bool:
        """Return whether the part has the embeddings, so that its inputs are tokens."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """Return whether the part has the last layer, so that its outputs are scores."""
        return self.end == self.num_layers


def whole(config: ModelSection) -> Part:
    """Return the part that contains all layers of a model."""
    return Part(0, config.num_layers, config.num_layers)


class BertPart(nn.Module):
    """Consecutive layers of BERT, preceded by the embeddings if it is the first part."""

    def __init__(
        self, config: ModelSection, part: Part, attend: AttentionPolicy, blocks: Blocks
    ) -> None:
        super().__init__()
        if part.has_embeddings:
            self.embeddings = Embeddings(config, blocks)
        layers = nn.ModuleDict()
        for number in range(part.first, part.end):
            stream = DROPOUT_STREAM + 1 + STREAMS_PER_LAYER * number
            layers[str(number)] = EncoderLayer(config, attend, blocks, stream)
        self.encoder = nn.Module()
        self.encoder.layer = layers

    def forward(
        self, hidden: Tensor | None, tokens: UnpaddedBatch, keys: DropoutKeys | None
    ) -> Tensor:
        """Compute the hidden states [T, D] of this part's last layer.

        `hidden` [T, D] is the output of the previous part, or None for the first part.
        """
        layout = AttentionLayout(tokens.lengths, tokens.cu_seqlens, tokens.max_seqlen)
        found: Tensor = self.embeddings(tokens, keys) if hidden is None else hidden
        for layer in self.get_submodule("encoder.layer").children():
            found = layer(found, layout, keys)
        return found


class SpanModel(nn.Module):
    """A part of BERT for question answering (arXiv 1810.04805, section 4.2).

    The keys of state_dict() are those of the part's tensors in `transformers`'
    BertForQuestionAnswering. As in pre-training, dropout depends on seed, update, window and
    position, so on a CPU the result does not depend on how the ranks divide the work.

    The weights are on the "meta" device until `make_part` fills them in on `device`. The config's
    precision is ignored. Instead, `precision` "bf16" computes matrix products under autocast, and
    "fp64" computes everything in float64. Raises ConfigError for attention or kernels that cannot
    run on the device.
    """

    def __init__(
        self,
        config: ModelSection,
        part: Part,
        device: torch.device,
        precision: SquadPrecision,
        dropout_seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.part = part
        self.device = device
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self._autocast = precision == "bf16"
        computed_in = torch.bfloat16 if self._autocast else self.dtype
        attend = choose_attention(config, device, computed_in).policy
        self.bert = BertPart(config, part, attend, choose_blocks(config, device))
        if part.has_head:
            self.qa_outputs = nn.Linear(config.hidden_size, 2, device=META)
        self.dropout_seed = dropout_seed
        # The number of the current update, which is not part of the model's state.
        self.update = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def layers(self) -> list[nn.Module]:
        """Return the encoder layers of the part, in order."""
        return list(self.bert.get_submodule("encoder.layer").children())

    def forward(self, hidden: Tensor | None, batch: SpanBatch, result: Result) -> Tensor:
        """Compute this part's hidden states [T, D] or, in the last part, the scores or the loss.

        `hidden` [T, D] is the output of the previous part, or None for the first part. `result`
        chooses what the last part returns: the scores [T, 2], or the loss of `span_loss_sum`, a
        scalar.
        """
        keys = self._dropout_keys(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            found: Tensor = self.bert(hidden, batch.tokens, keys)
            if not self.part.has_head:
                return found
            scores: Tensor = self.qa_outputs(found)
        return scores if result == "scores" else span_loss_sum(scores, batch)

    def _dropout_keys(self, batch: SpanBatch) -> DropoutKeys | None:
        """Return the values that determine the dropout masks, or None in evaluation mode."""
        if not self.training:
            return None
        window = batch.per_token(batch.tokens.sample_ids)
        return DropoutKeys(self.dropout_seed, self.update, window, batch.tokens.position_ids)


def parameter_shapes(config: ModelSection) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the whole model, by name and in order."""
    model = SpanModel(config, whole(config), META, "fp32")
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def draw_weights(config: ModelSection, seed: int) -> dict[str, Tensor]:
    """Randomly initialize the whole model, and return its weights by name, float32 on the host.

    The distributions are those of `BertForPretraining`. The weights depend only on the config and
    the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: initial_weights(name, torch.Size(shape), config, generator)
        for name, shape in parameter_shapes(config).items()
    }


@torch.no_grad()
def make_part(
    config: ModelSection,
    part: Part,
    weights: Mapping[str, Tensor],
    device: torch.device,
    precision: SquadPrecision = "fp32",
    dropout_seed: int = 0,
) -> SpanModel:
    """Create a part of the model, ready to train.

    `weights` are those of the whole model, from which the part copies its own.
    """
    model = SpanModel(config, part, device, precision, dropout_seed)
    model.to_empty(device=device)
    model.to(model.dtype)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model.train()


def even_split(num_layers: int, parts: int) -> list[int]:
    """Divide layers evenly into parts. Returns each part's first layer, followed by `num_layers`.

    The sizes of parts differ by at most one layer. Later parts are larger, because the first part
    also has the embeddings. Raises ConfigError if there are more parts than layers.
    """
    if parts > num_layers:
        problem = f"has {parts} stages, but the model has only {num_layers} layers"
        raise ConfigError("--engine", problem, "use a pipeline of fewer ranks, or more layers")
    return [number * num_layers // parts for number in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class Start:
    """The initial state of a run: the model's settings, its weights, and their origin.

    The weights are float32 and on the host. `origin` is the digest of the checkpoint's weights, or
    "random".
    """

    model: ModelSection
    weights: Mapping[str, Tensor]
    origin: str


def start_from(checkpoint: Path, vocabulary: Path | None, seed: int) -> tuple[Vocabulary, Start]:
    """Read the vocabulary and the weights of one of our checkpoints, and add a random head.

    Args:
        checkpoint: the directory of the checkpoint.
        vocabulary: a vocabulary file, or None to use the checkpoint's own.
        seed: the seed of the head's random weights.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, or was trained with another
            vocabulary.
        ConfigError: the model is not BERT, or its vocabulary does not consist of word pieces.
    """
    found = resolve(checkpoint)
    manifest = read_manifest(found)
    words = vocabulary_of(found, manifest.vocabulary_sha256, vocabulary)
    verify_files(found, manifest, (MODEL, STATE))
    trained = read_config(found).model
    if trained.architecture != "bert" or not isinstance(words, Vocabulary):
        problem = "is not a BERT model with a vocabulary of word pieces (vocab.txt)"
        remedy = "export it with mlperf_bert export, and fine-tune it with transformers"
        raise ConfigError("--init-checkpoint", problem, remedy)
    # Choose attention and kernels for this machine instead of the one that trained the weights.
    model = replace(trained, attention="auto", kernels="auto", precision="fp32")
    stored = read_tensors(found / MODEL)
    weights = draw_weights(model, seed)
    for name, drawn in weights.items():
        if name.startswith(_HEAD):
            continue
        if name not in stored or stored[name].shape != drawn.shape:
            problem = f"does not contain {name} with shape {list(drawn.shape)}"
            raise CheckpointError(str(found / MODEL), problem, ELSE)
        weights[name] = stored[name].float()
    return words, Start(model, weights, manifest.files[MODEL].sha256)


def save_for_transformers(
    out: Path, model: ModelSection, weights: Mapping[str, Tensor], vocabulary: Vocabulary
) -> None:
    """Write a directory that `transformers` loads as a question answering model.

    The directory appears atomically, when it is complete. `weights` are those of the whole model,
    on the host. They are written as float32, next to the files of the vocabulary. Raises
    CheckpointError if `out` exists or cannot be written.
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

"""BERT that scores every token as the first and last of an answer, whole or in parts.

Its first weights are drawn or read from a checkpoint, and its last are written for `transformers`.
A part is some consecutive layers; the first part also has the embeddings, the last the scores. A
pipeline is a row of parts, and a single part is the whole model.

Shape letters: T tokens, D hidden.
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
_SPARE_BYTES = 16 * 2**20  # limit on tokenizer files
_HEAD = "qa_outputs."  # weights for pre-training have all else


@dataclass(frozen=True, slots=True)
class Part:
    """Layers `first` up to but not with `end`, of `num_layers`."""

    first: int
    end: int
    num_layers: int

    @property
    def has_embeddings(self) -> bool:
        """True if it takes tokens, not hidden states."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """True if it gives scores, not hidden states."""
        return self.end == self.num_layers


def whole(config: ModelSection) -> Part:
    """The part that is a whole model."""
    return Part(0, config.num_layers, config.num_layers)


class BertPart(nn.Module):
    """Layers of BERT, the first part's with the embeddings."""

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
        """Hidden states [T, D], or None at the start -> hidden states [T, D]."""
        layout = AttentionLayout(tokens.lengths, tokens.cu_seqlens, tokens.max_seqlen)
        found: Tensor = self.embeddings(tokens, keys) if hidden is None else hidden
        for layer in self.get_submodule("encoder.layer").children():
            found = layer(found, layout, keys)
        return found


class SpanModel(nn.Module):
    """A part of BERT for questions on a text (arXiv 1810.04805, section 4.2), without weights.

    state_dict() keys are those of the part's tensors in `transformers`' BertForQuestionAnswering.
    Dropout is keyed by (seed, update, window, position), as in pre-training, so that on a CPU the
    result does not depend on the ranks' shares.

    It will live on `device`; the weights are on "meta" until `make_part` fills them. The config's
    precision is ignored: "bf16" computes products under autocast, "fp64" in float64. Raises
    ConfigError for attention or kernels that cannot run on the device.
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
        # Belongs to the present update; no part of the model's state.
        self.update = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def layers(self) -> list[nn.Module]:
        """The part's layers, the first first."""
        return list(self.bert.get_submodule("encoder.layer").children())

    def forward(self, hidden: Tensor | None, batch: SpanBatch, result: Result) -> Tensor:
        """Scores [T, 2], or their loss as `span_loss_sum`, or hidden states [T, D] for a next part.

        `hidden`, [T, D], is the output of the previous part; None for the first. `result` chooses
        the output of the last part.
        """
        keys = self._dropout_keys(batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            found: Tensor = self.bert(hidden, batch.tokens, keys)
            if not self.part.has_head:
                return found
            scores: Tensor = self.qa_outputs(found)
        return scores if result == "scores" else span_loss_sum(scores, batch)

    def _dropout_keys(self, batch: SpanBatch) -> DropoutKeys | None:
        if not self.training:
            return None
        window = batch.per_token(batch.tokens.sample_ids)
        return DropoutKeys(self.dropout_seed, self.update, window, batch.tokens.position_ids)


def parameter_shapes(config: ModelSection) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the whole model's parameters, in order."""
    model = SpanModel(config, whole(config), META, "fp32")
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def draw_weights(config: ModelSection, seed: int) -> dict[str, Tensor]:
    """Random weights of the whole model, float32 on the host, for a run without a checkpoint.

    They are drawn as in `BertForPretraining`, and depend on shapes and seed only.
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
    """A part with its share of the whole model's weights, ready to train."""
    model = SpanModel(config, part, device, precision, dropout_seed)
    model.to_empty(device=device)
    model.to(model.dtype)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model.train()


def even_split(num_layers: int, parts: int) -> list[int]:
    """The first layer of each part, then the number of layers; parts differ by one at most.

    Later parts get more, as the first has the embeddings. Raises ConfigError for more parts than
    layers.
    """
    if parts > num_layers:
        problem = f"has {parts} stages, the model {num_layers} layers"
        raise ConfigError("--engine", problem, "use fewer stages, or a deeper model")
    return [number * num_layers // parts for number in range(parts + 1)]


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

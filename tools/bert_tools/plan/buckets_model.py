"""The model's parameters and its backward pass, from the config alone: no torch.

Shape letters: D hidden, F feed-forward width, V vocabulary (padded), S tokens of a sequence,
P its masked positions, R rows that the last layer computes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.bucket_plan import ReadyGradient

QkvLayout = Literal["separate", "fused"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of backward: parameters whose gradients it ends, in that order, and its work.

    The work is the forward's multiply-adds for one sequence. Backward takes twice as many of every
    matrix product (one for its input, one for its weight), so shares of one are shares of both.
    """

    shapes: Shapes
    multiply_adds: int = 0


def parameter_shapes(model: ModelSection, qkv: QkvLayout = "separate") -> Shapes:
    """Shape of every parameter of `BertForPretraining`, in the order their gradients are ready.

    That order is eager backward's, without autocast: uses last to first, a bias before its matrix
    and a LayerNorm's weight before its bias. The word embedding, tied to the decoder, is ready only
    when its use as a table, the very first, is through: last of all.

    `fused` puts the three projections of a layer into one, named `qkv`.
    """
    return {
        name: shape
        for part in _backward(model, qkv, num_tokens=1, num_masked=1)
        for name, shape in part.shapes.items()
    }


def backward_order(
    model: ModelSection, qkv: QkvLayout, num_tokens: int, num_masked: int
) -> list[ReadyGradient]:
    """All gradients as they become ready, and after which share of backward's multiply-adds.

    Counted are matrix products and attention, of sequences of `num_tokens` tokens (S) with
    `num_masked` masked positions (P). Not counted is what moves memory and multiplies little:
    embedding tables, LayerNorm, GELU, softmax, dropout. The gradients of one module are taken to
    be ready together, at its end.
    """
    parts = list(_backward(model, qkv, num_tokens, num_masked))
    done = list(accumulate(part.multiply_adds for part in parts))
    return [
        ReadyGradient(name=name, numel=math.prod(shape), ready_at=so_far / done[-1])
        for part, so_far in zip(parts, done, strict=True)
        for name, shape in part.shapes.items()
    ]


def _backward(
    model: ModelSection, qkv: QkvLayout, num_tokens: int, num_masked: int
) -> Iterator[_Part]:
    """Heads, layers from the last to the first, embeddings: model/bert.py read backwards."""
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    has_pairs = model.objective == "mlm_nsp"
    if has_pairs:
        yield _linear("cls.seq_relationship", hidden, 2, rows=1)
    bias: Shapes = {"cls.predictions.bias": (vocabulary,)}  # the matrix is not ready yet
    yield _Part(bias, num_masked * hidden * vocabulary)
    yield _layer_norm("cls.predictions.transform", hidden)
    yield _linear("cls.predictions.transform.dense", hidden, hidden, num_masked)
    if has_pairs:
        yield _linear("bert.pooler.dense", hidden, hidden, rows=1)
    last = model.num_layers - 1
    for number in reversed(range(model.num_layers)):
        # The last layer computes masked positions and first tokens only.
        rows = num_masked + has_pairs if number == last else num_tokens
        yield from _layer(f"bert.encoder.layer.{number}", model, qkv, num_tokens, rows)
    yield _layer_norm("bert.embeddings", hidden)
    yield _Part(
        {
            "bert.embeddings.position_embeddings.weight": (model.max_position_embeddings, hidden),
            "bert.embeddings.token_type_embeddings.weight": (model.type_vocab_size, hidden),
            "bert.embeddings.word_embeddings.weight": (vocabulary, hidden),
        }
    )


def _layer(
    name: str, model: ModelSection, qkv: QkvLayout, num_tokens: int, rows: int
) -> Iterator[_Part]:
    hidden, wide = model.hidden_size, model.intermediate_size
    yield _layer_norm(f"{name}.output", hidden)
    yield _linear(f"{name}.output.dense", wide, hidden, rows)
    yield _linear(f"{name}.intermediate.dense", hidden, wide, rows)
    yield _layer_norm(f"{name}.attention.output", hidden)
    yield _linear(f"{name}.attention.output.dense", hidden, hidden, rows)
    # Scores and context: each S products of D channels in a row.
    yield _Part({}, 2 * rows * num_tokens * hidden)
    if qkv == "fused":
        yield _linear(f"{name}.attention.self.qkv", hidden, 3 * hidden, num_tokens)
        return
    for projection, projected in (("value", num_tokens), ("key", num_tokens), ("query", rows)):
        yield _linear(f"{name}.attention.self.{projection}", hidden, hidden, projected)


def _linear(name: str, inputs: int, outputs: int, rows: int) -> _Part:
    shapes: Shapes = {f"{name}.bias": (outputs,), f"{name}.weight": (outputs, inputs)}
    return _Part(shapes, rows * inputs * outputs)


def _layer_norm(owner: str, size: int) -> _Part:
    return _Part({f"{owner}.LayerNorm.weight": (size,), f"{owner}.LayerNorm.bias": (size,)})

"""Groups a model's gradients into buckets in the order of the backward pass, for `plan buckets`.

Shape letters: D hidden, F feed-forward width, V vocabulary (padded), S tokens of a sequence,
P masked positions of a sequence, R rows (token positions) that the last layer computes.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bert_tools.common.results import aligned
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import TOKEN_TYPES, ModelSection
from mlperf_bert.distributed.bucket_plan import MIB, ReadyGradient, plan_buckets
from mlperf_bert.errors import ConfigError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
_HEADER = ("bucket", "tensors", "parameters", "MiB", "earliest start", "first tensor .. last")
_LEGEND = (
    "earliest start: when the last gradient of a bucket is ready, in percent of the backward "
    "pass's multiply-adds"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the backward pass: the gradients that it completes, and the amount of its work.

    `numels` maps each parameter's name to its number of elements, in the order in which the
    gradients become ready. `multiply_adds` counts the forward pass's multiply-adds per sequence.
    The backward pass needs twice as many for every matrix product, because it computes the
    gradients of the input and of the weight. The shares of the work are the same in both passes.
    """

    numels: dict[str, int]
    multiply_adds: int = 0


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Plan the gradient buckets of a config's model.

    Returns the facts for `--json` and the lines for the terminal. Raises ConfigError for a user's
    mistake.
    """
    config = load_config(args.config, args.set)
    if config.model.architecture != "bert":
        problem = f"is {config.model.architecture!r}, but `plan buckets` supports only 'bert'"
        raise ConfigError("model.architecture", problem, "pass a config with architecture 'bert'")
    precision, cap_mb = config.model.precision, config.parallel.bucket_cap_mb
    dtype = precision if precision in ELEMENT_BYTES else "fp32"  # autocast computes fp32 gradients
    num_tokens, num_masked = config.data.max_seq_length, config.data.max_predictions
    gradients = backward_order(config.model, num_tokens, num_masked)
    buckets = []
    for bucket in plan_buckets(gradients, ELEMENT_BYTES[dtype], cap_mb):
        numel = sum(gradient.numel for gradient in bucket)
        buckets.append(
            {
                "names": [gradient.name for gradient in bucket],
                "numel": numel,
                "num_bytes": ELEMENT_BYTES[dtype] * numel,
                "earliest_start": bucket[-1].ready_at,
            }
        )
    facts = {
        "dtype": dtype,
        "bucket_cap_mb": cap_mb,
        "tokens_per_sequence": num_tokens,
        "masked_per_sequence": num_masked,
        "buckets": buckets,
    }
    title = (
        f"{args.config.stem}: {dtype} gradients, buckets closed at {cap_mb:g} MiB, sequences of "
        f"{num_tokens} tokens with {num_masked} masked"
    )
    return facts, _in_words(title, buckets)


def backward_order(model: ModelSection, num_tokens: int, num_masked: int) -> list[ReadyGradient]:
    """Return BERT's gradients in the order in which the backward pass completes them.

    `ready_at` is the share of the backward pass's work that is done when a gradient is complete.
    The order is that of an eager backward pass without autocast. Parameters that the forward pass
    uses last come first. A bias comes before its matrix, and a LayerNorm's weight before its bias.
    The word embedding, tied to the decoder, comes last, because the forward pass starts with it.

    Work is counted in multiply-adds of matrix products and attention, for sequences of `num_tokens`
    tokens (S) with `num_masked` masked positions (P). The memory-bound parts (embedding tables,
    LayerNorm, GELU, softmax, dropout) are not counted. The gradients of one module are assumed to
    be ready together when its backward pass ends.
    """
    parts = list(_backward(model, num_tokens, num_masked))
    done = list(accumulate(part.multiply_adds for part in parts))
    return [
        ReadyGradient(name=name, numel=numel, ready_at=so_far / done[-1])
        for part, so_far in zip(parts, done, strict=True)
        for name, numel in part.numels.items()
    ]


def _backward(model: ModelSection, num_tokens: int, num_masked: int) -> Iterator[_Part]:
    """Yield the parts of the backward pass, in the reverse order of the forward pass."""
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    has_pairs = model.objective == "mlm_nsp"
    if has_pairs:
        yield _linear("cls.seq_relationship", hidden, 2, rows=1)
    # The decoder's matrix is the word embedding, which becomes ready last.
    bias = {"cls.predictions.bias": vocabulary}
    yield _Part(bias, num_masked * hidden * vocabulary)
    yield _layer_norm("cls.predictions.transform", hidden)
    yield _linear("cls.predictions.transform.dense", hidden, hidden, num_masked)
    if has_pairs:
        yield _linear("bert.pooler.dense", hidden, hidden, rows=1)
    last = model.num_layers - 1
    for number in reversed(range(model.num_layers)):
        # The last layer computes only masked positions and first tokens.
        rows = num_masked + has_pairs if number == last else num_tokens
        yield from _layer(f"bert.encoder.layer.{number}", model, num_tokens, rows)
    yield _layer_norm("bert.embeddings", hidden)
    yield _Part(
        {
            "bert.embeddings.position_embeddings.weight": model.max_position_embeddings * hidden,
            "bert.embeddings.token_type_embeddings.weight": TOKEN_TYPES * hidden,
            "bert.embeddings.word_embeddings.weight": vocabulary * hidden,
        }
    )


def _layer(name: str, model: ModelSection, num_tokens: int, rows: int) -> Iterator[_Part]:
    """Yield the parts of one encoder layer's backward pass.

    The layer computes `rows` output rows (token positions) per sequence.
    """
    hidden, wide = model.hidden_size, model.intermediate_size
    yield _layer_norm(f"{name}.output", hidden)
    yield _linear(f"{name}.output.dense", wide, hidden, rows)
    yield _linear(f"{name}.intermediate.dense", hidden, wide, rows)
    yield _layer_norm(f"{name}.attention.output", hidden)
    yield _linear(f"{name}.attention.output.dense", hidden, hidden, rows)
    # Scores and context each need S products of D channels per row.
    yield _Part({}, 2 * rows * num_tokens * hidden)
    for projection, projected in (("value", num_tokens), ("key", num_tokens), ("query", rows)):
        yield _linear(f"{name}.attention.self.{projection}", hidden, hidden, projected)


def _linear(name: str, inputs: int, outputs: int, rows: int) -> _Part:
    """Return the part of the backward pass for a linear layer that is applied to `rows` tokens."""
    numels = {f"{name}.bias": outputs, f"{name}.weight": outputs * inputs}
    return _Part(numels, rows * inputs * outputs)


def _layer_norm(owner: str, size: int) -> _Part:
    """Return the part for the LayerNorm in the module `owner`, with 0 multiply-adds."""
    return _Part({f"{owner}.LayerNorm.weight": size, f"{owner}.LayerNorm.bias": size})


def _in_words(title: str, buckets: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            str(number),
            str(len(bucket["names"])),
            f"{bucket['numel']:,}",
            f"{bucket['num_bytes'] / MIB:.2f}",
            f"{bucket['earliest_start']:.1%}",
            " .. ".join(dict.fromkeys((bucket["names"][0], bucket["names"][-1]))),
        )
        for number, bucket in enumerate(buckets)
    ]
    total = sum(bucket["num_bytes"] for bucket in buckets)
    late = sum(bucket["num_bytes"] for bucket in buckets if bucket["earliest_start"] >= 1)
    yield title
    yield (
        f"{len(buckets)} buckets, {sum(bucket['numel'] for bucket in buckets):,} parameters, "
        f"{total / MIB:.1f} MiB, of which {late / MIB:.1f} MiB ({late / total:.0%}) are complete "
        "only when the backward pass ends"
    )
    yield from ("", *aligned(_HEADER, rows, left=_HEADER[-1]), "", _LEGEND)

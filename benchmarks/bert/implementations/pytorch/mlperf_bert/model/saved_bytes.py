"""Bytes that a forward saves for its backward, counted by hand from the autograd functions.

They follow from the sizes of a `Forward`. Each function of `SavedBytes` counts one part of the
model; a kernel that saves something else changes its line here. A test compares them with torch's
own count (`tests/unit/model/test_saved_bytes.py`), but for ModernBERT with fused kernels: not yet.

Shape letters: B sequences, T tokens, R rows of the last layer, P masked positions, D hidden,
F feed-forward width, N heads, V vocabulary (padded).
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import ModelSection, Precision
from mlperf_bert.data.packing import best_fit_decreasing, cut_by_ratio, cut_into_chunks
from mlperf_bert.data.shards import IntArray

AttentionKind = Literal["keyed", "fused", "padded"]
# How padded attention gets its rows: one sequence at a time, all as they lie, or padded copies, and
# where these see all other slots (`grouped`) or have a mask (`packed`, and the chunks of a reach).
PaddedKind = Literal["reference", "in_place", "grouped", "masked"]
CHUNK_ROWS = 1024  # rows of the chunked head (model/heads.py)

# Bytes an element of hidden states (and weights), and of a product's factors and results.
_WIDTHS: dict[Precision, tuple[int, int]] = {
    "fp32": (4, 4),
    "bf16": (2, 2),
    "fp16": (2, 2),
    "fp8": (2, 2),
    "bf16_autocast": (4, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedAttention:
    """Slots and probabilities of attention that pads, summed over its groups or rows.

    `slots` are those of keys. `squares`: query slots times key slots; `largest`: the same of the
    largest group. `last_*` are those of the last layer, which has fewer queries. A group of one
    sequence saves views of all groups' keys and values: `kept_by_views` counts the slots saved
    because of it.
    """

    kind: PaddedKind
    slots: int
    query_slots: int
    squares: int
    last_slots: int
    last_squares: int
    largest: int
    kept_by_views: int

    @classmethod
    def of_lengths(cls, policy: str, lengths: IntArray, queries: IntArray, longest: int) -> Self:
        """Sizes under `policy`: "reference", "packed" (rows of `longest` slots) or "grouped"."""
        if policy == "packed":
            row = best_fit_decreasing(lengths, longest)
            most = int(np.bincount(row, weights=queries).max())
            return cls._of("masked", [(int(row.max()) + 1, longest, longest, most)])
        if policy == "reference":
            groups = np.split(np.arange(len(lengths)), len(lengths))  # one by one, nothing padded
            return cls._of_groups("reference", groups, lengths, lengths, queries)
        is_even = bool((lengths == lengths[0]).all())
        groups = _grouped(lengths)
        return cls._of_groups(
            "in_place" if is_even else "grouped", groups, lengths, lengths, queries
        )

    @classmethod
    def of_chunks(cls, lengths: IntArray, queries: IntArray, reach: int) -> Self:
        """Sizes under "grouped" where a query sees `reach` places to each side.

        The last layer's queries are taken as spread evenly.
        """
        chunks = cut_into_chunks(lengths, reach)
        of_sequence = lengths[chunks.sequence]
        own = np.minimum(2 * reach, of_sequence - chunks.start)
        last = np.ceil(queries[chunks.sequence] * own / of_sequence)
        return cls._of_groups("masked", _grouped(chunks.num_keys), chunks.num_keys, own, last)

    @classmethod
    def _of_groups(
        cls, kind: PaddedKind, groups: list[IntArray], keys: IntArray, *queries: NDArray[Any]
    ) -> Self:
        """Sizes of groups of sequences, given the keys of each, its queries, and its last ones."""
        return cls._of(
            kind,
            [
                (len(own), int(keys[own].max()), *(int(each[own].max()) for each in queries))
                for own in groups
            ],
        )

    @classmethod
    def _of(cls, kind: PaddedKind, sizes: list[tuple[int, ...]]) -> Self:
        """Sizes of groups: sequences, and slots of keys, of queries and of the last queries."""
        slots = sum(count * keys for count, keys, *_ in sizes)
        alone = sum(keys for count, keys, *_ in sizes if count == 1)
        return cls(
            kind=kind,
            slots=slots,
            kept_by_views=slots - alone if alone else 0,
            query_slots=sum(count * queries for count, _, queries, _ in sizes),
            squares=sum(count * keys * queries for count, keys, queries, _ in sizes),
            last_slots=sum(count * last for count, *_, last in sizes),
            last_squares=sum(count * keys * last for count, keys, _, last in sizes),
            largest=max(count * keys * queries for count, keys, queries, _ in sizes),
        )

    def times(self, factor: float) -> Self:
        """The sizes for `factor` times as many sequences."""
        names = [name for name in self.__dataclass_fields__ if name != "kind"]
        return replace(self, **{name: round(factor * getattr(self, name)) for name in names})


def _grouped(lengths: IntArray) -> list[IntArray]:
    order = np.argsort(-lengths, kind="stable")
    return [order[start:end] for start, end in pairwise(cut_by_ratio(lengths[order]))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Sizes of one forward: the batch as the model gets it, padding included.

    `longest`: most tokens of a sequence. `mean_length`: mean of the sequences that the batch is
    drawn from; `tokens` exceeds it so that the largest draw fits. `padded` is set if attention
    pads, and `local` is the same of layers with windows.
    """

    sequences: int
    tokens: int
    masked: int
    longest: int
    mean_length: float | None = None
    padded: PaddedAttention | None = None
    local: PaddedAttention | None = None

    def of_batch(self, sequences: int) -> Self:
        """The same with another number of sequences.

        The part above the mean grows with the square root of their number, like a sum's deviation.
        """
        factor = sequences / self.sequences
        tokens = factor * self.tokens
        if self.mean_length is not None:
            mean = min(self.mean_length * sequences, tokens)
            tokens = mean + (tokens - mean) / factor**0.5
        share = tokens / self.tokens
        return replace(
            self,
            sequences=sequences,
            tokens=round(tokens),
            masked=round(share * self.masked),
            padded=None if self.padded is None else self.padded.times(share),
            local=None if self.local is None else self.local.times(share),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels that compute; they differ in what they save.

    `keyed` is attention with our keep bits, `fused` any other that keeps no probabilities.
    """

    fused: bool
    attention: AttentionKind
    on_cuda: bool


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that the forwards of one kind of model save."""

    model: ModelSection
    kernels: Kernels
    forward: Forward

    def parts(self) -> dict[str, int]:
        """Bytes by part, in the order of the forward."""
        layers = self.model.num_layers
        whole = sum(self.layer(number) for number in range(layers - 1))
        per_token = (whole / (layers - 1) if layers > 1 else self.layer(0)) / self.forward.tokens
        return {
            "copies of weights": layers * self._weights(is_last=False)
            + self._weights(is_last=True)
            - self._weights(is_last=False),
            "embeddings": self._embeddings(),
            f"{layers - 1} layers, {per_token / 1e3:.1f} KB a token": whole,
            "last layer, where it is read": self.last_layer(),
            "heads and their logits": self.heads(),
        }

    @property
    def rows(self) -> int:
        """R: rows of the last layer that the heads read."""
        pairs = self.forward.sequences if self.model.objective == "mlm_nsp" else 0
        return self.forward.masked + pairs

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of an element of hidden states, and of a product's factors and results."""
        return _WIDTHS[self.model.precision]

    def layer(self, number: int) -> int:
        """Bytes of a layer that computes all tokens."""
        rows, hidden_size, (hidden, _) = self.forward.tokens, self.model.hidden_size, self.widths
        per_row = self._residual_rows() + self._feed_forward_row()
        # The input. BERT's fused kernels have it as residual, in FP8 beside its copy.
        if self.kernels.fused and not self._is_modern:
            per_row += hidden_size * (hidden + self._product_copy())
        else:
            per_row += hidden_size * self._product_input()
        return rows * per_row + self._attention(number, rows)

    def last_layer(self) -> int:
        """Bytes of the last layer: keys and values of all tokens, all else of the rows read."""
        hidden_size, (hidden, _) = self.model.hidden_size, self.widths
        rows, tokens = self.rows, self.forward.tokens
        copy = self._product_copy()
        total = rows * (self._residual_rows() + self._feed_forward_row())
        total += self._attention(self.model.num_layers - 1, rows)
        if self._is_modern:
            return total + tokens * hidden_size * self._product_input()
        if not self.kernels.fused:
            return total + (rows + tokens) * hidden_size * self._product_input()
        # In FP8 the tokens' copy is enough: they are no residual.
        of_tokens = copy if self._is_fp8 else hidden + copy
        return total + hidden_size * (rows * (hidden + copy) + tokens * of_tokens)

    def heads(self) -> int:
        """Bytes of both heads' inputs and of what the cross-entropy keeps."""
        hidden_size, (hidden, product) = self.model.hidden_size, self.widths
        masked, pairs = self.forward.masked, self.rows - self.forward.masked
        total = self.rows * hidden_size * hidden  # the last layer's rows, in the heads' order
        total += pairs * (hidden_size * product + 2 * 4)  # tanh's result, log-probabilities
        total += masked * (hidden_size * (2 * product + hidden) + 2 * 4)  # GELU, LayerNorm
        return total + self._cross_entropy()

    def _cross_entropy(self) -> int:
        masked, vocabulary = self.forward.masked, self.model.padded_vocab_size
        _, product = self.widths
        if self.model.head == "chunked":  # gradients of hidden states, matrix and bias
            hidden_size = self.model.hidden_size
            return product * (masked * hidden_size + vocabulary * (hidden_size + 1))
        if self.kernels.fused:  # the logits, which become their gradient, and two sums a row
            return masked * (vocabulary * product + 2 * 4)
        return 4 * masked * vocabulary  # log-probabilities in float32

    @property
    def loss_forward(self) -> int:
        """Temporary bytes while the cross-entropy is computed."""
        _, product = self.widths
        rows, size = self.forward.masked, product
        if self.model.head == "chunked":
            rows, size = min(rows, CHUNK_ROWS), product + 4  # log-probabilities are not kept
        elif self.kernels.fused:
            return 0
        if product != 4:
            size += 4  # the logits in float32
        return rows * self.model.padded_vocab_size * size

    @property
    def loss_backward(self) -> int:
        """Temporary bytes while the decoder's gradients are computed."""
        if self.model.head == "chunked":
            return 0
        hidden, product = self.widths
        vocabulary, hidden_size = self.model.padded_vocab_size, self.model.hidden_size
        in_place = product == 4 or self.kernels.fused
        of_logits = 0 if in_place else self.forward.masked * vocabulary * product
        return of_logits + vocabulary * hidden_size * hidden

    @property
    def _is_modern(self) -> bool:
        return self.model.architecture == "modern"

    @property
    def _is_fp8(self) -> bool:
        return self.model.precision == "fp8"

    def _product_copy(self) -> int:
        """Bytes that a product keeps of an input element which others keep as well."""
        hidden, product = self.widths
        if self._is_fp8:
            return 1  # transposed
        return product if hidden != product else 0  # under autocast

    def _product_input(self) -> int:
        """Bytes that a product keeps of an input element which nothing else keeps."""
        return 1 if self._is_fp8 else self.widths[1]

    def _weights(self, *, is_last: bool) -> int:
        """Copies of a layer's matrices: in FP8, 16 bits of autocast, or joined for one product."""
        hidden_size, (hidden, product) = self.model.hidden_size, self.widths
        square = hidden_size**2
        if self._is_fp8 or hidden != product:
            wide = 3 if self._is_modern else 2
            numel = 4 * square + wide * hidden_size * self.model.intermediate_size
            return numel * (1 if self._is_fp8 else product)
        joined = (2 if is_last else 3) * square * product
        return joined if self.kernels.fused and not self._is_modern else 0

    def _dropped(self) -> int:
        """Bytes that a dropout of D channels keeps of a row."""
        channels = self.model.hidden_size
        if self.model.hidden_dropout == 0:
            return 0
        if self.kernels.fused or self.kernels.on_cuda:
            return -(-channels // 8)  # one bit each
        return channels * self.widths[1]  # factors

    def _embeddings(self) -> int:
        statistics, hidden_size = 2 * 4, self.model.hidden_size
        summed = 0 if self.kernels.fused else hidden_size * self.widths[0]
        return self.forward.tokens * (summed + statistics + self._dropped())

    def _attention(self, number: int, rows: int) -> int:
        """Bytes of queries, keys, values, context, logarithmic sum and keep bits of a layer."""
        model, (_, product) = self.model, self.widths
        is_last, tokens = number + 1 == model.num_layers, self.forward.tokens
        if self.kernels.attention == "padded":  # and the input of the output's product
            of_rows = rows * model.hidden_size * self._product_input()
            return of_rows + self._padded(number, is_last=is_last)
        row = model.hidden_size * product + 4 * model.num_heads
        row += model.hidden_size if self._is_fp8 else 0
        if self.kernels.attention == "keyed" and model.attention_dropout > 0:
            row += model.num_heads * -(-self.forward.longest // 8)
        # Rows of queries, keys and values. ModernBERT's are views of one product, of which the last
        # layer's queries are copied, and kernels without rotation get turned copies.
        kept = rows + 2 * tokens
        if self._is_modern:
            is_turned = self.kernels.attention in ("fused", "keyed")
            kept = 3 * tokens + (rows if is_last or is_turned else 0) + is_turned * tokens
        return rows * row + kept * model.hidden_size * product

    def _padded(self, number: int, *, is_last: bool) -> int:
        """Bytes of padded attention: padded inputs, probabilities before and after dropout."""
        model, (_, product), forward = self.model, self.widths, self.forward
        padded = forward.padded if model.is_global(number) else forward.local
        if padded is None:
            return 0
        queries = padded.last_slots if is_last else padded.query_slots
        squares = padded.last_squares if is_last else padded.squares
        slots, kept, more = 2 * padded.slots + queries, 3, 0
        is_torchs = model.attention_dropout == 0 or self.kernels.on_cuda
        as_they_lie = ("reference", "in_place") if is_torchs else ("reference",)
        if self._is_modern:  # turns of queries and keys, and values as views of the product
            rows = self.rows if is_last else forward.tokens
            more = (forward.tokens + rows) * model.head_size * 4  # their cosines and sines
            slots += 2 * forward.tokens if padded.kind in as_they_lie else 0
        if padded.kind == "reference":
            kept = 1 if model.attention_dropout == 0 else 3
            more += 0 if model.is_global(number) else squares
        elif is_torchs:  # with its result, and a mask in the dtype of the scores
            slots, kept = slots + queries, 0
            more += 4 * model.num_heads * queries
            more += squares * product if padded.kind == "masked" else 0
        else:
            slots += 2 * padded.kept_by_views
        return more + (slots * model.hidden_size + kept * model.num_heads * squares) * product

    def _residual_rows(self) -> int:
        """Bytes a row of both dropout, residual and LayerNorm blocks, and the result between."""
        hidden_size, (hidden, product) = self.model.hidden_size, self.widths
        statistics = 2 * 4
        if self.kernels.fused and self._is_modern:  # the sum, and its norm
            each = hidden_size * hidden + statistics + self._dropped()
            return 2 * each + hidden_size * self._product_input()
        if self.kernels.fused:  # the product, and the first block's result as the second's residual
            each = hidden_size * product + statistics + self._dropped()
            return 2 * each + hidden_size * (hidden + self._product_copy())
        each = hidden_size * hidden + statistics + self._dropped()
        return 2 * each + hidden_size * self._product_input()

    def _feed_forward_row(self) -> int:
        """Bytes a row of GELU's input and result; if gated, of two halves and their product."""
        _, product = self.widths
        kept = product
        if self._is_modern:
            kept = (2 if self.kernels.fused else 3) * product
        return self.model.intermediate_size * (kept + self._product_input())

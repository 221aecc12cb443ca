"""Readable reference versions of blocks, which are the operations around matrix products.

Each model gets one set of blocks when it is created (`choices.py`). The fused blocks for GPUs
(`fused_blocks.py`) compute the same results and gradients, except for rounding. Both sets drop the
elements that `model/dropout.py` chooses.

Shapes use the letters T (tokens), R (rows, which are some or all of the tokens), D (hidden size), F
(feed-forward width), P (masked positions) and V (padded vocabulary size).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.config.sections import KernelsName
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.dropout import dropout
from mlperf_bert.model.dropout_keys import DropoutSite

Three = tuple[Tensor, Tensor, Tensor]


class Blocks:
    """Reference blocks that use only torch's own operators, for every device and dtype.

    Methods receive modules as arguments in order to use their parameters. `name` is the value of
    `model.kernels` that selects these blocks.
    """

    name: ClassVar[KernelsName] = "reference"

    def __init__(self) -> None:
        self._memory_of_logits = KeptMemory()

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Apply each linear layer to `x` [R, any], and return one result per layer.

        The layers run one by one, because a single product with joined weights was no faster on a
        CPU.
        """
        return tuple(layer(x) for layer in layers)

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """Compute LayerNorm(dropout(dense(x)) + residual): [R, any], [R, D] -> [R, D]."""
        normalized: Tensor = norm(dropout(self.multiply(x, (dense,))[0], site) + residual)
        return normalized

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """Compute the GELU (erf, arXiv 1606.08415) of dense(hidden): [R, D] -> [R, F]."""
        return F.gelu(self.multiply(hidden, (dense,))[0])

    def embed(
        self,
        ids: Three,
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """Compute dropout(LayerNorm(sum of three embeddings)): three int64 [T] -> [T, D].

        `ids` and `tables` each contain an entry for words, token types and positions, in this
        order.
        """
        # The order of the sum is that of `transformers`, so that float32 results are bit-identical.
        words, types, positions = (table(index) for table, index in zip(tables, ids, strict=True))
        return dropout(norm(words + types + positions), site)

    def embed_words(
        self, ids: Tensor, table: nn.Embedding, norm: nn.LayerNorm, site: DropoutSite | None
    ) -> Tensor:
        """Compute dropout(LayerNorm(word embeddings)): int64 [T] -> [T, D]."""
        return dropout(norm(table(ids)), site)

    def sum_norm(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum residual + dropout(dense(x)) and the LayerNorm of this sum, both [R, D].

        `x` is [R, any] and `residual` is [R, D]. `dense` and `norm` have no bias.
        """
        total = residual + dropout(self.multiply(x, (dense,))[0], site)
        return total, norm(total)

    def gated(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """Compute GELU(a) * b, where a and b are the halves of dense(hidden): [R, D] -> [R, F].

        This is GeGLU (arXiv 2002.05202) with the exact GELU.
        """
        wide, gate = self.multiply(hidden, (dense,))[0].chunk(2, dim=-1)
        return F.gelu(wide) * gate

    def columns(self, product: Tensor, count: int) -> tuple[Tensor, ...]:
        """Split the columns of a joined product [R, count D] into `count` parts [R, D]."""
        return product.chunk(count, dim=1)

    def project_qkv(
        self, hidden: Tensor, wanted: Tensor, query: nn.Linear, key: nn.Linear, value: nn.Linear
    ) -> Three:
        """Project the wanted rows [R, D] to queries, and all rows [T, D] to keys and values.

        If all rows of `hidden` are wanted, `wanted` is `hidden` itself. The results may be adjacent
        columns of one tensor, in which case they are contiguous only along D.
        """
        if wanted is hidden:
            q, k, v = self.multiply(hidden, (query, key, value))
        else:
            (q,), (k, v) = self.multiply(wanted, (query,)), self.multiply(hidden, (key, value))
        return q, k, v

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """Compute the summed cross-entropy of the logits hidden @ weight.T + bias, as a scalar.

        `hidden` is [P, D], `weight` [V, D], `bias` [V] and `labels` int64 [P]. The loss is defined
        as in `cross_entropy_sum`, and supports only one backward pass.
        """
        if hidden.device.type == "cpu":
            total: Tensor = _MaskedLmLoss.apply(
                hidden, weight, bias, labels, self._memory_of_logits
            )
            return total
        return cross_entropy_sum(F.linear(hidden, weight, bias), labels)


def side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate the columns of parts [R, width] into one tensor [R, sum of widths].

    Nothing is copied if the parts are already adjacent columns of one tensor.
    """
    first, width = parts[0], sum(part.shape[1] for part in parts)
    offset = first.storage_offset()
    for part in parts:
        is_same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_same or part.storage_offset() != offset or part.stride() != (width, 1):
            return torch.cat(parts, dim=1)
        offset += part.shape[1]
    return first.as_strided((first.shape[0], width), (width, 1))


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute F.cross_entropy(logits, labels, reduction="sum") without reading ignored rows.

    Args:
        logits: [P, V], floating dtype.
        labels: int64 [P]. A row with label IGNORED adds nothing to the loss and the gradients, even
            if it contains NaN.

    Returns:
        The loss in nats, a scalar. It is float64 if the logits are float64, and float32 otherwise.
        It supports one backward pass and has no second derivative.
    """
    total: Tensor = _CrossEntropySum.apply(precise(logits), labels)
    return total


def precise(logits: Tensor) -> Tensor:
    """Convert logits to float32, unless they are float64.

    bf16 has only 8 bits of mantissa, but a log-sum-exp over 30,000 words needs at least float32.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


class _CrossEntropySum(torch.autograd.Function):
    """Summed cross-entropy, whose backward pass overwrites the saved log-probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probabilities, labels)
        return F.nll_loss(log_probabilities, labels, reduction="sum", ignore_index=IGNORED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_probabilities, labels = ctx.saved_tensors
        gradient: Tensor = subtract_labels(log_probabilities.exp_(), labels).mul_(grad)
        # Multiplying by zero would keep a NaN.
        return gradient.masked_fill_((labels == IGNORED)[:, None], 0), None


class KeptMemory:
    """Memory for one large tensor of each step, which is kept until the next step.

    Otherwise the system clears the pages of the tensor in every step, which takes longer on a CPU
    than most computations with it.
    """

    def __init__(self) -> None:
        self._spare: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor with at least `size` elements of arbitrary values.

        Nobody else gets this memory until it is given back. If it is never given back, the next
        call allocates other memory.
        """
        spare, self._spare = self._spare, None
        if spare is None or spare.dtype != dtype or len(spare) < size:
            del spare  # before the new memory is allocated
            spare = torch.empty(size, dtype=dtype)
        return spare

    def give_back(self, memory: Tensor) -> None:
        """Offer the memory that `take` returned to the next call."""
        self._spare = memory


class _MaskedLmLoss(torch.autograd.Function):
    """The decoder's product and its summed cross-entropy, on a CPU.

    One tensor [P, V] serves both passes: the softmax overwrites the logits, and the gradient of the
    logits overwrites the softmax. Reading and writing this tensor once takes about as long as the
    softmax itself. The backward pass therefore does not multiply this tensor by the gradient of the
    loss. It multiplies the results of the products, which are much smaller.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, memory: KeptMemory
    ) -> Tensor:
        hidden, weight, bias = _as_autocast_does(hidden, weight, bias)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        ctx.memory, ctx.taken = memory, memory.take(len(hidden) * len(weight), dtype)
        softmax = ctx.taken[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        if hidden.dtype == dtype:
            torch.addmm(bias, hidden, weight.t(), out=softmax)
        else:
            softmax.copy_(F.linear(hidden, weight, bias))
        torch.softmax(softmax, dim=-1, out=softmax)
        probabilities = softmax.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        losses = probabilities.log().neg_()
        is_used = labels != IGNORED
        # A probability so small has lost bits, or is 0. This is rare.
        rows = (is_used & (probabilities < torch.finfo(dtype).tiny)).nonzero()[:, 0]
        if len(rows):
            again = precise(F.linear(hidden[rows], weight, bias))
            losses[rows] = F.cross_entropy(again, labels[rows], reduction="none")
        ctx.save_for_backward(softmax, hidden, weight, labels)
        total: Tensor = losses.where(is_used, 0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        softmax, hidden, weight, labels = ctx.saved_tensors
        unused = (labels == IGNORED).nonzero()[:, 0]
        # A masked fill would write all rows.
        gradient = subtract_labels(softmax, labels).index_fill_(0, unused, 0).to(hidden.dtype)
        factor = grad.item()  # a number, because a tensor would be rounded to 16 bits first
        of_hidden = (gradient @ weight).mul_(factor)
        of_weight = gradient.t() @ (hidden * factor)
        of_bias = gradient.sum(0).mul_(factor)
        ctx.memory.give_back(ctx.taken)
        return of_hidden, of_weight, of_bias, None, None


def _as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert the factors of a product on a CPU to the dtype of autocast, if it is on."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


def subtract_labels(softmax: Tensor, labels: Tensor) -> Tensor:
    """Overwrite the softmax [P, V] of logits with the gradient of their summed cross-entropy.

    Returns the gradient. Its rows with the label IGNORED have arbitrary values.
    """
    ones = softmax.new_ones(len(labels), 1)
    return softmax.scatter_add_(1, labels.clamp(min=0)[:, None], -ones)

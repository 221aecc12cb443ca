"""The operations around the model's matrix products, as blocks: the readable reference.

A set of blocks is chosen once per model (`choices.py`). Fused blocks for a GPU (`fused_blocks.py`)
have the same gradients; both drop the elements that `model/dropout.py` chooses.

Shape letters: T tokens, R rows (some or all of them), D hidden, F feed-forward width, P masked
positions, V vocabulary (padded).
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
    """Blocks in torch's own operators, for every device and dtype: the reference.

    Modules are passed for their parameters. `name` is what `model.kernels` calls these blocks.
    """

    name: ClassVar[KernelsName] = "reference"

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """[R, any] times each layer. On a CPU one product of several weights was no faster."""
        return tuple(layer(x) for layer in layers)

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """LayerNorm(dropout(dense(x)) + residual): [R, any], [R, D] -> [R, D]."""
        normalised: Tensor = norm(dropout(self.multiply(x, (dense,))[0], site) + residual)
        return normalised

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """GELU (erf, arXiv 1606.08415) of dense(hidden): [R, D] -> [R, F]."""
        return F.gelu(self.multiply(hidden, (dense,))[0])

    def embed(
        self,
        ids: Three,
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """dropout(LayerNorm(sum of three embeddings)): int64 [T] each -> [T, D].

        `ids` and `tables` are those of words, token types and positions, in this order.
        """
        # Summed in the order of `transformers`, so that float32 results are the same to the bit.
        words, types, positions = (table(of) for table, of in zip(tables, ids, strict=True))
        return dropout(norm(words + types + positions), site)

    def embed_words(
        self, ids: Tensor, table: nn.Embedding, norm: nn.LayerNorm, site: DropoutSite | None
    ) -> Tensor:
        """dropout(LayerNorm(embeddings)): int64 [T] -> [T, D]."""
        return dropout(norm(table(ids)), site)

    def sum_norm(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> tuple[Tensor, Tensor]:
        """The sum residual + dropout(dense(x)), and its LayerNorm: both [R, D].

        `x` [R, any], `residual` [R, D]; `dense` and `norm` have no bias.
        """
        total = self.add(x, residual, dense, site)
        return total, norm(total)

    def add(
        self, x: Tensor, residual: Tensor, dense: nn.Linear, site: DropoutSite | None
    ) -> Tensor:
        """The sum of `sum_norm` alone."""
        return residual + dropout(self.multiply(x, (dense,))[0], site)

    def gated(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """GELU(a) * b, where a and b are the halves of dense(hidden): [R, D] -> [R, F].

        GeGLU (arXiv 2002.05202) with the exact GELU.
        """
        wide, gate = self.multiply(hidden, (dense,))[0].chunk(2, dim=-1)
        return F.gelu(wide) * gate

    def columns(self, product: Tensor, count: int) -> tuple[Tensor, ...]:
        """A product of joined matrices as `count` equal parts: [R, count D] -> [R, D] each."""
        return product.chunk(count, dim=1)

    def project_qkv(
        self, hidden: Tensor, wanted: Tensor, query: nn.Linear, key: nn.Linear, value: nn.Linear
    ) -> Three:
        """Queries of `hidden`'s wanted rows [R, D], keys and values of all its rows [T, D].

        If every row is wanted, `wanted` is `hidden` itself. The results may be columns of one
        tensor, contiguous along D only.
        """
        if wanted is hidden:
            q, k, v = self.multiply(hidden, (query, key, value))
        else:
            (q,), (k, v) = self.multiply(wanted, (query,)), self.multiply(hidden, (key, value))
        return q, k, v

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """`cross_entropy_sum` of the logits hidden @ weight.T + bias: a scalar with one backward.

        `hidden` [P, D], `weight` [V, D], `bias` [V], `labels` int64 [P].
        """
        logits = precise(F.linear(hidden, weight, bias))
        # Nothing else holds these logits: on a CPU they are overwritten.
        total: Tensor = _CrossEntropySum.apply(logits, labels, logits.device.type == "cpu")  # type: ignore[no-untyped-call]
        return total


def side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenation [R, sum of widths] of parts [R, width]; no copy if they already lie so."""
    first, width = parts[0], sum(part.shape[1] for part in parts)
    place = first.storage_offset()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or part.storage_offset() != place or part.stride() != (width, 1):
            return torch.cat(parts, dim=1)
        place += part.shape[1]
    return first.as_strided((first.shape[0], width), (width, 1))


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """F.cross_entropy(logits, labels, reduction="sum") that never reads ignored rows.

    Args:
        logits: [P, V], floating dtype.
        labels: int64 [P]; a row with label IGNORED adds nothing to loss and gradients, even if it
            is NaN.

    Returns:
        Scalar in nats: float32, or float64 where the logits are. It has one backward and no second
        derivative.
    """
    total: Tensor = _CrossEntropySum.apply(precise(logits), labels, False)  # type: ignore[no-untyped-call]
    return total


def precise(logits: Tensor) -> Tensor:
    """Logits in float32; float64 stays as it is.

    bf16 keeps 8 bits of mantissa: a log-sum-exp over 30,000 words needs float32 at least.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


def logits_gradient(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the sum, written over the log-probabilities [P, V]; zero in ignored rows."""
    gradient = log_probabilities.exp_()  # of log-sum-exp: the softmax
    gradient.scatter_add_(1, labels.clamp(min=0)[:, None], -gradient.new_ones(len(labels), 1))
    # Multiplying by zero would keep a NaN, and on a CPU a masked fill takes six times as long.
    integers = torch.int64 if gradient.dtype == torch.float64 else torch.int32
    all_bits = (labels != IGNORED).to(integers).neg_()[:, None]
    gradient.view(integers).bitwise_and_(all_bits)
    return gradient


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy whose backward turns the saved log-probabilities into the gradient in place.

    A new [P, V] would be slow on a CPU, where memory new to the process is.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, in_place: bool) -> Tensor:
        place = logits if in_place else None
        log_probabilities = torch.log_softmax(logits, dim=-1, out=place)
        ctx.save_for_backward(log_probabilities, labels)
        return F.nll_loss(log_probabilities, labels, reduction="sum", ignore_index=IGNORED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probabilities, labels = ctx.saved_tensors
        return logits_gradient(log_probabilities, labels).mul_(grad), None, None

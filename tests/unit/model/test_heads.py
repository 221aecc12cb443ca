"""The summed cross-entropy is torch's, forward and backward, and its backward runs once."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import ragged_batch
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.heads import PretrainingLogits, loss_sums


def case(dtype: torch.dtype, masked_share: float = 0.15) -> tuple[UnpaddedBatch, Tensor, Tensor]:
    """A batch with logits of both tasks for it."""
    batch = ragged_batch((7, 31, 12, 64), masked_share=masked_share)
    generator = torch.Generator().manual_seed(0)
    shapes = (len(batch.labels), 104), (len(batch.lengths), 2)
    mlm, nsp = (
        (4 * torch.randn(shape, generator=generator, dtype=dtype)).requires_grad_()
        for shape in shapes
    )
    return batch, mlm, nsp


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    batch, mlm, nsp = case(dtype)
    sums = loss_sums(PretrainingLogits(mlm, nsp), batch)
    for logits, labels, ours in (
        (mlm, batch.labels, sums.mlm),
        (nsp, batch.next_sentence_label, sums.nsp),
    ):
        precise = logits if dtype == torch.float64 else logits.float()
        theirs = F.cross_entropy(precise, labels, reduction="sum")
        assert ours.dtype == precise.dtype
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(loss / 7, logits)[0] for loss in (ours, theirs)]
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)


def test_nothing_masked_is_zero_with_a_gradient() -> None:
    batch, mlm, nsp = case(torch.float32, masked_share=0)
    sums = loss_sums(PretrainingLogits(mlm, nsp), batch)
    assert sums.mlm.item() == 0
    (gradient,) = torch.autograd.grad(sums.mlm, mlm)
    assert gradient.shape == (0, 104)


def test_a_second_backward_is_refused() -> None:
    batch, mlm, nsp = case(torch.float32)
    loss = loss_sums(PretrainingLogits(mlm, nsp), batch).mlm
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]

"""The summed cross-entropy is torch's, forward and backward, with full logits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.blocks import Blocks, cross_entropy_sum
from mlperf_bert.model.layers import PretrainingLogits, correct_predictions, loss_sums
from model_cases import TINY, gradients, ragged_batch, scattered_model


def case(dtype, masked_share=0.15):
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
def test_equals_torch(dtype, tolerance):
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


def with_unused_slots(batch):
    """The last of each kind of label, and one more, taken as unused."""
    labels, next_labels = batch.labels.clone(), batch.next_sentence_label.clone()
    labels[[3, -1]] = next_labels[-1] = IGNORED
    return replace(batch, labels=labels, next_sentence_label=next_labels)


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_unused_slots_add_exactly_nothing(poison):
    batch, mlm, nsp = case(torch.float32)
    batch = with_unused_slots(batch)
    for logits, labels, name in (
        (mlm, batch.labels, "mlm"),
        (nsp, batch.next_sentence_label, "nsp"),
    ):
        is_used = labels != IGNORED
        poisoned = logits.detach().clone()
        poisoned[~is_used] = poison
        poisoned.requires_grad_()
        both = {"mlm": mlm, "nsp": nsp, name: poisoned}
        ours = getattr(loss_sums(PretrainingLogits(**both), batch), name)
        theirs = F.cross_entropy(logits[is_used], labels[is_used], reduction="sum")
        torch.testing.assert_close(ours, theirs)
        (gradient,) = torch.autograd.grad(ours, poisoned)
        assert not gradient[~is_used].any()
        expected = torch.autograd.grad(theirs, logits)[0]
        torch.testing.assert_close(gradient[is_used], expected[is_used], rtol=0, atol=1e-6)


def test_the_highest_score_is_correct_and_an_unused_slot_never():
    batch, mlm, nsp = case(torch.float32)
    batch = with_unused_slots(batch)
    scores = F.one_hot(batch.labels.clamp(min=0), mlm.shape[1]).float()
    scores[1], scores[-1] = -scores[1], float("nan")
    expected = batch.labels != IGNORED
    expected[1] = False
    assert torch.equal(correct_predictions(PretrainingLogits(scores, nsp), batch), expected)


def test_a_second_backward_is_refused():
    batch, mlm, nsp = case(torch.float32)
    loss = loss_sums(PretrainingLogits(mlm, nsp), batch).mlm
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm"])
def test_a_model_gives_the_losses_of_its_logits(objective):
    batch = with_unused_slots(ragged_batch((7, 31, 12, 64)))
    config = replace(TINY, objective=objective)
    model = scattered_model(config, spread=0.2, dtype=torch.float64)
    both = model(batch, "loss_sums"), loss_sums(model(batch), batch)
    found, expected = ([part for part in sums if part is not None] for sums in both)
    assert len(found) == (2 if objective == "mlm_nsp" else 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    pairs = (gradients(model, torch.stack(each).sum()).values() for each in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_in_its_logits_memory_is_that_of_given_logits_to_the_bit(dtype):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True)
        for shape in ((37, 24), (104, 24), (104,))
    )
    labels = torch.randint(104, (37,), generator=generator)
    labels[5] = IGNORED
    logits = F.linear(hidden, weight, bias)
    given = logits.detach().clone()
    expected = cross_entropy_sum(logits, labels)
    assert torch.equal(logits, given)  # others may read what they handed in
    found = Blocks().masked_lm_loss(hidden, weight, bias, labels)
    assert torch.equal(found, expected)
    both = (torch.autograd.grad(0.3 * loss, (hidden, weight, bias)) for loss in (found, expected))
    assert all(torch.equal(*each) for each in zip(*both, strict=True))

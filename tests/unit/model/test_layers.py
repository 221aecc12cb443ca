"""The summed cross-entropy is torch's, forward and backward; which blocks are chosen.

What blocks compute test_against_transformers.py shows.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.errors import ConfigError
from mlperf_bert.model import choices
from mlperf_bert.model.blocks import Blocks, cross_entropy_sum, side_by_side
from mlperf_bert.model.choices import MOST_CHANNELS, choose_blocks
from mlperf_bert.model.layers import PretrainingLogits, correct_predictions
from model_cases import TINY, gradients, loss_sums, ragged_batch, scattered_model


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


def with_unused_slots(batch):
    """The last of each kind of label, and one more, taken as unused."""
    labels, next_labels = batch.labels.clone(), batch.next_sentence_label.clone()
    labels[[3, -1]] = next_labels[-1] = IGNORED
    return replace(batch, labels=labels, next_sentence_label=next_labels)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_the_sum_is_torchs_and_unused_slots_add_exactly_nothing(poison, dtype, tolerance):
    batch, mlm, nsp = case(dtype)
    batch = with_unused_slots(batch)
    for logits, labels, name in (
        (mlm, batch.labels, "mlm"),
        (nsp, batch.next_sentence_label, "nsp"),
    ):
        is_used = labels != IGNORED
        poisoned = logits.detach().clone()
        poisoned[~is_used] = poison
        both = {"mlm": mlm, "nsp": nsp, name: poisoned.requires_grad_()}
        ours = getattr(loss_sums(PretrainingLogits(**both), batch), name)
        precise = logits if dtype == torch.float64 else logits.float()
        theirs = F.cross_entropy(precise[is_used], labels[is_used], reduction="sum")
        assert ours.dtype == precise.dtype
        torch.testing.assert_close(ours, theirs)
        found = torch.autograd.grad(ours / 7, poisoned)[0]
        expected = torch.autograd.grad(theirs / 7, logits)[0]
        assert found.dtype == dtype and not found[~is_used].any()
        assert torch.equal(poisoned[is_used], logits[is_used])  # others may read them
        torch.testing.assert_close(found[is_used], expected[is_used], rtol=0, atol=tolerance)


@pytest.mark.parametrize("unlikely", [0.0, 80.0, 200.0])  # nats; 87 is the most that fp32 can hold
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_the_masked_lm_loss_is_that_of_its_logits(dtype, tolerance, unlikely):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in ((9, 16), (40, 16), (40,))
    )
    labels = torch.randint(40, (9,), generator=generator)
    labels[[2, 8]] = IGNORED
    with torch.no_grad():
        hidden *= 0.3
        bias[labels[0]] -= unlikely
    found = Blocks().masked_lm_loss(hidden, weight, bias, labels)
    expected = cross_entropy_sum(F.linear(hidden, weight, bias), labels)
    assert found.dtype == expected.dtype and found > unlikely
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    factors = (hidden, weight, bias)
    for one, other in zip(
        torch.autograd.grad(found / 7, factors),
        torch.autograd.grad(expected / 7, factors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_masked_lm_loss_follows_autocast():
    generator = torch.Generator().manual_seed(4)
    factors = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((5, 16), (24, 16), (24,))
    ]
    labels = torch.randint(24, (5,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        found = Blocks().masked_lm_loss(*factors, labels)
        expected = cross_entropy_sum(F.linear(*factors), labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, factors), torch.autograd.grad(expected, factors), strict=True
    ):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)


def test_one_tensor_of_logits_serves_both_passes():
    rows, words = 128, 4096
    factors = [torch.randn(shape).requires_grad_() for shape in ((rows, 8), (words, 8), (words,))]
    labels = torch.randint(words, (rows,))
    blocks, logits = Blocks(), 4 * rows * words

    def allocated(count=1):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            losses = [blocks.masked_lm_loss(*factors, labels) for _ in range(count)]
            torch.stack(losses).sum().backward()
        return sum(max(each.self_cpu_memory_usage, 0) for each in recorded.events())

    assert logits <= allocated() < 1.5 * logits
    assert allocated() < 0.5 * logits  # the next step has the same memory
    assert logits < allocated(2) < 2 * logits  # a second loss before the backward pass needs more


def test_losses_of_several_steps_do_not_share_memory_too_early():
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(24, 8, generator=generator), torch.randn(24, generator=generator)
    batches = [
        (torch.randn(rows, 8, generator=generator).requires_grad_(), torch.arange(rows))
        for rows in (5, 9, 3)
    ]
    blocks = Blocks()
    blocks.masked_lm_loss(batches[0][0], weight, bias, batches[0][1])  # without a backward pass
    losses = [blocks.masked_lm_loss(hidden, weight, bias, labels) for hidden, labels in batches]
    found = torch.autograd.grad(sum(losses), [hidden for hidden, _ in batches])
    for (hidden, labels), gradient in zip(batches, found, strict=True):
        loss = cross_entropy_sum(F.linear(hidden, weight, bias), labels)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, hidden)[0])


def test_the_highest_score_is_correct_and_an_unused_slot_never():
    batch, mlm, nsp = case(torch.float32)
    batch = with_unused_slots(batch)
    scores = F.one_hot(batch.labels.clamp(min=0), mlm.shape[1]).float()
    scores[1], scores[-1] = -scores[1], float("nan")
    expected = batch.labels != IGNORED
    expected[1] = False
    assert torch.equal(correct_predictions(PretrainingLogits(scores, nsp), batch), expected)


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


CPU, META, CUDA = (torch.device(kind) for kind in ("cpu", "meta", "cuda"))


@pytest.mark.parametrize(
    ("device", "hidden", "no_triton", "reason"),
    [
        (CPU, 24, None, "it needs CUDA"),
        (META, 24, None, "it needs CUDA"),
        (CUDA, MOST_CHANNELS + 1, None, "need 4096 at most"),
        (CUDA, 24, "no compiler", "no compiler"),
        (CUDA, MOST_CHANNELS, None, None),
    ],
)
def test_fused_blocks_are_chosen_where_they_can_run(device, hidden, no_triton, reason, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: no_triton)

    def chosen(name):
        config = ModelSection(kernels=name, hidden_size=hidden, num_heads=1)
        return type(choose_blocks(config, device)).__name__

    assert chosen("reference") == "Blocks"
    if reason is None:
        assert chosen("auto") == chosen("fused") == "FusedBlocks"
        return
    assert chosen("auto") == "Blocks"
    words = rf"model\.kernels.*'fused' cannot run on this machine because .*{reason}.*'reference'"
    with pytest.raises(ConfigError, match=words):
        chosen("fused")


def test_columns_of_one_tensor_are_put_together_without_a_copy():
    whole = torch.randn(5, 12)
    parts = whole.split((3, 4, 5), dim=1)
    joined = side_by_side(parts)
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()
    shifted = whole.split((2, 3, 4, 3), dim=1)[1:]  # rows are wider than these three
    swapped = (parts[0], parts[2], parts[1])
    elsewhere = (parts[0], parts[1].clone(), parts[2])
    for others in (shifted, swapped, elsewhere):
        assert torch.equal(side_by_side(others), torch.cat(others, dim=1))

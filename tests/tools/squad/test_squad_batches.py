"""The plan of updates and the microbatches that are made of it."""

import numpy as np
import pytest
import torch

from bert_tools.squad.batches import (
    UpdatePlan,
    WindowReader,
    evaluation_batches,
    span_loss_sum,
)
from squad_cases import LONGEST, made_up_windows, small_settings

LENGTHS = np.random.default_rng(1).integers(5, 200, 50)


def plan(seed: int = 1, **changes: int) -> UpdatePlan:
    return UpdatePlan.make(LENGTHS, small_settings("single", seed=seed, updates=25, **changes))


def test_every_window_once_an_epoch() -> None:
    drawn = plan().windows.reshape(25, 8)
    in_order = drawn.ravel()  # of 200: four epochs of 50; the cut changes places in a batch only
    assert sorted(np.bincount(in_order, minlength=50)) == [4] * 50
    first_epoch = set(in_order[:48]) | set(drawn[6])
    assert len(set(in_order[:48])) == 48 and first_epoch == set(range(50))


def test_the_cut_changes_no_batch() -> None:
    batches = [np.sort(plan(microbatches=count).windows.reshape(25, 8)) for count in (1, 2, 8)]
    assert (batches[0] == batches[1]).all() and (batches[0] == batches[2]).all()


def test_seeds_give_other_orders_and_the_same_seed_the_same() -> None:
    assert (plan(3).windows == plan(3).windows).all()
    assert (plan(3).windows != plan(4).windows).any()


def test_microbatches_have_similar_tokens() -> None:
    found = plan(microbatches=2)
    assert (found.tokens == LENGTHS[found.windows].sum(axis=2)).all()
    as_drawn = LENGTHS[np.sort(found.windows.reshape(25, 8))].reshape(25, 2, 4).sum(axis=2)
    spread = [(each.max(axis=1) - each.min(axis=1)).mean() for each in (found.tokens, as_drawn)]
    assert spread[0] < spread[1] / 2


def test_capacity_holds_all() -> None:
    found = plan()
    capacity = found.capacity(200)
    assert found.tokens.max() <= capacity < found.tokens.max() + 16


def test_evaluation_batches_hold_every_window_once() -> None:
    batches = evaluation_batches(LENGTHS, 300)
    assert sorted(np.concatenate(batches)) == list(range(50))
    assert all(LENGTHS[each].sum() <= 300 or len(each) == 1 for each in batches)
    assert [len(each) for each in evaluation_batches(LENGTHS, 1)] == [1] * 50


def test_a_batch_lays_windows_end_to_end() -> None:
    windows = made_up_windows(6)
    batch = WindowReader(windows).batch([4, 1])
    first = np.cumsum(windows.lengths) - windows.lengths
    expected = [windows.input_ids[first[n] : first[n] + windows.lengths[n]] for n in (4, 1)]
    tokens = batch.tokens
    assert tokens.input_ids.tolist() == np.concatenate(expected).tolist()
    assert tokens.lengths == tuple(windows.lengths[[4, 1]])
    assert tokens.position_ids.tolist() == [*range(tokens.lengths[0]), *range(tokens.lengths[1])]
    types = [
        int(p >= windows.segment_b_start[n]) for n in (4, 1) for p in range(windows.lengths[n])
    ]
    assert tokens.token_type_ids.tolist() == types
    assert tokens.sample_ids.tolist() == [4, 1]
    assert tokens.cu_seqlens.tolist() == [0, tokens.lengths[0], sum(tokens.lengths)]
    assert batch.starts.tolist() == windows.starts[[4, 1]].tolist()
    assert max(tokens.lengths) <= LONGEST


def test_loss_is_the_mean_of_two_cross_entropies_summed_over_windows() -> None:
    windows = made_up_windows(5)
    batch = WindowReader(windows).batch(range(5))
    scores = torch.randn((batch.num_tokens, 2), dtype=torch.float64, requires_grad=True)
    expected = torch.zeros((), dtype=torch.float64)
    for number, of_window in enumerate(scores.split(batch.tokens.lengths)):
        for column, answer in enumerate((windows.starts[number], windows.ends[number])):
            expected = expected - of_window[:, column].log_softmax(0)[answer] / 2
    loss = span_loss_sum(scores, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (ours,) = torch.autograd.grad(loss, scores)
    (theirs,) = torch.autograd.grad(expected, scores)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert span_loss_sum(scores.detach().bfloat16(), batch).dtype == torch.float32

"""Batches by plan; the question model is `transformers`' own, its parts together the whole."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from bert_tools.squad.batches import UpdatePlan, WindowReader, evaluation_batches, span_loss_sum
from bert_tools.squad.engines import RankMesh, make_engine
from bert_tools.squad.loop import Loop
from bert_tools.squad.measures import StageClock
from bert_tools.squad.model import (
    Part,
    Start,
    draw_weights,
    even_split,
    make_part,
    save_for_transformers,
    whole,
)
from mlperf_bert.errors import CheckpointError, ConfigError
from squad_cases import (
    LONGEST,
    SMALL,
    VOCABULARY,
    made_up_windows,
    small_settings,
    vocabulary_of,
    windows_of,
)

CPU = torch.device("cpu")
WIDE = replace(SMALL, initializer_range=0.2)
WEIGHTS = draw_weights(WIDE, 3)


def batch_of(count):
    return WindowReader(made_up_windows(count)).batch(range(count))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "model"
    words = vocabulary_of(*(f"w{number}" for number in range(VOCABULARY - 5)))
    save_for_transformers(directory, WIDE, WEIGHTS, words)
    with pytest.raises(CheckpointError, match="already exists"):
        save_for_transformers(directory, WIDE, WEIGHTS, words)
    return directory


def theirs(saved):
    """`transformers`' model of the saved directory, in float64."""
    from transformers import AutoModelForQuestionAnswering

    loaded, problems = AutoModelForQuestionAnswering.from_pretrained(
        saved, local_files_only=True, output_loading_info=True
    )
    assert not problems["missing_keys"] and not problems["unexpected_keys"]
    return loaded.double()


def padded(batch):
    """The batch's windows as rows of equal length."""
    tokens = batch.tokens
    rows = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": rows(tokens.input_ids.split(tokens.lengths), batch_first=True),
        "attention_mask": rows([torch.ones(n) for n in tokens.lengths], batch_first=True),
        "token_type_ids": rows(tokens.token_type_ids.split(tokens.lengths), batch_first=True),
    }


def test_the_saved_directory_loads_in_transformers_and_scores_alike(saved):
    from transformers import AutoTokenizer

    batch = batch_of(7)
    ours = make_part(WIDE, whole(WIDE), WEIGHTS, CPU, "fp64", 0)(None, batch, "scores")
    inputs = padded(batch)
    found = theirs(saved)(**inputs)
    is_real = inputs["attention_mask"] > 0
    expected = torch.stack([found.start_logits[is_real], found.end_logits[is_real]], dim=1)
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() < 1e-10
    tokenizer = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    assert tokenizer("w0", "w1")["input_ids"] == [2, 5, 3, 6, 3]
    assert tokenizer.model_max_length == LONGEST


@pytest.mark.parametrize("cuts", [(0, 4), (0, 2, 4), (0, 1, 2, 3, 4), (0, 3, 4)])
def test_parts_one_behind_the_other_are_the_whole(cuts):
    batch = batch_of(5)
    model = replace(WIDE, hidden_dropout=0.1, attention_dropout=0.2)
    expected = make_part(model, whole(model), WEIGHTS, CPU, "fp64", 7)(None, batch, "loss_sum")
    hidden = None
    names = []
    for first, end in itertools.pairwise(cuts):
        part = make_part(model, Part(first, end, 4), WEIGHTS, CPU, "fp64", 7)
        names += [name for name, _ in part.named_parameters()]
        hidden = part(hidden, batch, "loss_sum")
    assert hidden is not None and hidden.item() == pytest.approx(expected.item(), rel=1e-12)
    assert sorted(names) == sorted(WEIGHTS)


def test_dropout_goes_by_window_and_update_not_by_batch():
    model = replace(WIDE, hidden_dropout=0.1, attention_dropout=0.1)
    part = make_part(model, whole(model), WEIGHTS, CPU, "fp64", 7)
    reader = WindowReader(made_up_windows(6))
    together = part(None, reader.batch([0, 1, 2]), "loss_sum").item()
    alone = [part(None, reader.batch([each]), "loss_sum").item() for each in (2, 0, 1)]
    assert sum(alone) == pytest.approx(together, rel=1e-12)
    part.update.fill_(1)
    assert part(None, reader.batch([0, 1, 2]), "loss_sum").item() != pytest.approx(together)


def same_length():
    """Without padding `transformers`' loss is over the same tokens as ours."""
    windows = made_up_windows(40)
    count = int(windows.lengths.sum()) // 8
    lengths, segments, ends = (np.full(count, value) for value in (8, 3, 7))
    return windows_of(windows.input_ids[: 8 * count], lengths, segments, np.arange(count) % 8, ends)


def test_updates_are_those_of_plain_torch(saved):
    windows, settings = same_length(), small_settings("single", precision="fp64", updates=6)
    plan, reader = UpdatePlan.make(windows.lengths, settings), WindowReader(windows)
    mesh, clock = RankMesh(), StageClock(0)
    start = Start(WIDE, WEIGHTS, "")
    engine = make_engine(settings, start, plan, mesh, CPU, clock)
    log = Loop(settings, engine, plan, reader.batch, clock).run()
    twin = theirs(saved)
    exempt = [each for name, each in twin.named_parameters() if each.dim() == 1]
    decayed = [each for each in twin.parameters() if each.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, eps=1e-6)
    losses, norms = [], []
    for number in range(6):
        # 10 % of 6 updates warm up: 1, of which the rate is the full one; then down to 0 after 6.
        rate = 1e-3 * (6 - number) / 6
        batch = reader.batch(plan.windows[number].ravel())
        inputs = padded(batch)
        loss = twin(**inputs, start_positions=batch.starts, end_positions=batch.ends).loss
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    # clip_grad_norm_ adds 1e-6 to the norm.
    assert log.losses == pytest.approx(losses, rel=1e-7)
    assert log.grad_norms == pytest.approx(norms, rel=1e-5)
    assert max(norms) > 1


def test_layers_are_split_evenly():
    assert even_split(12, 4) == [0, 3, 6, 9, 12]
    assert even_split(5, 2) == [0, 2, 5]  # the first has the embeddings
    with pytest.raises(ConfigError, match="has 8 stages, but the model has only 7 layers"):
        even_split(7, 8)


LENGTHS = np.random.default_rng(1).integers(5, 200, 50)


def plan(seed=1, **changes):
    return UpdatePlan.make(LENGTHS, small_settings("single", seed=seed, updates=25, **changes))


def test_every_window_once_an_epoch_and_once_in_evaluation():
    drawn = plan().windows.reshape(25, 8)
    in_order = drawn.ravel()  # of 200: four epochs of 50; the cut changes places in a batch only
    assert sorted(np.bincount(in_order, minlength=50)) == [4] * 50
    first_epoch = set(in_order[:48]) | set(drawn[6])
    assert len(set(in_order[:48])) == 48 and first_epoch == set(range(50))
    batches = [np.sort(plan(microbatches=count).windows.reshape(25, 8)) for count in (1, 2, 8)]
    assert (batches[0] == batches[1]).all() and (batches[0] == batches[2]).all()
    assert (plan().windows != plan(4).windows).any()
    whole_set = evaluation_batches(LENGTHS)
    assert sorted(np.concatenate(whole_set)) == list(range(50))
    assert [len(each) for each in whole_set] == [32, 18]


def test_microbatches_have_similar_tokens():
    found = plan(microbatches=2)
    assert (found.tokens == LENGTHS[found.windows].sum(axis=2)).all()
    as_drawn = LENGTHS[np.sort(found.windows.reshape(25, 8))].reshape(25, 2, 4).sum(axis=2)
    spread = [(each.max(axis=1) - each.min(axis=1)).mean() for each in (found.tokens, as_drawn)]
    assert spread[0] < spread[1] / 2


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_halves_that_measure_noise_are_drawn_at_random(microbatches):
    """If they were cut by length, they would differ by more than the noise of a gradient."""
    halved = plan(microbatches=microbatches, noise_every=1)
    whole = plan(microbatches=microbatches)
    both = [each.windows.reshape(25, 2, 4) for each in (halved, whole)]
    assert (np.sort(both[0].reshape(25, 8)) == np.sort(both[1].reshape(25, 8))).all()
    first, second = LENGTHS[both[0]].sum(axis=2).T
    assert 5 < (first > second).sum() < 20
    # Balance would make two micro-batches equal; chance does not.
    assert abs(first - second).mean() > 50


def test_a_batch_lays_windows_end_to_end():
    windows = made_up_windows(6)
    batch = WindowReader(windows).batch([4, 1])
    rows = np.split(windows.input_ids, np.cumsum(windows.lengths))
    assert batch.tokens.input_ids.tolist() == [*rows[4], *rows[1]]
    assert batch.tokens.lengths == tuple(windows.lengths[[4, 1]])
    types = [
        int(p >= windows.segment_b_start[n]) for n in (4, 1) for p in range(windows.lengths[n])
    ]
    assert batch.tokens.token_type_ids.tolist() == types
    assert batch.starts.tolist() == windows.starts[[4, 1]].tolist()


def test_loss_is_the_mean_of_two_cross_entropies_summed_over_windows():
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

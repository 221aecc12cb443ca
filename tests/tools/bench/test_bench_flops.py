"""Operations of a step: the published count for BERT-large, and what a step of ours really does."""

from dataclasses import replace

import numpy as np
import pytest
from bench_cases import CPU
from torch.utils.flop_counter import FlopCounterMode

from bert_tools.bench.flops import done_flops, model_flops
from bert_tools.bench.synthetic import synthetic_samples
from bert_tools.common.length_histogram import wikipedia_lengths
from mlperf_bert.config.sections import MAX_PREDICTIONS, STORED_MASKING_RATE, ModelSection
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import CapacityPlan, StaticShape
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import loss_sums, pretraining_loss

# GFLOP of a sequence, forward and backward, in the study of published results that the goals of
# this project come from, and its sequences: mean length, mean square, mean masked positions.
PUBLISHED = {"encoder": 461.05, "attention": 28.99, "head": 7.36, "pooler": 0.01}
PUBLISHED_TOTAL = 497.4
MEAN, MEAN_SQUARE, MASKED = 254.45, 98_300, 38.0
TINY = ModelSection(
    vocab_size=40,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    attention="reference",
    kernels="reference",
)
MODERN = replace(TINY, architecture="modern", objective="mlm", attention_window=32)


def test_bert_large_is_the_published_count() -> None:
    deviation = (MEAN_SQUARE - MEAN**2) ** 0.5
    flops = model_flops(ModelSection(), [MEAN - deviation, MEAN + deviation], [MASKED] * 2)
    for part, expected in PUBLISHED.items():
        # The pooler is published with two digits behind the point.
        assert getattr(flops, part) / 2e9 == pytest.approx(expected, rel=0.005, abs=0.005)
    assert flops.total / 2e9 == pytest.approx(PUBLISHED_TOTAL, rel=0.005)


def test_shares_at_our_lengths_are_the_published_ones() -> None:
    histogram = wikipedia_lengths()
    masked = np.clip(np.rint(STORED_MASKING_RATE * histogram.lengths), 1, MAX_PREDICTIONS)
    total = dict.fromkeys(PUBLISHED, 0.0)
    for length, count, num_masked in zip(
        histogram.lengths.tolist(), histogram.counts.tolist(), masked.tolist(), strict=True
    ):
        flops = model_flops(ModelSection(), [length], [num_masked])
        for part in total:
            total[part] += count * getattr(flops, part)
    for part, expected in PUBLISHED.items():
        share = total[part] / sum(total.values())
        assert share == pytest.approx(expected / PUBLISHED_TOTAL, abs=0.005)


def test_no_masked_word_is_counted_twice() -> None:
    one = model_flops(TINY, [8], [2])
    two = model_flops(TINY, [8, 8], [2, 2])
    for part in PUBLISHED:
        assert getattr(two, part) == 2 * getattr(one, part)
    assert one.total == one.encoder + one.attention + one.head + one.pooler


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", [TINY, MODERN], ids=["bert", "modern"])
def test_done_is_what_a_step_multiplies(model: ModelSection, is_padded: bool) -> None:
    """Equal lengths, so that the padded reference attention computes no padding of its own."""
    batch = batch_of_equal_lengths(is_padded)
    done = done_flops(model, batch)
    assert done.total < model_flops(model, batch.lengths, batch.masked_counts).total
    assert counted_flops(model, batch) == pytest.approx(done.total)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("every", [2, 3])  # of three layers the last sees all, or a window
def test_windows_count_as_what_tokens_see(every: int, is_padded: bool) -> None:
    """The reference multiplies all pairs, and masks those that are too far apart."""
    model = replace(MODERN, attention_window=4, global_attention_every=every)
    batch = batch_of_equal_lengths(is_padded)
    place = np.arange(8)
    is_near = np.abs(place[:, None] - place) <= 2
    hidden = batch.position_ids[batch.masked_token_index].numpy()
    of_layer = (8 - is_near.sum(axis=1)) @ np.bincount(batch.position_ids, minlength=8)
    of_last = 0 if every == 2 else (8 - is_near.sum(axis=1))[hidden].sum()
    unseen = 6 * 2 * 16 * (of_layer + of_last)
    done = done_flops(model, batch)
    assert counted_flops(model, batch) == pytest.approx(done.total + unseen)
    published = [model_flops(each, batch.lengths, []) for each in (MODERN, model)]
    num_local = 1 if every == 2 else 2
    missing = 6 * 2 * 16 * num_local * of_layer
    assert published[0].total - published[1].total == pytest.approx(missing)


def batch_of_equal_lengths(is_padded: bool) -> UnpaddedBatch:
    samples = synthetic_samples(np.full(3, 8), vocab_size=40, max_predictions=2, seed=1)
    batch = make_batch(samples, np.arange(3), mlm_denominator=3.0, nsp_denominator=3.0)
    assert batch.lengths == (8, 8, 8)
    if is_padded:
        capacity = CapacityPlan(tokens=32, sequences=3, masked=5)
        batch = pad(batch, StaticShape.of(capacity, max_seqlen=8, max_masked=2))
        assert max(batch.lengths) == min(length for length in batch.lengths if length)
    return batch


def counted_flops(config: ModelSection, batch: UnpaddedBatch) -> float:
    """Operations of a step by torch's count."""
    model = BertForPretraining(config, CPU)
    with FlopCounterMode(display=False) as counter:
        loss = pretraining_loss(loss_sums(model(batch), batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()

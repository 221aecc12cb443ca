"""Masks drawn anew: by the rule, keyed by seed, step and sample alone, and as the plan counts."""

from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.config.sections import MASKING_RATES
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.compiled_masking import ALL_DRAWN, draw_masks
from mlperf_bert.data.index import (
    CountsByLength,
    LengthIndex,
    masked_count_table,
    special_ids,
)
from mlperf_bert.data.loader import DirectSource
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare import build
from plain_masking import plain_masks
from shard_sets import MAX_LENGTH, originals, write_set

RATE = 0.3
MOST = 9  # fewer than 30 % of the longest: the limit is met
IDS = np.array([5, 60, 17, 33, 2, 48])


@pytest.fixture(scope="module")
def a_set(tmp_path_factory):
    directory = tmp_path_factory.mktemp("masking") / "set"
    return directory, write_set(directory, [(40, "<u2"), (30, "<u2")], seed=1)


def masks_of(a_set, seed=3):
    return DynamicMasks(*a_set, rate=RATE, max_predictions=MOST, seed=seed)


def read(a_set, ids):
    samples = SampleReader(*a_set).read(ids)
    return make_batch(samples, ids, mlm_denominator=7.0, nsp_denominator=0.3)


def masked_rows(batch):
    """Rows by sample: masked position, input token, original token."""
    labels = list(zip(batch.masked_token_index.tolist(), batch.labels.tolist(), strict=True))
    found = {}
    for sample, start, end in zip(
        batch.sample_ids.tolist(),
        batch.cu_seqlens[:-1].tolist(),
        batch.cu_seqlens[1:].tolist(),
        strict=True,
    ):
        own = [each for each in labels if start <= each[0] < end]
        found[sample] = [(row - start, int(batch.input_ids[row]), label) for row, label in own]
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 70), min_size=1, max_size=5),
    sample=st.integers(0, 2**40),
    number=st.integers(0, 2**31),
    seed=st.integers(0, 2**63 - 1),
    special=st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True).map(sorted),
    of_shards=st.booleans(),
)
def test_compiled_equals_plain(lengths, sample, number, seed, special, of_shards):
    generator = np.random.default_rng(sum(lengths))
    width = np.uint16 if of_shards else np.int64  # as `prepare` and training have them
    tokens = generator.integers(0, 12, sum(lengths)).astype(width)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64 if of_shards else np.int32)
    counts = []
    for start, end in pairwise(offsets):
        available = int((~np.isin(tokens[start:end], special)).sum())
        counts.append(min(available, 9))
    ids = sample + np.arange(len(lengths))
    positions, labels = np.zeros((2, sum(counts)), dtype=width)
    expected = [
        plain_masks(
            tokens[start:end].tolist(),
            sample=int(ids[i]),
            count=counts[i],
            special=special,
            mask_id=special[0],
            vocab_size=12,
            number=number,
            seed=seed,
        )
        for i, (start, end) in enumerate(pairwise(offsets))
    ]
    done = draw_masks(
        *(tokens, offsets, ids, np.array(counts), np.array(special)),
        *(special[0], 12, number, seed, positions, labels),
    )
    assert done == ALL_DRAWN
    for found, which in ((tokens, 0), (positions, 1), (labels, 2)):
        assert found.tolist() == [value for each in expected for value in each[which]]


def test_what_was_masked_is_put_back_and_the_rest_stays(a_set):
    before = read(a_set, IDS)
    kept = before.input_ids.clone()
    drawn = masks_of(a_set).of(before, step=1)
    assert torch.equal(before.input_ids, kept)
    assert torch.equal(originals(drawn), originals(before))
    for name in ("position_ids", "token_type_ids", "cu_seqlens", "sample_ids"):
        assert torch.equal(getattr(drawn, name), getattr(before, name))
    assert torch.equal(drawn.next_sentence_label, before.next_sentence_label)
    assert (drawn.mlm_denominator, drawn.nsp_denominator) == (7.0, before.nsp_denominator)
    table = masked_count_table(MAX_LENGTH, MOST, RATE)
    assert drawn.masked_counts == tuple(table[list(before.lengths)].tolist())
    assert special_ids(a_set[1]).tolist() == [0, 2, 3, 4]  # pad, cls, sep, mask
    assert MOST in drawn.masked_counts and min(drawn.masked_counts) < MOST
    # In one block of memory, which is copied to a device at once.
    assert drawn.block.untyped_storage().data_ptr() == drawn.labels.untyped_storage().data_ptr()


def test_masks_depend_on_seed_step_and_sample_alone(a_set):
    masks = masks_of(a_set)
    together = masked_rows(masks.of(read(a_set, IDS), step=4))
    for ids in np.split(IDS[::-1], 3):  # as other ranks would have them
        alone = masked_rows(masks_of(a_set).of(read(a_set, ids), step=4))
        assert alone == {sample: together[sample] for sample in ids.tolist()}
    for other in (
        masked_rows(masks.of(read(a_set, IDS), step=5)),
        masked_rows(masks_of(a_set, seed=4).of(read(a_set, IDS), step=4)),
    ):
        assert all(other[sample] != together[sample] for sample in together)


def test_batches_are_masked_by_their_step_and_counted_as_planned(a_set):
    set_dir, manifest = a_set
    index, masks = LengthIndex.open(set_dir), masks_of(a_set)
    planner = StepPlanner(
        UniformSampler(manifest.num_samples, 10, seed=8),
        index.lengths,
        CountsByLength(index.lengths, masked_count_table(MAX_LENGTH, MOST, RATE)),
        world_size=1,
        stored_masked=index.masked_counts,
    )
    source = DirectSource(SampleReader(set_dir, manifest), 0, masks)
    for plan in (planner.plan(2), planner.plan(9)):  # in the second epoch
        (batch,) = source.micro_batches(plan)
        assert masked_rows(batch) == masked_rows(masks.of(read(a_set, plan.sample_ids), plan.step))
        assert batch.mlm_denominator == len(batch.labels) == plan.num_masked[0, 0]
        assert plan.num_masked[0, 0] != plan.stored_masked.sum()


@pytest.mark.parametrize("special_per_sequence", [2, 3])
def test_every_length_has_as_many_words_as_are_masked(special_per_sequence):
    for rate in (MASKING_RATES.low, 0.15, 0.3, MASKING_RATES.high):
        table = masked_count_table(4096, 255, rate)
        lengths = np.arange(special_per_sequence + 1 + (special_per_sequence == 3), 4097)
        assert (table[lengths] <= lengths - special_per_sequence).all()
        assert table.min() == 1


def test_a_sample_without_words_enough_is_one_line(a_set):
    batch = read(a_set, IDS)
    start, end = batch.cu_seqlens[2:4].tolist()
    batch.input_ids[start:end] = 3
    index = batch.masked_token_index
    batch.labels[:] = batch.input_ids[index]
    with pytest.raises(DataError) as caught:
        masks_of(a_set).of(batch, step=1)
    assert f"sample {IDS[2]} has fewer maskable tokens than" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_cache_is_an_error_in_one_line(a_set, monkeypatch):
    monkeypatch.setattr(DynamicMasks, "_draw", Mock(side_effect=EOFError("Ran out of input")))
    with pytest.raises(ConfigError, match=r"Ran out of input.*nbi"):
        masks_of(a_set)
    monkeypatch.setattr(build, "_make_examples", DynamicMasks._draw)
    with pytest.raises(ConfigError, match=r"Ran out of input.*nbi"):
        build.compile_maker("pair", range(5))

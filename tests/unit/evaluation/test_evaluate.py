"""Evaluation: the whole set, counts by definition, independent of ranks; in turn and beside."""

from pathlib import Path

import numpy as np
import pytest
import torch

from graph_cases import evaluator_of, small_model
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.evaluation.evaluate import Accuracy
from mlperf_bert.model.bert import BertForPretraining
from support import mlperf_records

BATCH, INTERVAL = 16, 160  # of the tiny config


@pytest.fixture(scope="module")
def model() -> BertForPretraining:
    return small_model(3, hidden_dropout=0.5)


def test_counts_are_those_of_one_sample_at_a_time(
    model: BertForPretraining, synthetic_data: Path
) -> None:
    index = LengthIndex.open(synthetic_data / "eval")
    reader = SampleReader(synthetic_data / "eval", index.manifest)
    model.eval()
    right, total, right_at_mask, at_mask = 0, 0, 0, 0
    for sample in range(index.manifest.num_samples):
        batch = make_batch(
            reader.read(np.array([sample])),
            np.array([sample]),
            mlm_denominator=1.0,
            nsp_denominator=1.0,
        )
        with torch.no_grad():
            guesses = model(batch).mlm.argmax(dim=-1)
        hit = guesses == batch.labels
        masked = batch.input_ids[batch.masked_token_index] == index.manifest.mask_id
        right, total = right + int(hit.sum()), total + len(hit)
        right_at_mask += int((hit & masked).sum())
        at_mask += int(masked.sum())
    model.train()
    found = evaluator_of(synthetic_data, 600)(model)
    assert found == Accuracy(right, total, right_at_mask, at_mask)
    assert 0 < right < total
    assert model.training  # dropout is off during, and on again after


def test_ranks_share_the_set_without_overlap(
    model: BertForPretraining, synthetic_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluator_of(synthetic_data, 300)(model)
    shares = []
    monkeypatch.setattr("torch.distributed.all_reduce", shares.append)
    for rank in range(3):
        evaluator_of(synthetic_data, 300, rank=rank, world_size=3)(model)
    assert torch.stack(shares).sum(dim=0).tolist() == [
        *(whole.correct, whole.masked_tokens, whole.correct_at_mask, whole.mask_inputs)
    ]


def test_a_prepared_evaluation_follows_the_weights_of_its_own_model(
    model: BertForPretraining, synthetic_data: Path
) -> None:
    prepared = evaluator_of(synthetic_data, 600, step_mode="captured")
    prepared.prepare(model)
    assert model.training
    with pytest.raises(AssertionError):
        prepared(small_model(4))
    with prepared:
        first = prepared(model)
        assert first == evaluator_of(synthetic_data, 600)(model)
        bias = model.cls.predictions.bias
        with torch.no_grad():
            bias[7] += 100.0  # every guess is word 7
        assert prepared(model) == evaluator_of(synthetic_data, 600)(model) != first
        with torch.no_grad():
            bias[7] -= 100.0


def test_words_state_multiples_of_the_guess(synthetic_data: Path) -> None:
    index = LengthIndex.open(synthetic_data / "eval")
    assert index.manifest.baseline is not None
    twice = round(2 * index.manifest.baseline.context_free_accuracy * 1_000_000)
    words = evaluator_of(synthetic_data, 300).in_words(Accuracy(twice, 1_000_000, 0, 100))
    assert "(2.00 x guess)" in words and "on [MASK] inputs 0.0000 (0.00 x guess)" in words


def records(run_dir: Path, key: str) -> list[tuple[int, object]]:
    """Samples and value of every record of the MLPerf log with this key."""
    found = mlperf_records(run_dir / "result_0.txt", key)
    return [(record["metadata"].get("epoch_num"), record["value"]) for record in found]

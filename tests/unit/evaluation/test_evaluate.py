"""Evaluation: whole set, counts by definition, independent of ranks; words against the guess."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.evaluation.evaluate import Accuracy, Evaluator
from mlperf_bert.model.bert import BertForPretraining

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> BertForPretraining:
    config = ModelSection(
        vocab_size=69,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout=0.5,
        initializer_range=0.5,
    )
    return BertForPretraining(config, CPU, seed=3)


def evaluator(data: Path, num_tokens: int, **changed: Any) -> Evaluator:
    index = LengthIndex.open(data / "eval")
    reader = SampleReader(data / "eval", index.manifest)
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "device": CPU, "precision": "fp32"}
    return Evaluator(index, reader, tokens_per_forward=num_tokens, **{**alone, **changed})


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
    found = evaluator(synthetic_data, 600)(model)
    assert found == Accuracy(right, total, right_at_mask, at_mask)
    assert 0 < right < total
    assert model.training  # dropout is off during, and on again after


def test_ranks_share_the_set_without_overlap(
    model: BertForPretraining, synthetic_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluator(synthetic_data, 300)(model)
    shares = []
    monkeypatch.setattr("torch.distributed.all_reduce", shares.append)
    for rank in range(3):
        evaluator(synthetic_data, 300, rank=rank, world_size=3)(model)
    assert torch.stack(shares).sum(dim=0).tolist() == [
        *(whole.correct, whole.masked_tokens, whole.correct_at_mask, whole.mask_inputs)
    ]


def test_a_prepared_evaluation_follows_the_weights(
    model: BertForPretraining, synthetic_data: Path
) -> None:
    prepared = evaluator(synthetic_data, 600, step_mode="captured")
    prepared.prepare(model)
    assert model.training
    with prepared:
        first = prepared(model)
        assert first == evaluator(synthetic_data, 600)(model)
        bias = model.cls.predictions.bias
        with torch.no_grad():
            bias[7] += 100.0  # every guess is word 7
        assert prepared(model) == evaluator(synthetic_data, 600)(model) != first
        with torch.no_grad():
            bias[7] -= 100.0


def test_a_prepared_evaluation_is_of_its_own_model(
    model: BertForPretraining, synthetic_data: Path
) -> None:
    prepared = evaluator(synthetic_data, 600, step_mode="captured")
    prepared.prepare(model)
    with pytest.raises(AssertionError):
        prepared(BertForPretraining(model.config, CPU, seed=4))


def test_words_state_multiples_of_the_guess(synthetic_data: Path) -> None:
    index = LengthIndex.open(synthetic_data / "eval")
    assert index.manifest.baseline is not None
    twice = round(2 * index.manifest.baseline.context_free_accuracy * 1_000_000)
    words = evaluator(synthetic_data, 300).in_words(Accuracy(twice, 1_000_000, 0, 100))
    assert "(2.00 x guess)" in words and "on [MASK] inputs 0.0000 (0.00 x guess)" in words

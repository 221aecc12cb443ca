"""Weights that TensorFlow saved give our model the scores that TensorFlow's operators compute.

So every name, transpose and padding is the right one, not only of the right shape.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from bert_tools.convert.tensorflow import open_tensorflow
from bert_tools.convert.tensorflow_names import sort_names
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.shards import Samples
from mlperf_bert.model.bert import BertForPretraining
from tensorflow_cases import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    OBJECTS,
    POSITIONS,
    SCORES,
    V2,
    VOCAB_SIZE,
    inputs,
)

CONFIG = ModelSection(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_heads=HEADS,
    intermediate_size=INTERMEDIATE,
    max_position_embeddings=POSITIONS,
    attention="reference",
    kernels="reference",
)


def model_of(source: Path) -> BertForPretraining:
    """Our model in float64, with the weights of a checkpoint; rows that pad are NaN."""
    model = BertForPretraining(CONFIG, torch.device("cpu")).double()
    tensors = open_tensorflow(source)
    state = model.state_dict()
    names = sort_names(tensors).weights
    assert {ours.name for ours in names.values()} == state.keys()
    with torch.no_grad():
        for name, ours in names.items():
            value = torch.from_numpy(tensors[name].read())
            value = value.T if ours.is_transposed else value
            state[ours.name].fill_(torch.nan)[: len(value)].copy_(value)
    return model.eval()


def whole_batch() -> UnpaddedBatch:
    """The two sequences, with every position asked for."""
    arrays = inputs()
    is_there = arrays["input_mask"] == 1
    lengths = is_there.sum(axis=1)
    samples = Samples(
        input_ids=arrays["input_ids"][is_there],
        lengths=lengths,
        segment_b_start=lengths - arrays["segment_ids"].sum(axis=1),
        masked_positions=np.nonzero(is_there)[1],
        masked_ids=np.full(lengths.sum(), 5),
        masked_counts=lengths,
        next_sentence_label=np.zeros(2, np.int64),
    )
    return make_batch(samples, np.arange(2), mlm_denominator=1.0, nsp_denominator=1.0)


@pytest.mark.parametrize("source", [V2, OBJECTS], ids=["v2", "objects"])
def test_scores_are_those_of_tensorflow(source: Path) -> None:
    expected = np.load(SCORES)
    is_there = inputs()["input_mask"] == 1
    with torch.no_grad():
        found = model_of(source)(whole_batch())
    words = found.mlm[:, :VOCAB_SIZE].numpy()
    np.testing.assert_allclose(words, expected["mlm"][is_there], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.nsp.numpy(), expected["nsp"], rtol=0, atol=1e-10)
    assert expected["mlm"].std() > 0.1 and expected["nsp"].std() > 0.01

"""TensorFlow's names: every parameter there and back, and what is passed over."""

import pytest
import torch

from bert_tools.convert.tensorflow_names import OurTensor, parameter_name, sort_names, to_ours
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name
from tensorflow_cases import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    VOCAB_SIZE,
    bert_values,
    weight_shapes,
)


def our_shapes() -> dict[str, tuple[int, ...]]:
    config = ModelSection(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=POSITIONS,
    )
    state = BertForPretraining(config, torch.device("meta")).state_dict()
    return {name: tuple(value.shape) for name, value in state.items()}


def test_every_parameter_there_and_back() -> None:
    config = ModelSection(num_layers=11)  # two digits too
    names = list(BertForPretraining(config, torch.device("meta")).state_dict())
    theirs = [tensorflow_name(name) for name in names]
    assert len(set(theirs)) == len(names) == 16 * 11 + 14
    assert [parameter_name(name) for name in theirs] == names


def test_names_and_shapes_of_the_first_release() -> None:
    ours = our_shapes()
    found = {}
    for name, shape in weight_shapes().items():
        tensor = to_ours(name)
        found[tensor.name] = shape[::-1] if tensor.is_transposed else shape
        if len(shape) < 2 or "embeddings" in name or "seq_relationship" in name:
            assert not tensor.is_transposed
    assert found.keys() == ours.keys()
    words = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    for name, shape in found.items():
        padded = (-(-shape[0] // 8) * 8, *shape[1:]) if name in words else shape
        assert padded == ours[name], name


def test_what_is_not_a_weight_is_known_for_what_it_is() -> None:
    names = sort_names(bert_values())
    assert names.weights.keys() == weight_shapes().keys()
    slots = {name for name, why in names.ignored.items() if why == "the optimizer's"}
    expected = {f"{name}/{slot}" for name in weight_shapes() for slot in ("adam_m", "adam_v")}
    assert slots == expected
    assert names.ignored.keys() - slots == {"global_step"}


def test_others_slots_and_heads() -> None:
    others = {
        "bert/pooler/dense/kernel": None,
        "bert/pooler/dense/kernel/lamb_m": "the optimizer's",
        "bert/pooler/dense/kernel/LAMB/v": "the optimizer's",
        "beta1_power": "counts and settings of training",
        "_CHECKPOINTABLE_OBJECT_GRAPH": "counts and settings of training",
        "output_bias": "no part of pre-training",
        "squad/output_weights": "no part of pre-training",
    }
    found = sort_names(others)
    assert found.ignored == {name: why for name, why in others.items() if why}
    assert found.weights == {
        "bert/pooler/dense/kernel": OurTensor("bert.pooler.dense.weight", True)
    }


@pytest.mark.parametrize("name", ["bert/adapter", "bert/encoder/layer_0/relative", "cls/other"])
def test_what_a_model_has_that_is_not_bert_is_not_passed_over(name: str) -> None:
    assert sort_names([name]).weights == {name: OurTensor(name, False)}


@pytest.mark.parametrize("name", ["", "kernel", "a.b/kernel", "bert", "global_step"])
def test_what_is_no_parameters_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        parameter_name(name)

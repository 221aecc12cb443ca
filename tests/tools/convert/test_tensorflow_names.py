"""TensorFlow's names, there and back."""

import torch

from bert_tools.convert.tensorflow_names import parameter_name, sort_names
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining, tensorflow_name
from tensorflow_cases import bert_values, weight_shapes


def test_every_parameter_there_and_back() -> None:
    config = ModelSection(num_layers=11)  # two digits too
    names = list(BertForPretraining(config, torch.device("meta")).state_dict())
    theirs = [tensorflow_name(name) for name in names]
    assert len(set(theirs)) == len(names) == 16 * 11 + 14
    assert [parameter_name(name) for name in theirs] == names
    for name in ("", "kernel", "a.b/kernel", "bert", "global_step"):
        assert parameter_name(name) is None


def test_what_is_not_a_weight_is_known_for_what_it_is() -> None:
    weights, ignored = sort_names(bert_values())
    assert weights.keys() == weight_shapes().keys()
    slots = {name for name, why in ignored.items() if why == "the optimizer's"}
    assert slots == {f"{name}/{slot}" for name in weights for slot in ("adam_m", "adam_v")}
    assert ignored.keys() - slots == {"global_step"}


def test_others_slots_and_heads() -> None:
    others = {
        "bert/pooler/dense/kernel": None,
        "bert/pooler/dense/kernel/lamb_m": "the optimizer's",
        "bert/pooler/dense/kernel/LAMB/v": "the optimizer's",
        "beta1_power": "counts and settings of training",
        "output_bias": "no part of pre-training",
        "squad/output_weights": "no part of pre-training",
    }
    weights, ignored = sort_names(others)
    assert ignored == {name: why for name, why in others.items() if why}
    assert weights == {"bert/pooler/dense/kernel": "bert.pooler.dense.weight"}
    unknown = ["bert/adapter", "bert/encoder/layer_0/relative", "cls/other"]
    assert sort_names(unknown) == ({name: name for name in unknown}, {})

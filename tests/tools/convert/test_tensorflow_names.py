"""TensorFlow's names, of the first release and of the second's objects: there and back."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import pytest
import torch

from bert_tools.convert.crc32c import mask
from bert_tools.convert.tensorflow_bundle import BundleTensor, read_bundle
from bert_tools.convert.tensorflow_names import (
    OBJECT_GRAPH,
    as_first_release,
    parameter_name,
    sort_names,
)
from bert_tools.convert.tensorflow_source import open_tensorflow
from bert_tools.huggingface.weights import SourceTensor
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name
from tensorflow_cases import OBJECTS, bert_values, weight_shapes

TWINS = [f"model/twins/{number}/.ATTRIBUTES/VARIABLE_VALUE" for number in range(2)]
SLOT = "kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE"


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
        "_CHECKPOINTABLE_OBJECT_GRAPH": "counts and settings of training",
        "output_bias": "no part of pre-training",
        "squad/output_weights": "no part of pre-training",
    }
    weights, ignored = sort_names(others)
    assert ignored == {name: why for name, why in others.items() if why}
    assert weights == {"bert/pooler/dense/kernel": "bert.pooler.dense.weight"}
    unknown = ["bert/adapter", "bert/encoder/layer_0/relative", "cls/other"]
    assert sort_names(unknown) == ({name: name for name in unknown}, {})


def test_of_objects_what_is_not_a_weight_is_passed_over() -> None:
    tensors = open_tensorflow(OBJECTS)
    weights, ignored = sort_names(tensors)
    assert weights.keys() == weight_shapes().keys()
    assert ignored.keys() == {*TWINS, OBJECT_GRAPH, "words", "save_counter"}
    assert [float(tensors[name].read()) for name in TWINS] == [1.0, 2.0]
    for name in ("words", OBJECT_GRAPH):
        with pytest.raises(CheckpointError, match="holds string"):
            tensors[name].read()
    # In the file heads are a dimension.
    shapes = {tensor.shape for tensor in read_bundle(OBJECTS).values()}
    assert {(8, 2, 4), (2, 4, 8)} <= shapes
    assert not {(8, 2, 4), (2, 4, 8)} & {tensors[name].shape for name in weights}


def test_a_damaged_graph_is_refused(tmp_path: Path) -> None:
    shutil.copytree(OBJECTS.parent, tmp_path / "copy")
    graph = read_bundle(OBJECTS)[OBJECT_GRAPH]
    data = tmp_path / "copy" / graph.path.name
    whole = data.read_bytes()
    for place in range(0, graph.num_bytes, 97):
        changed = bytearray(whole)
        changed[graph.start + place] ^= 4
        data.write_bytes(changed)
        with pytest.raises(CheckpointError) as caught:
            open_tensorflow(tmp_path / "copy" / OBJECTS.name)
        assert OBJECT_GRAPH in str(caught.value)


def encoded(number: int) -> bytes:
    """A protocol buffer's integer: seven bits per byte, low ones first."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + encoded(rest) if rest else bytes([low])


def message(*fields: tuple[int, bytes]) -> bytes:
    """A protocol buffer of these fields, which are bytes."""
    return b"".join(
        encoded(number << 3 | 2) + encoded(len(value)) + value for number, value in fields
    )


def text_tensor(path: Path, text: bytes) -> BundleTensor:
    """A tensor that is a text, in a file of its own, with right checksums."""
    before = google_crc32c.value(len(text).to_bytes(4, "little"))
    check = mask(before).to_bytes(4, "little")
    contents = encoded(len(text)) + check + text
    path.write_bytes(contents)
    crc = mask(google_crc32c.extend(before, check + text))
    return BundleTensor(path, "text", "string", (), 0, len(contents), crc)


def with_graph(folder: Path, graph: bytes, keys: list[str]) -> Mapping[str, SourceTensor]:
    """Tensors of three numbers by these keys, and a graph of objects, whatever it says."""
    path = folder / "data"
    text = text_tensor(path, graph)
    numbers = {key: BundleTensor(path, key, "float32", (1, 3), 0, 12, 0) for key in keys}
    return as_first_release({OBJECT_GRAPH: text, **numbers}, folder)


def node(*variables: tuple[str, str]) -> tuple[int, bytes]:
    attributes = [(2, message((2, name.encode()), (3, key.encode()))) for key, name in variables]
    return (1, message(*attributes))


def test_names_are_taken_where_they_are_one_tensors_alone(tmp_path: Path) -> None:
    variables = [
        ("kernel", "transformer/layer_3/self_attention/query/kernel"),
        (SLOT, "transformer/layer_3/self_attention/query/kernel"),
        ("one", "bert/cls/predictions/output_bias/bias"),
        ("other", "cls/predictions/output_bias/bias"),
        ("unnamed", ""),
        ("unknown", "transformer/layer_3/relative/kernel"),
        ("same", "kernel"),
    ]
    graph = message(node(*variables[:3]), node(*variables[3:]), (1, b""))
    found = with_graph(tmp_path, graph, [key for key, _ in variables])
    assert list(found) == [
        OBJECT_GRAPH,
        "bert/encoder/layer_3/attention/self/query/kernel",
        SLOT,
        "one",
        "other",
        "unnamed",
        "transformer/layer_3/relative/kernel",
        "same",
    ]


@pytest.mark.parametrize(("size", "shape"), [(0, ()), (2**24, ()), (30, (1,))])
def test_what_is_no_text_is_refused(tmp_path: Path, size: int, shape: tuple[int, ...]) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(30))
    with pytest.raises(CheckpointError, match=r"has|is no text|is cut short"):
        BundleTensor(path, "graph", "string", shape, 0, size, 0).read_text()

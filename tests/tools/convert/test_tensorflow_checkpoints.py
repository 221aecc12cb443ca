"""Checkpoints that TensorFlow wrote: read back equal, and refused when cut short or changed.

And its names, there and back, and its checksum.
"""

import shutil
from random import Random

import numpy as np
import pytest
import torch

from bert_tools.convert.tensorflow import masked_crc32c, open_tensorflow, parameter_name, sort_names
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining, tensorflow_name
from tensorflow_cases import (
    V2,
    V2_SHARDS,
    bert_values,
    odd_values,
    partitioned_values,
    weight_shapes,
)

INDEX, DATA = f"{V2.name}.index", f"{V2.name}.data-00000-of-00001"


def is_refused(source, expected):
    """Whether reading ends with our error, in one line; where not, all is read as expected."""
    try:
        tensors = open_tensorflow(source)
        found = {n: each.read() for n, each in tensors.items() if each.dtype == "float32"}
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return True
    assert tensors.keys() - partitioned_values().keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].shape == value.shape, name
        if value.dtype == np.float32 and name != "brain":
            assert found[name].dtype == np.float32 and found[name].tobytes() == value.tobytes()
        else:
            assert name not in found
    return False


@pytest.fixture
def v2(tmp_path):
    """A copy of the V2 checkpoint to damage: its prefix."""
    shutil.copytree(V2.parent, tmp_path / "copy")
    return tmp_path / "copy" / V2.name


def test_read_back_equal_and_variables_in_parts_refused():
    assert not is_refused(V2, bert_values())
    assert not is_refused(V2_SHARDS, odd_values())
    tensors = open_tensorflow(V2_SHARDS)
    for name, value in partitioned_values().items():
        assert (tensors[name].dtype, tensors[name].shape) == ("parts", value.shape)
        with pytest.raises(
            CheckpointError, match=rf"{name}': must be float32 in one piece, not parts"
        ):
            tensors[name].read()


def test_what_is_cut_short_or_changed_is_refused_or_the_same(v2):
    expected, rng = bert_values(), Random("v2")
    for path in sorted(v2.parent.iterdir()):
        whole = path.read_bytes()
        for size in {0, 1, 8, 47, 48, len(whole) - 1, *rng.sample(range(len(whole)), 40)}:
            path.write_bytes(whole[:size])
            assert is_refused(v2, expected), (path.name, size)
        refused = 0
        for place in rng.sample(range(len(whole)), 60):
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            refused += is_refused(v2, expected)
        # Not a bit between the tables' handles and their end; small files are for the larger part
        # footer, and in data every bit counts.
        assert refused >= (60 if ".data-" in path.name else 40)
        path.write_bytes(whole)
    assert not is_refused(v2, expected)


def test_a_damaged_tensor_alone_is_named_when_it_is_read(v2):
    data = v2.with_name(DATA)
    contents = bytearray(data.read_bytes())
    contents[0] ^= 1
    data.write_bytes(contents)
    first, *others = open_tensorflow(v2).values()
    with pytest.raises(CheckpointError) as caught:
        first.read()
    assert str(caught.value).startswith(f"{data}: 'bert/embeddings/LayerNorm/beta': the checksum")
    for tensor in others:  # each is checked by itself
        if tensor.name != "global_step":
            tensor.read()


def test_a_checkpoint_that_is_not_whole_or_not_alone_is_named(v2):
    assert open_tensorflow(v2.parent).keys() == bert_values().keys()
    other = v2.with_name("model.ckpt-7")
    index = shutil.copy(v2.with_name(INDEX), v2.with_name("model.ckpt-7.index"))
    with pytest.raises(
        CheckpointError, match=r"has 2 checkpoints; .*: model.ckpt-28252, model.ckpt-7"
    ):
        open_tensorflow(v2.parent)
    rng = np.random.default_rng(1)
    for size in (0, 1, 47, 48, 1000, 100_000):
        index.write_bytes(rng.bytes(size))
        with pytest.raises(CheckpointError, match="truncated, or not a TensorFlow checkpoint"):
            open_tensorflow(other)
    index.unlink()
    v2.with_name(DATA).unlink()
    with pytest.raises(CheckpointError, match=rf"{DATA}: no such file; keep all files"):
        open_tensorflow(v2)
    v2.with_name(INDEX).unlink()
    with pytest.raises(
        CheckpointError, match=r"\(V2\), because .*\.index is missing; pass the name"
    ):
        open_tensorflow(v2)
    with pytest.raises(CheckpointError, match=r"contains no \*\.index file"):
        open_tensorflow(v2.parent)
    for source in ("nowhere/model.ckpt", "x" * 500, "nul\0", "/dev/zero"):
        with pytest.raises(CheckpointError) as caught:
            open_tensorflow(v2.parent / source)
        assert str(caught.value).isprintable()


def test_every_parameter_there_and_back():
    config = ModelSection(num_layers=11)  # two digits too
    names = list(BertForPretraining(config, torch.device("meta")).state_dict())
    theirs = [tensorflow_name(name) for name in names]
    assert len(set(theirs)) == len(names) == 16 * 11 + 14
    assert [parameter_name(name) for name in theirs] == names
    for name in ("", "kernel", "a.b/kernel", "bert", "global_step"):
        assert parameter_name(name) is None


def test_what_is_not_a_weight_is_known_for_what_it_is():
    weights, ignored = sort_names(bert_values())
    assert weights.keys() == weight_shapes().keys()
    slots = {f"{name}/{slot}" for name in weights for slot in ("adam_m", "adam_v")}
    assert {*ignored} == {*slots, "global_step"}
    weight = "bert/pooler/dense/kernel"
    others = [f"{weight}/lamb_m", f"{weight}/LAMB/v", "beta1_power", "squad/output_weights"]
    assert sort_names([weight, *others]) == ({weight: "bert.pooler.dense.weight"}, others)
    unknown = ["bert/adapter", "bert/encoder/layer_0/relative", "cls/other"]
    assert sort_names(unknown) == ({name: name for name in unknown}, [])


def test_checksums_are_those_of_the_standard():
    """Of RFC 3720, section B.4, and the check value of every catalogue of CRCs."""
    for contents, checksum in (
        (bytes(32), 0x8A9136AA),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ):
        rotated = (masked_crc32c(contents) - 0xA282EAD8) % 2**32
        assert (rotated << 15 | rotated >> 17) % 2**32 == checksum
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert masked_crc32c(floats[1:]) == masked_crc32c(floats[1:].tobytes())
    with pytest.raises(ValueError, match="contiguous"):
        masked_crc32c(floats[:, ::2])

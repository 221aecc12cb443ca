"""Checkpoints that TensorFlow wrote: read back equal, and refused when cut short or changed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bert_tools.convert.tensorflow_source import open_tensorflow
from mlperf_bert.errors import CheckpointError
from tensorflow_cases import V2, V2_SHARDS, bert_values, odd_values, partitioned_values

INDEX, DATA = f"{V2.name}.index", f"{V2.name}.data-00000-of-00001"
CHECKPOINTS = {"v2": (V2, bert_values()), "v2_shards": (V2_SHARDS, odd_values())}
PARTS = "parts"  # dtype of a variable that was saved in parts


def is_refused(source: Path, expected: Mapping[str, np.ndarray]) -> bool:
    """Whether reading ends with our error, in one line; where not, all is read as expected."""
    try:
        tensors = open_tensorflow(source)
        found = {name: tensor.read() for name, tensor in tensors.items() if tensor.dtype != PARTS}
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return True
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        dtype = "bfloat16" if name == "brain" else str(value.dtype)
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, value.shape), name
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name
    return False


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    """A copy of the V2 checkpoint to damage: its prefix."""
    shutil.copytree(V2.parent, tmp_path / "copy")
    return tmp_path / "copy" / V2.name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_read_back_equal(name: str) -> None:
    assert not is_refused(*CHECKPOINTS[name])


def test_any_file_of_a_checkpoint_names_it() -> None:
    expected = list(open_tensorflow(V2))
    for source in (V2.parent, V2.with_name(INDEX), V2.with_name(DATA), Path(f"{V2}.meta")):
        assert list(open_tensorflow(source)) == expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_cut_short_or_changed_is_refused_or_the_same(name: str, tmp_path: Path) -> None:
    source, expected = CHECKPOINTS[name]
    shutil.copytree(source.parent, tmp_path / "copy")
    copy = tmp_path / "copy" / source.name
    rng = Random(name)
    for path in sorted(copy.parent.iterdir()):
        if path.name.endswith("-00001-of-00002"):  # has parts alone, which are not read
            continue
        whole = path.read_bytes()
        for size in {0, 1, 8, 47, 48, len(whole) - 1, *rng.sample(range(len(whole)), 40)}:
            path.write_bytes(whole[:size])
            assert is_refused(copy, expected), (path.name, size)
        refused = 0
        for place in rng.sample(range(len(whole)), 60):
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            refused += is_refused(copy, expected)
        # Not a bit between the tables' handles and their end; small files are for the larger part
        # footer, and in data every bit counts.
        assert refused >= (60 if ".data-" in path.name else 40)
        path.write_bytes(whole)
    assert not is_refused(copy, expected)


def test_a_damaged_tensor_is_named_when_it_is_read(v2: Path) -> None:
    data = v2.with_name(DATA)
    contents = bytearray(data.read_bytes())
    contents[0] ^= 1
    data.write_bytes(contents)
    first, *others = open_tensorflow(v2).values()
    with pytest.raises(CheckpointError) as caught:
        first.read()
    assert str(caught.value).startswith(f"{data}: 'bert/embeddings/LayerNorm/beta': has a wrong")
    for tensor in others:  # each is checked by itself
        tensor.read()


def test_a_file_that_is_missing_is_named(v2: Path) -> None:
    v2.with_name(DATA).unlink()
    with pytest.raises(CheckpointError, match=rf"{DATA}: is missing; keep all files"):
        open_tensorflow(v2)
    v2.with_name(INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"\(V2\): there is no .*\.index; give the name"):
        open_tensorflow(v2)


def test_a_directory_must_have_just_one(v2: Path) -> None:
    assert open_tensorflow(v2.parent).keys() == bert_values().keys()
    shutil.copy(v2.with_name(INDEX), v2.with_name("model.ckpt-7.index"))
    with pytest.raises(CheckpointError, match=r"name one of them: model.ckpt-28252, model.ckpt-7"):
        open_tensorflow(v2.parent)
    for path in v2.parent.glob("*.index"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has 0 checkpoints"):
        open_tensorflow(v2.parent)


@pytest.mark.parametrize(
    "source", ["nothing", "nowhere/model.ckpt", "x" * 500, "nul\0", "/dev/zero"]
)
def test_what_is_no_checkpoint_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_tensorflow(tmp_path / source)
    assert str(caught.value).isprintable()


def test_garbage_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for size in (0, 1, 47, 48, 1000, 100_000):
        (tmp_path / "model.ckpt.index").write_bytes(rng.bytes(size))
        with pytest.raises(CheckpointError, match="is cut short, or no checkpoint of TensorFlow"):
            open_tensorflow(tmp_path / "model.ckpt")


def test_a_variable_in_parts_is_refused_when_it_is_read() -> None:
    tensors = open_tensorflow(V2_SHARDS)
    for name, value in partitioned_values().items():
        assert (tensors[name].dtype, tensors[name].shape) == (PARTS, value.shape)
        with pytest.raises(CheckpointError, match=rf"{name}': holds parts, .* in one piece"):
            tensors[name].read()

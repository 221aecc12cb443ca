"""Safetensors that anybody wrote: read as the library does, and refused where anything lies."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mlperf_bert.checkpoint.huggingface.reader import read_safetensors
from mlperf_bert.common.errors import CheckpointError

GENERATOR = torch.Generator().manual_seed(2)
TENSORS = {
    "scalar": torch.tensor(3.5),
    "wide": torch.randn(3, 5, generator=GENERATOR, dtype=torch.float64),
    "full": torch.randn(4, 3, generator=GENERATOR),
    "half": torch.randn(7, generator=GENERATOR).half(),
    "brain": torch.randn(2, 2, 2, generator=GENERATOR).bfloat16(),
    "empty": torch.empty(0, 4),
    "numbers": torch.arange(3),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "t.safetensors", metadata={"format": "pt"})
    return tmp_path / "t.safetensors"


def test_what_the_library_wrote_comes_back(path: Path) -> None:
    found = read_safetensors(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].dtype == str(tensor.dtype).removeprefix("torch.")
        if name != "flags":
            values = found[name].read()
            wanted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(values, wanted.numpy()) and values.dtype == wanted.numpy().dtype


def test_what_is_no_number_is_not_read(path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds bool"):
        read_safetensors(path)["flags"].read()


def test_truncations_are_refused(path: Path) -> None:
    contents = path.read_bytes()
    for size in {*range(64), *range(0, len(contents), 7), len(contents) - 1}:
        path.write_bytes(contents[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(path)
    path.write_bytes(contents + b"\0")
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        read_safetensors(path)


def test_a_file_cut_after_it_was_opened_is_refused(path: Path) -> None:
    found = read_safetensors(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short"):
        for tensor in found.values():
            if tensor.dtype.startswith(("float", "bfloat")):
                tensor.read()


LIES = {
    "overlap": ("full", {"data_offsets": [0, 48]}),
    "huge": ("full", {"shape": [2**40, 2**40]}),
    "negative": ("full", {"data_offsets": [-48, 0]}),
    "unknown": ("full", {"dtype": "F31"}),
    "deep": ("full", {"shape": [1] * 9}),
    "gap": ("half", None),
}


def rewrite_header(path: Path, change: Callable[[bytes], str]) -> None:
    contents = path.read_bytes()
    size = struct.unpack("<Q", contents[:8])[0]
    text = change(contents[8 : 8 + size]).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + size :])


@pytest.mark.parametrize(("name", "lie"), LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(path: Path, name: str, lie: dict[str, Any] | None) -> None:
    def change(text: bytes) -> str:
        header = json.loads(text)
        tensor = header.pop(name)
        return json.dumps(header if lie is None else {**header, name: tensor | lie})

    rewrite_header(path, change)
    with pytest.raises(CheckpointError):
        read_safetensors(path)


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.write(struct.pack("<Q", 2**33))
        file.truncate(2**34)  # of which the disk holds nothing
    with pytest.raises(CheckpointError, match="more than"):
        read_safetensors(tmp_path / "long")


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe")

"""Safetensors that anybody wrote: read as the library does, and refused in one line if damaged."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bert_tools.huggingface.reader import read_safetensors
from mlperf_bert.errors import CheckpointError

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
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe")


def test_truncations_are_refused(path: Path) -> None:
    contents = path.read_bytes()
    for size in {*range(64), *range(0, len(contents), 7), len(contents) - 1}:
        path.write_bytes(contents[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(path)
    path.write_bytes(contents + b"\0")
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        read_safetensors(path)

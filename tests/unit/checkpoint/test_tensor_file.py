"""Safetensors files of our own writer: what the library reads back, and their digest."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mlperf_bert.checkpoint.tensors import write_tensors

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "states": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 7),
}


def test_the_library_reads_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    entry = write_tensors(path, TENSORS, {"ranges": "{}"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"ranges": "{}"}
    contents = path.read_bytes()
    assert (entry.size, entry.sha256) == (len(contents), hashlib.sha256(contents).hexdigest())


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, TENSORS)
    with pytest.raises(FileExistsError):
        write_tensors(path, {})

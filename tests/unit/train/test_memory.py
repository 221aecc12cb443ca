"""Parameters are counted; out of memory is one line."""

from dataclasses import replace

import pytest
import torch

from bert_tools.huggingface.conversion import parameter_shapes
from mlperf_bert.__main__ import main
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import MISTAKE

LARGE = ModelSection(precision="bf16")


@pytest.mark.parametrize(
    ("architecture", "objective"), [("bert", "mlm_nsp"), ("bert", "mlm"), ("modern", "mlm")]
)
def test_parameters_are_counted(architecture, objective):
    model = replace(LARGE, architecture=architecture, objective=objective)
    shapes = parameter_shapes(model).values()
    assert model.num_parameters == sum(torch.Size(shape).numel() for shape in shapes)


def test_out_of_memory_is_one_line_that_names_the_part(monkeypatch, capsys):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("bert_tools.bench.cli.run", full)
    assert main(["bench", "train"]) == MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench train: out of memory" in line and "9 GiB" in line

"""Published rates by the names that torch gives accelerators, and a machine held against them."""

from pathlib import Path

import pytest

from bert_tools.doctor.burn_in_findings import judge_published, published_rate
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import has_bert_large_sizes, is_bert_large
from mlperf_bert.config.sections import ModelSection


def test_a_machine_far_below_the_published_rate_is_warned_of() -> None:
    published = published_rate("NVIDIA A100-SXM4-80GB")
    assert published is not None
    assert judge_published(100.0, "lamb", published).status == "warn"
    assert judge_published(400.0, "lamb", published).status == "ok"


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA GB200", 1685.8),
        ("NVIDIA B200", 1538.6),
        ("NVIDIA H200", 1091.8),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", 654.4),
        ("NVIDIA H100 80GB HBM3", 1139.4),
        ("NVIDIA A100-SXM4-80GB", 320.8),
        ("NVIDIA A100-SXM4-40GB", 289.2),
        ("NVIDIA A100 80GB PCIe", 266.3),
        ("NVIDIA A100-PCIE-40GB", 205.5),
        ("NVIDIA A30", 120.3),
        ("Tesla V100-SXM3-32GB", 67.6),
        ("Tesla V100-SXM2-16GB", 47.5),
        ("NVIDIA L40S", 142.1),
        ("NVIDIA L40", 128.6),
        ("NVIDIA L4", 53.5),
        ("NVIDIA RTX A5000", 82.9),
        ("NVIDIA RTX A5000 Laptop GPU", None),
        ("NVIDIA RTX A3000", None),
        ("NVIDIA GeForce RTX 4090", 47.6),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 75.3),
        ("AMD Radeon RX 7900 XTX", 33.5),
        ("CPU", None),
    ],
)
def test_accelerators_are_known_by_the_names_that_torch_gives(
    name: str, rate: float | None
) -> None:
    published = published_rate(name)
    assert (published.best if published else None) == rate


def test_dropout_changes_the_model_but_not_what_its_steps_cost(tiny_config: Path) -> None:
    large, without_dropout = ModelSection(), ModelSection(hidden_dropout=0.0)
    assert is_bert_large(large) and has_bert_large_sizes(large)
    assert not is_bert_large(without_dropout) and has_bert_large_sizes(without_dropout)
    assert not has_bert_large_sizes(load_config(tiny_config).model)

"""Memory that a forward saves, against torch's count: a kernel that keeps more fails here."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_tools.bench.training_run import run_updates
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch, blank
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.model import bert
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.model.saved_bytes import Kernels, SavedBytes
from mlperf_bert.parts.memory_plan import (
    expected_forward,
    forward_of_lengths,
    forward_of_shape,
    kernels_of,
)
from mlperf_bert.step.eager import weights_dtype
from model_cases import ragged_batch
from support import CONFIGS

CPU, META = torch.device("cpu"), torch.device("meta")
LARGE = ModelSection(precision="bf16")
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
NO_DROPOUT = ("model.hidden_dropout=0.0", "model.attention_dropout=0.0")
MODERN = (
    *("model.architecture=modern", "model.objective=mlm", "model.num_layers=4"),
    *("model.attention_window=16", "model.intermediate_size=384", *NO_DROPOUT),
)
MODERN_LARGE: dict[str, Any] = {
    **{"architecture": "modern", "objective": "mlm", "intermediate_size": 2624},
    "attention_dropout": 0.0,
}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def count(model: BertForPretraining, batch: UnpaddedBatch) -> int:
    """Bytes of all storages that a forward saves, each once, without weights and inputs."""
    names = ("input_ids", "position_ids", "token_type_ids", "labels", "masked_token_index")
    own = [*model.parameters(), *(getattr(batch, name) for name in names)]
    not_counted = {each.untyped_storage()._cdata for each in own}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in not_counted:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(batch, "loss_sums")
    assert kept is not None
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelSection], BertForPretraining]:
    """Makes models without memory, whose kernels are not run."""
    from triton.runtime.jit import JITFunction

    from mlperf_bert.model import triton_attention
    from mlperf_bert.model.fused_blocks import FusedBlocks

    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr(bert, "choose_blocks", lambda *chosen_by: FusedBlocks(chosen_by[2]))
    attention = AttentionChoice("triton", triton_attention.attend, "")

    def make(config: ModelSection) -> BertForPretraining:
        model = BertForPretraining(config, META, attention=attention)
        model.step = torch.zeros(1, dtype=torch.int64, device=META)
        return model.to(weights_dtype(config.precision))

    return make


@needs_triton
@pytest.mark.parametrize("batch_size", [112, 448])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp8"},
        {"precision": "fp32"},
        {"objective": "mlm"},
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        MODERN_LARGE,
        {**MODERN_LARGE, "hidden_dropout": 0.0, "num_layers": 4},
        {**MODERN_LARGE, "precision": "fp8"},
    ],
    ids=str,
)
def test_fused_layers_of_bert_large_save_what_is_planned(
    fused: Callable[[ModelSection], BertForPretraining], batch_size: int, changes: dict[str, Any]
) -> None:
    config = replace(LARGE, **{"num_layers": 3, **changes})
    planned = expected_forward(
        load_config(
            CONFIGS / "h200_1x1x448x1.toml",
            ["mlperf.enforce_rules=false", f"parallel.local_batch_size={batch_size}"],
        )
    )
    shape = StaticShape(
        tokens=planned.tokens,
        sequences=batch_size,
        masked=planned.masked // batch_size * batch_size,
        max_seqlen=512,
        max_masked=76,
    )
    batch = blank(shape, META)
    empty = (0,) * shape.dummies
    batch = replace(
        batch,
        lengths=(shape.tokens // batch_size,) * batch_size + empty,
        masked_counts=(shape.masked // batch_size,) * batch_size + empty,
    )
    kernels = Kernels(fused=True, attention="keyed", on_cuda=True)
    saved = SavedBytes(config, kernels, forward_of_shape(shape))
    assert sum(saved.parts().values()) == pytest.approx(count(fused(config), batch), rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.attention=packed",),
        ("model.attention=reference",),
        ("model.head=chunked",),
        ("model.objective=mlm",),
        ("model.precision=bf16",),
        NO_DROPOUT,
        *((f"model.attention={name}", *NO_DROPOUT) for name in ("packed", "reference")),
        MODERN,
        *((f"model.attention={name}", *MODERN) for name in ("packed", "reference")),
        ("model.precision=bf16", *MODERN),
        ("model.head=chunked", *MODERN),
        (*MODERN, *DROPOUT),
        *((f"model.attention={name}", *MODERN, *DROPOUT) for name in ("packed", "reference")),
        (*MODERN, "model.num_layers=3"),  # the last has a window
        ("model.attention=packed", *MODERN, "model.num_layers=3"),
    ],
    ids=str,
)
def test_what_a_cpu_saves_is_planned(changes: tuple[str, ...]) -> None:
    check_on_cpu(changes)


@pytest.mark.parametrize("changes", [(), DROPOUT])
def test_sequences_of_one_length_are_not_copied(changes: tuple[str, ...]) -> None:
    check_on_cpu((*MODERN, *changes), length=40)


def check_on_cpu(changes: tuple[str, ...], length: int | None = None) -> None:
    """The plan of a batch of cpu_tiny with these changes, its lengths as they come or all one."""
    settings = ("run.device=cpu", "run.seed=1", "parallel.ranks_per_node=1", *DROPOUT)
    config = load_config(CONFIGS / "cpu_tiny.toml", (*settings, *changes))
    ((batch,),) = run_updates(config, 1)
    if length is not None:
        batch = ragged_batch((length,) * 8)
    model = BertForPretraining(config.model, CPU).to(weights_dtype(config.model.precision))
    model.step.fill_(1)
    forward = forward_of_lengths(config, np.array(batch.lengths), np.array(batch.masked_counts))
    saved = SavedBytes(config.model, kernels_of(config), forward)
    assert sum(saved.parts().values()) == pytest.approx(count(model, batch), rel=0.02)

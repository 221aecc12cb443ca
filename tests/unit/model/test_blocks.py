"""Blocks: the reference is `transformers`', the fused ones are the reference."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.blocks import Blocks, side_by_side
from mlperf_bert.model.choices import MOST_CHANNELS, choose_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS, HIDDEN, WIDE = 17, 24, 40
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def their_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=31,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        intermediate_size=WIDE,
        max_position_embeddings=ROWS,
        hidden_dropout_prob=0.0,
        pad_token_id=None,  # else they give the padding word no gradient
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def randomised(module: nn.Module) -> Any:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    return module


def assert_same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Results and their gradients, every bit."""
    assert torch.equal(ours, theirs)
    given = normal(*ours.shape, seed=9)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, given),
        torch.autograd.grad(theirs, inputs, given),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "width"), [("BertSelfOutput", HIDDEN), ("BertOutput", WIDE)])
def test_residual_output_is_that_of_transformers(name: str, width: int) -> None:
    from transformers.models.bert import modeling_bert

    theirs = randomised(getattr(modeling_bert, name)(their_config()))
    x, residual = normal(ROWS, width), normal(ROWS, HIDDEN, seed=1)
    ours = Blocks().residual_output(x, residual, theirs.dense, theirs.LayerNorm, None)
    assert_same(ours, theirs(x, residual), x, residual, *theirs.parameters())


def test_intermediate_is_that_of_transformers() -> None:
    from transformers.models.bert.modeling_bert import BertIntermediate

    theirs = randomised(BertIntermediate(their_config()))
    hidden = normal(ROWS, HIDDEN)
    ours = Blocks().intermediate(hidden, theirs.dense)
    assert_same(ours, theirs(hidden), hidden, *theirs.parameters())


def test_embed_is_that_of_transformers() -> None:
    from transformers.models.bert.modeling_bert import BertEmbeddings

    theirs = randomised(BertEmbeddings(their_config()))
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(31, (ROWS,), generator=generator)
    types = torch.randint(2, (ROWS,), generator=generator)
    positions = torch.arange(ROWS).flip(0)
    tables = (theirs.word_embeddings, theirs.token_type_embeddings, theirs.position_embeddings)
    ours = Blocks().embed((words, types, positions), tables, theirs.LayerNorm, None)
    expected = theirs(words[None], types[None], positions[None])[0]
    assert_same(ours, expected, *theirs.parameters())


def test_project_qkv_of_the_reference_are_three_products() -> None:
    layers = [randomised(nn.Linear(HIDDEN, HIDDEN)) for _ in range(3)]
    hidden, rows = normal(ROWS, HIDDEN), torch.tensor([0, 3, 16])
    wanted = hidden[rows]
    q, k, v = Blocks().project_qkv(hidden, wanted, *layers)
    assert torch.equal(q, layers[0](wanted))
    assert torch.equal(k, layers[1](hidden))
    assert torch.equal(v, layers[2](hidden))


def chosen(name: Any, device: torch.device, hidden: int) -> str:
    config = ModelSection(kernels=name, hidden_size=hidden, num_heads=1)
    return type(choose_blocks(config, device)).__name__


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_the_reference_is_chosen_without_cuda(name: Any, device: torch.device) -> None:
    assert chosen(name, device, HIDDEN) == "Blocks"


@needs_triton
def test_fused_blocks_are_chosen_on_cuda_while_a_row_fits() -> None:
    assert chosen("auto", CUDA, MOST_CHANNELS) == "FusedBlocks"
    assert chosen("fused", CUDA, MOST_CHANNELS) == "FusedBlocks"
    assert chosen("reference", CUDA, HIDDEN) == "Blocks"
    assert chosen("auto", CUDA, MOST_CHANNELS + 1) == "Blocks"


@pytest.mark.parametrize(("device", "hidden"), [(CPU, HIDDEN), (CUDA, MOST_CHANNELS + 1)])
def test_fused_blocks_that_cannot_run_are_a_config_error(device: torch.device, hidden: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.kernels.*'reference'"):
        chosen("fused", device, hidden)


def test_columns_of_one_tensor_are_put_together_without_a_copy() -> None:
    whole = normal(5, 12).detach()
    parts = whole.split((3, 4, 5), dim=1)
    joined = side_by_side(parts)
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()
    shifted = whole.split((2, 3, 4, 3), dim=1)[1:]  # rows are wider than these three
    swapped = (parts[0], parts[2], parts[1])
    elsewhere = (parts[0], parts[1].clone(), parts[2])
    for others in (shifted, swapped, elsewhere):
        assert torch.equal(side_by_side(others), torch.cat(others, dim=1))

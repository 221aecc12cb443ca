"""Blocks: the reference is `transformers`', the fused ones are the reference."""

import importlib.util

import pytest
import torch

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model import choices
from mlperf_bert.model.blocks import Blocks, side_by_side
from mlperf_bert.model.choices import MOST_CHANNELS, choose_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS, HIDDEN = 17, 24
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def test_embed_is_that_of_transformers_to_the_bit():
    """With its gradients. What the other blocks compute, `test_against_transformers.py` shows."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    # Without a padding word, to which they would give no gradient.
    config = BertConfig(
        vocab_size=31, hidden_size=HIDDEN, hidden_dropout_prob=0.0, pad_token_id=None
    )
    theirs = BertEmbeddings(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    generator = torch.Generator().manual_seed(0)
    words, types = (torch.randint(size, (ROWS,), generator=generator) for size in (31, 2))
    positions = torch.arange(ROWS).flip(0)
    tables = (theirs.word_embeddings, theirs.token_type_embeddings, theirs.position_embeddings)
    ours = Blocks().embed((words, types, positions), tables, theirs.LayerNorm, None)
    expected = theirs(words[None], types[None], positions[None])[0]
    assert torch.equal(ours, expected)
    given = torch.randn(ours.shape, generator=generator)
    both = (
        torch.autograd.grad(each, list(theirs.parameters()), given) for each in (ours, expected)
    )
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def chosen(name, device, hidden):
    config = ModelSection(kernels=name, hidden_size=hidden, num_heads=1)
    return type(choose_blocks(config, device)).__name__


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_the_reference_is_chosen_without_cuda(name, device):
    assert chosen(name, device, HIDDEN) == "Blocks"


@needs_triton
def test_fused_blocks_are_chosen_on_cuda_while_a_row_fits(monkeypatch):
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: None)
    assert chosen("auto", CUDA, MOST_CHANNELS) == "FusedBlocks"
    assert chosen("fused", CUDA, MOST_CHANNELS) == "FusedBlocks"
    assert chosen("reference", CUDA, HIDDEN) == "Blocks"
    assert chosen("auto", CUDA, MOST_CHANNELS + 1) == "Blocks"


def test_fused_blocks_need_a_triton_that_can_compile(monkeypatch):
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: "no compiler")
    assert chosen("auto", CUDA, HIDDEN) == "Blocks"
    with pytest.raises(ConfigError, match=r"'fused' cannot run here: no compiler; use 'auto'"):
        chosen("fused", CUDA, HIDDEN)


@pytest.mark.parametrize(("device", "hidden"), [(CPU, HIDDEN), (CUDA, MOST_CHANNELS + 1)])
def test_fused_blocks_that_cannot_run_are_a_config_error(device, hidden):
    with pytest.raises(ConfigError, match=r"model\.kernels.*'reference'"):
        chosen("fused", device, hidden)


def test_columns_of_one_tensor_are_put_together_without_a_copy():
    whole = torch.randn(5, 12)
    parts = whole.split((3, 4, 5), dim=1)
    joined = side_by_side(parts)
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()
    shifted = whole.split((2, 3, 4, 3), dim=1)[1:]  # rows are wider than these three
    swapped = (parts[0], parts[2], parts[1])
    elsewhere = (parts[0], parts[1].clone(), parts[2])
    for others in (shifted, swapped, elsewhere):
        assert torch.equal(side_by_side(others), torch.cat(others, dim=1))

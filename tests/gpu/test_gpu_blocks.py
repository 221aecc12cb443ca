"""Fused blocks on a GPU: equal to the reference, repeatable, and part of a CUDA graph."""

import pytest
import torch

from block_cases import BLOCKS, DTYPES, TOLERANCES, assert_near, check_block, make_case, results
from graph_cases import captured
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.choices import choose_blocks

DEVICE = "cuda"


@pytest.fixture
def fused(triton):
    return choose_blocks(ModelSection(kernels="fused"), torch.device(DEVICE))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (17, 100), (3001, 1024)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_fused_blocks(fused, block, dtype, rows, hidden):
    check_block(fused, block, rows, hidden, DTYPES[dtype], DEVICE)


@pytest.mark.parametrize("block", BLOCKS)
def test_autocast_gives_the_dtypes_of_the_reference(fused, block):
    modules, inputs, run = make_case(block, 300, 64, torch.float32, DEVICE, dropout=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(run, fused, modules, inputs)
        expected = results(run, Blocks(), modules, inputs)
    assert_near(found, expected, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("block", BLOCKS)
def test_a_captured_block_follows_its_inputs(fused, block):
    """4,000 rows: above 3,072 torch sorts the ids of embeddings in backward."""
    modules, inputs, run = make_case(block, 4000, 128, torch.bfloat16, DEVICE, dropout=True)
    given = [torch.ones_like(each) for each in run(fused, modules, *inputs)]
    leaves = (*inputs, *modules.parameters())

    def gradients():
        return torch.autograd.grad(run(fused, modules, *inputs), leaves, given)

    graph, found = captured(gradients)
    for step in range(3):
        with torch.no_grad():
            for number, leaf in enumerate(leaves):
                leaf.copy_(torch.randn_like(leaf) + step + number)
        graph.replay()
        pairs = zip(found, gradients(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_fused_loss_holds_the_logits_once(fused):
    """At BERT's vocabulary, with as many positions as 112 sequences have."""
    positions, hidden_size, words = 4270, 256, 30528
    hidden = torch.randn(positions, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(words, hidden_size, device=DEVICE, dtype=torch.bfloat16) / 8
    bias = torch.randn(words, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(words, (positions,), device=DEVICE)
    labels[::7] = IGNORED
    leaves = tuple(each.requires_grad_() for each in (hidden, weight, bias))
    peaks, found = [], []
    for blocks in (fused, fused, Blocks()):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = blocks.masked_lm_loss(*leaves, labels)
        found.append([loss.detach(), *torch.autograd.grad(loss / positions, leaves)])
        del loss
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert all(torch.equal(one, other) for one, other in zip(*found[:2], strict=True))
    assert_near(found[0], found[2], TOLERANCES[torch.bfloat16])
    assert peaks[1] < 1.5 * positions * words * 2 < peaks[2] / 2  # which has two in fp32

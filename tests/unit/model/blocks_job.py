"""What test_blocks.py runs by itself: `blocks_job.py interpret|compile`, without a GPU.

The first runs the fused blocks in Triton's interpreter, which has to be chosen before triton is
imported. The second compiles their kernels for a GPU and runs nothing, because the interpreter
takes Python that the compiler refuses.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from model_cases import TINY, gradients, our_loss, ragged_batch, scattered_model

from block_cases import (
    BLOCKS,
    DTYPES,
    TOLERANCES,
    assert_near,
    check_block,
    make_case,
    results,
)
from kernel_table import compile_instead
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model import bert
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.fused_blocks import FusedBlocks
from mlperf_bert.model.triton_cross_entropy import cross_entropy, cross_entropy_backward
from mlperf_bert.model.triton_gelu import bias_gelu, bias_gelu_backward
from mlperf_bert.model.triton_parts import sum_programs

SIZES = ((1, 8), (3, 24), (17, 100), (17, 128))


def interpret() -> None:
    fused = FusedBlocks()
    for block, (rows, hidden) in product(BLOCKS, SIZES):
        print(block, rows, hidden, flush=True)
        check_block(fused, block, rows, hidden, torch.float64, "cpu")
    for block in BLOCKS:
        check_block(fused, block, 3, 24, torch.float32, "cpu")
        check_autocast(fused, block)
    check_block(fused, "intermediate", 41, 300, torch.float64, "cpu")  # several programs each way
    check_sums()
    check_gelu()
    for positions, classes in ((1, 8), (3, 24), (70, 1000), (3, 2056)):
        check_logits(positions, classes)
    check_second_backward(fused)
    check_model(fused)


def check_autocast(fused: FusedBlocks, block: str) -> None:
    """What is float32 under autocast with the reference, and what bfloat16, is so with `fused`."""
    modules, inputs, run = make_case(block, 3, 24, torch.float32, "cpu", dropout=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (results(run, blocks, modules, inputs) for blocks in (fused, Blocks()))
    assert_near(found, expected, TOLERANCES[torch.bfloat16])


def check_sums() -> None:
    """Of more programs than are added at a time, for parameters of two dtypes."""
    partials = torch.randn(150, 2, 50, dtype=torch.float64)
    one, other = sum_programs(partials, (torch.float64, torch.float32))
    torch.testing.assert_close(one, partials[:, 0].sum(0), rtol=1e-12, atol=1e-12)
    assert other.dtype == torch.float32
    torch.testing.assert_close(other, partials[:, 1].sum(0).float())


def check_gelu() -> None:
    """In float32 it and its slope are much nearer than bf16 rounds, in the tails too."""
    values = torch.linspace(-14, 14, 4001)[None]
    exact = values.double().requires_grad_()
    result = F.gelu(exact)
    (slope,) = torch.autograd.grad(result.sum(), exact)
    none = torch.zeros(values.shape[1])
    found, (found_slope, _) = (
        bias_gelu(values, none),
        bias_gelu_backward(torch.ones_like(values), values, none),
    )
    assert (found - result).abs().max() < 1.1e-6
    assert (found_slope - slope).abs().max() < 1.1e-6
    small = values < -1  # nothing cancels
    assert ((found - result) / result)[small & (values > -4)].abs().max() < 4e-3


def check_logits(positions: int, classes: int) -> None:
    """Losses and gradients of torch's in float64; rows of ignored labels, poisoned, add nothing."""
    generator = torch.Generator().manual_seed(positions)
    labels = torch.randint(classes, (positions,), generator=generator)
    labels[1::2] = IGNORED
    is_used = labels != IGNORED
    for scale, dtype in ((1.0, torch.float64), (1e4, torch.float64), (3.0, torch.bfloat16)):
        logits = (scale * torch.randn((positions, classes), generator=generator)).to(dtype)
        logits[1::4], logits[3::4] = float("nan"), float("inf")
        exact = logits[is_used].double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(exact, labels[is_used], reduction="none")
        (of_exact,) = torch.autograd.grad(0.3 * expected.sum(), exact)
        losses, statistics = cross_entropy(logits, labels)
        given = torch.tensor(0.3, dtype=losses.dtype)
        of_bias = cross_entropy_backward(given, logits, labels, statistics, losses.dtype)
        found = (losses[is_used], of_bias)
        tolerance = TOLERANCES[losses.dtype]
        assert_near(found, [each.to(losses) for each in (expected, of_exact.sum(0))], tolerance)
        assert_near([logits[is_used]], [of_exact.to(dtype)], TOLERANCES[dtype])
        assert not losses[~is_used].any()
        assert not logits[~is_used].any()
    unused = cross_entropy(logits.fill_(float("nan")), torch.full_like(labels, IGNORED))[0]
    assert not unused.any()
    none, of_none = cross_entropy(logits[:0], labels[:0])
    assert none.shape == (0,)
    assert not cross_entropy_backward(given, logits[:0], labels[:0], of_none, dtype).any()


def check_second_backward(fused: FusedBlocks) -> None:
    """It would take the gradient for logits."""
    modules, inputs, run = make_case("masked_lm_loss", 3, 24, torch.float32, "cpu", dropout=False)
    (loss,) = run(fused, modules, *inputs)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("a second backward went through")


def check_model(fused: FusedBlocks) -> None:
    """Loss and gradients of a whole model, dropout on; and its logits in evaluation."""
    batch = ragged_batch((7, 5, 9))
    config = replace(TINY, hidden_dropout=0.2, attention_dropout=0.2)
    found = []
    for blocks in (fused, Blocks()):
        with patch.object(bert, "choose_blocks", lambda *_, blocks=blocks: blocks):
            model = scattered_model(config, spread=0.2, dtype=torch.float64)
        loss = our_loss(model, batch)
        of_parameters = gradients(model, loss).values()
        with torch.inference_mode():
            found.append([loss, *of_parameters, *model.eval()(batch)])
    assert_near(*found, 1e-11)


def compile_all() -> None:
    JITFunction.run = compile_instead
    for dtype, block, dropout in product(("fp32", "bf16"), BLOCKS, (False, True)):
        modules, inputs, run = make_case(block, 4, 100, DTYPES[dtype], "cpu", dropout=dropout)
        results(run, FusedBlocks(), modules, inputs)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()

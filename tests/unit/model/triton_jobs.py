"""The jobs of test_kernel_gate.py, without a GPU: `triton_jobs.py JOB`.

The job "quick" runs every kernel, others run them in more sizes, dtypes and layouts. Kernels run in
Triton's interpreter, which has to be chosen before triton is imported. The job "compile" compiles
them for a GPU in forms that `test_kernel_gate.py` has not, and runs nothing, because the
interpreter takes Python that the compiler refuses. The interpreter rounds wrongly: to FP8 (1.99 to
1), so there kernels write float32, which is compared or rounded by torch; and to bfloat16, where it
cuts floats off, so rounding of updates is compared in fp16 alone.
"""

import math
import sys
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

import attention_cases
import dropout_cases
import kernel_cases
from block_cases import BLOCKS, DTYPES, TOLERANCES, assert_near, check_block, make_case, results
from fp8_cases import (
    E4M3,
    E5M2,
    SHAPES,
    check_blocks,
    check_cast,
    make_keys,
    values_of,
)
from kernel_table import compile_instead
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model import (
    bert,
    fp8_cast,
    fused_blocks,
    triton_attention,
    triton_dropout,
    triton_fp8,
)
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.dropout_keys import make_site
from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.fused_blocks import FusedBlocks
from mlperf_bert.model.triton_cross_entropy import cross_entropy, cross_entropy_backward
from mlperf_bert.model.triton_gelu import (
    bias_gelu,
    bias_gelu_backward,
    bias_gelu_fp8,
    bias_gelu_fp8_backward,
    gated_fp8,
    gated_fp8_backward,
)
from mlperf_bert.model.triton_parts import sum_programs
from mlperf_bert.optim import triton_kernels
from model_cases import MODERN, TINY, gradients, our_loss, ragged_batch, scattered_model

MORE_SIZES = ((1, 8), (17, 100), (17, 128))


def quick():
    fused = FusedBlocks()
    for block in BLOCKS:
        check_block(fused, block, 3, 24, torch.float64, "cpu")
    check_sums()
    check_one_result(fused)
    check_gelu()
    check_logits(3, 24)
    attend = triton_attention.attend
    options = {"lengths": ((9, 5), attention_cases.EDGES), "spare_rows": 3}
    attention_cases.check_policy(attend, 0.3, torch.float32, 1e-5, **options)
    attention_cases.check_windows(attend, 0.0, torch.float32, 1e-5, windows=(((70, 9), 7),))
    for check in dropout_cases.CHECKS:
        check(triton_dropout, "cpu")
    for rule in kernel_cases.RULES:
        kernel_cases.check_updates(triton_kernels, rule, "fp32", "cpu")
        kernel_cases.check_skip(triton_kernels, rule, "fp32", "cpu")
    cast_in_float32(values_of((17, 16)), E4M3)
    fp8_kernels_in_float32(3, 8)
    round_by_torch()
    check_blocks(FusedBlocks, 1, None, "cpu", is_modern=True)


def blocks():
    fused = FusedBlocks()
    for block, (rows, hidden) in product(BLOCKS, MORE_SIZES):
        print(block, rows, hidden, flush=True)
        check_block(fused, block, rows, hidden, torch.float64, "cpu")
    for block in BLOCKS:
        check_block(fused, block, 3, 24, torch.float32, "cpu")
        check_autocast(fused, block)
    for block in ("intermediate", "gated"):  # several programs each way
        check_block(fused, block, 41, 300, torch.float64, "cpu")
    for positions, classes in ((1, 8), (70, 1000), (3, 2056)):
        check_logits(positions, classes)
    check_model(fused)


def check_autocast(fused, block):
    """Check that `fused` has the reference's dtypes, float32 or bfloat16, under autocast."""
    modules, inputs, run = make_case(block, 3, 24, torch.float32, "cpu", dropout=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (results(run, blocks, modules, inputs) for blocks in (fused, Blocks()))
    assert_near(found, expected, TOLERANCES[torch.bfloat16])


def check_sums():
    """Check sums of more programs than are added at a time, for parameters of two dtypes."""
    partials = torch.randn(150, 2, 50, dtype=torch.float64)
    one, other = sum_programs(partials, (torch.float64, torch.float32))
    torch.testing.assert_close(one, partials[:, 0].sum(0), rtol=1e-12, atol=1e-12)
    assert other.dtype == torch.float32
    torch.testing.assert_close(other, partials[:, 1].sum(0).float())


def check_one_result(fused):
    """The sum or its LayerNorm may have no gradient, as the sum has none behind the last layer."""
    modules, inputs, run = make_case("sum_norm", 17, 24, torch.float64, "cpu", dropout=True)
    for number in (0, 1):
        leaves = (*inputs, modules["dense"].weight, *([modules["norm"].weight] * number))
        found, expected = (
            torch.autograd.grad(run(blocks, modules, *inputs)[number].square().sum(), leaves)
            for blocks in (fused, Blocks())
        )
        assert_near(found, expected, 1e-12)


def check_gelu():
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


def check_logits(positions, classes):
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


def check_model(fused):
    """Loss and gradients of a whole model, dropout on; and its logits in evaluation."""
    for config in (
        replace(TINY, hidden_dropout=0.2, attention_dropout=0.2),
        replace(MODERN, num_heads=2, hidden_dropout=0.2),
    ):
        assert_near(*(of_model(config, each) for each in (fused, Blocks())), 1e-11)


def of_model(config, blocks):
    """Loss, gradients and logits."""
    batch = ragged_batch((7, 35, 9))
    with patch.object(bert, "choose_blocks", lambda *_: blocks):
        model = scattered_model(config, spread=0.2, dtype=torch.float64)
    loss = our_loss(model, batch)
    of_parameters = gradients(model, loss).values()
    with torch.inference_mode():
        logits = [each for each in model.eval()(batch) if each is not None]
    return [loss, *of_parameters, *logits]


UNIT = 0.25
# Name and which of the results is in FP8: all, or a matrix without its transpose.
KERNELS = {
    **{"bias_gelu_fp8": None, "bias_gelu_fp8_backward": 0},
    **{"residual_norm": 2, "residual_norm_backward": 0},
    **{"gated_fp8": None, "gated_fp8_backward": None, "sum_norm": 3, "sum_norm_backward": 0},
}


def fp8():
    for dtype, shape in product((E4M3, E5M2), SHAPES):
        cast_in_float32(values_of(shape), dtype)
    # Where each of several parts comes to lie.
    check_cast(triton_fp8.cast, fp8_cast.reference, (torch.float32,), "cpu")
    for shape in SHAPES:
        fp8_kernels_in_float32(*shape)
    round_by_torch()
    for rows, is_modern in product((1, 17), (False, True)):
        for site in (None, make_site(0.3, 5, make_keys(rows, "cpu"))):
            check_blocks(FusedBlocks, rows, site, "cpu", is_modern=is_modern)


class InFloat32(Target):
    """Where a matrix in float32 stands for one in FP8."""


def round_by_torch():
    for name, place in KERNELS.items():
        setattr(fused_blocks, name, rounded_by_torch(getattr(fused_blocks, name), place))


def rounded_by_torch(kernel, place):
    """The same in float32, then in FP8: the result, or that at `place` of several."""

    def run(*arguments, **options):
        *others, target = arguments
        if target is None:
            return kernel(*arguments, **options)
        found = kernel(*others, Target(torch.float32, target.unit, target.maximum), **options)
        if place is None:
            return in_fp8(found, target)
        return *found[:place], in_fp8(found[place], target), *found[place + 1 :]

    return run


def in_fp8(found, target):
    if isinstance(found, Tensor):
        return found.clamp(-target.limit, target.limit).to(target.dtype)
    both = (in_fp8(each, target) for each in (found.rows, found.transposed))
    return Fp8Matrix(found.unit, *both)


def cast_in_float32(x, dtype):
    limit = torch.finfo(dtype).max
    rows = torch.full((x.shape[0], x.shape[1] + 3), 7.0)
    width = fp8_cast.padded(x.shape[0])
    transposed = torch.full((x.shape[1], width + 3), 7.0)
    own = rows[:, : x.shape[1]], transposed[:, :width]
    unit = torch.tensor(UNIT)
    triton_fp8.cast_part(x, Fp8Matrix(unit, *own), InFloat32(dtype, unit, None))
    exact = (x.float() / UNIT).clamp(-limit, limit).masked_fill(~x.isfinite(), math.nan)
    padded_rows = F.pad(exact, (0, 0, 0, width - len(x)))  # zeros behind the last row
    for found, expected in zip(own, (exact, padded_rows.t()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert (rows[:, x.shape[1] :] == 7).all() and (transposed[:, width:] == 7).all()


def fp8_kernels_in_float32(rows, columns):
    """GELU and gate each way, and casts with sums, of adjacent gradients and of others."""
    generator = torch.Generator().manual_seed(rows)
    gradient, x, gate = (torch.randn(rows, columns, generator=generator) for _ in range(3))
    bias = torch.randn(columns, generator=generator)
    joined = torch.cat((x, gate), dim=1)
    exact, exact_bias, exact_gate = (x.double().requires_grad_() for x in (x, bias, gate))
    maximum = torch.zeros(())
    target = Target(torch.float32, torch.tensor(UNIT), maximum)

    def check(found, expected):
        check_matrix(found, expected.detach(), maximum)
        maximum.zero_()

    result = F.gelu(exact + exact_bias)
    check(bias_gelu_fp8(x, bias, target, transpose=True), result)
    found, of_bias = bias_gelu_fp8_backward(gradient, x, bias, target)
    of_x, expected = torch.autograd.grad(result, (exact, exact_bias), gradient.double())
    check(found, of_x)
    torch.testing.assert_close(of_bias.double(), expected, rtol=1e-5, atol=1e-5)
    result = F.gelu(exact) * exact_gate
    check(gated_fp8(joined, target, transpose=True), result)
    of_both = torch.autograd.grad(result, (exact, exact_gate), gradient.double())
    check(gated_fp8_backward(gradient, joined, target), torch.cat(of_both, dim=1))
    for parts in (joined.split(columns, dim=1), (x, joined[:, columns:])):
        found, sums = triton_fp8.cast_with_sums(parts, target)
        check(found, joined.double())
        torch.testing.assert_close(sums.double(), joined.double().sum(0), rtol=1e-5, atol=1e-5)


def check_matrix(found, exact, maximum):
    torch.testing.assert_close(found.rows.double() * UNIT, exact, rtol=1e-5, atol=4e-6)
    num_rows = len(exact)
    assert torch.equal(found.transposed[:, :num_rows], found.rows.t())
    assert not found.transposed[:, num_rows:].any()
    assert maximum == found.rows.abs().max() * UNIT


def attention():
    attend = triton_attention.attend
    for head_size, probability in ((16, 0.0), (32, 0.3), (64, 0.3)):
        options = {"head_size": head_size, "spare_rows": 3}
        attention_cases.check_policy(attend, probability, torch.float32, 1e-5, **options)
    attention_cases.check_policy(attend, 0.3, torch.float16, 3e-3)
    windows = attention_cases.WINDOWS
    attention_cases.check_windows(attend, 0.0, torch.float32, 1e-5, windows=windows)
    of_64 = {"head_size": 64, "windows": windows[2:3]}
    attention_cases.check_windows(attend, 0.3, torch.float32, 1e-5, **of_64)
    attention_cases.check_windows(attend, 0.3, torch.float16, 3e-3, windows=windows[1:2])
    check_strides()


def check_strides():
    """Columns of one tensor, as a fused projection leaves them; a gradient that is one number.

    The gradients of queries, keys and values are columns of one tensor again.
    """
    case = attention_cases.make_case((70, 9))
    site = case.site(0.3)
    columns = torch.stack(case.inputs, dim=1).float()
    gradients = []
    for inputs in (columns.unbind(1), [x.float() for x in case.inputs]):
        leaves = [x.requires_grad_() for x in inputs]
        context = triton_attention.attend(*leaves, case.layout, site)
        gradients.append(torch.autograd.grad(context.sum(), leaves))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    first, *others = gradients[0]
    for number, other in enumerate(others, start=1):
        assert other.data_ptr() == first[:, 0, 0].data_ptr() + number * 4 * first[0].numel()


def updates():
    for check, rule, dtypes in product(
        kernel_cases.CHECKS, kernel_cases.RULES, kernel_cases.DTYPES
    ):
        if check is kernel_cases.check_updates or dtypes in ("fp32", "fp16"):  # it is slow
            print(check.__name__, rule, dtypes, flush=True)
            check(triton_kernels, rule, dtypes, "cpu")


def compile_all():
    JITFunction.run = compile_instead
    for dtype, block, has_dropout in product(("fp32", "bf16"), BLOCKS, (False, True)):
        modules, inputs, run = make_case(block, 4, 100, DTYPES[dtype], "cpu", dropout=has_dropout)
        results(run, FusedBlocks(), modules, inputs)
    site = dropout_cases.site_of(40)
    triton_dropout.keep_bits(site, 100)
    cu_seqlens = torch.tensor([0, 10, 40], dtype=torch.int32)
    triton_dropout.attention_keep_bits(site, 3, cu_seqlens, 30)
    for rule, dtypes in product(kernel_cases.RULES, kernel_cases.DTYPES):
        shard = kernel_cases.make_case(dtypes, "cpu").shard
        kernel_cases.update(triton_kernels, rule, shard, kernel_cases.make_scalars(1, "cpu"))


JOBS = {
    "quick": quick,
    "attention": attention,
    "blocks": blocks,
    "fp8": fp8,
    "updates": updates,
    "compile": compile_all,
}
if __name__ == "__main__":
    JOBS[sys.argv[1]]()

"""Checks of casts to FP8 and of FP8 products on every device.

Shape letters: R rows, C columns, K input features, N output features.
"""

import copy
import math
from itertools import product as combinations

import torch
from torch import nn

from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.dropout_keys import DropoutKeys
from mlperf_bert.model.fp8 import DTYPES, GRADIENT, INPUT, WEIGHT, Fp8Blocks, Fp8Scales, product
from mlperf_bert.model.fp8_cast import Target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((1, 8), (17, 16), (70, 130), (200, 64))


def values_of(shape, seed=0):
    """bfloat16 of every size, among them what saturates and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 20, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * 2.0**exponents
    flat = values.view(-1)
    flat[1], flat[2], flat[3], flat[5] = math.nan, math.inf, -math.inf, -0.0
    return values.bfloat16()


def check_cast(cast, other, dtypes, device):
    """`cast` is `other` bit for bit: several parts, odd sizes."""
    for dtype, shape, dim in combinations(dtypes, SHAPES, (0, 1)):
        parts = [values_of(shape, seed).to(device) for seed in range(3)]
        wide = torch.zeros(shape[0], shape[1] + 5, dtype=torch.bfloat16, device=device)
        parts[1] = wide[:, : shape[1]].copy_(parts[1])  # rows that lie apart
        parts[2] = parts[2].t().contiguous().t()
        unit = torch.tensor(0.25, device=device)
        results, maxima = [], []
        for each in (cast, other):
            maxima.append(torch.tensor(0.5, device=device))
            results.append(each(parts, dim, Target(dtype, unit, maxima[-1]), transpose=True))
        assert_same(*results)
        assert maxima[0] == maxima[1] > 0.5
        silent = Target(dtype, unit, None)
        assert_same(*(each(parts, dim, silent, transpose=False) for each in (cast, other)))


def assert_same(one, other):
    """Bit for bit but for the sign of NaN."""
    assert one.rows.dtype == other.rows.dtype
    assert one.rows.is_contiguous() and other.rows.is_contiguous()
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(one.rows.float(), other.rows.float(), **exactly)
    assert (one.transposed is None) == (other.transposed is None)
    if one.transposed is not None and other.transposed is not None:
        assert one.transposed.is_contiguous() and other.transposed.is_contiguous()
        torch.testing.assert_close(one.transposed.float(), other.transposed.float(), **exactly)


def make_scales(device, number=1):
    """Scales of `number` products, named by layers that are used for nothing else."""
    scales = Fp8Scales(number, torch.device(device))
    layers = [nn.Linear(1, 1) for _ in range(number)]
    scales.assign([(layer,) for layer in layers])
    return scales, [scales.of(layer) for layer in layers]


def step_of(number, device):
    return torch.tensor([number], device=device)


class Case:
    """A product of two weights, and what it should be in float64."""

    def __init__(self, rows, device):
        generator = torch.Generator().manual_seed(rows)

        def draw(*shape, deviation):
            values = torch.randn(shape, generator=generator) * deviation
            return values.to(device, torch.bfloat16)

        self.x = draw(rows, 64, deviation=1.0).requires_grad_()
        self.weights = [draw(n, 64, deviation=0.1).requires_grad_() for n in (32, 16)]
        self.biases = [draw(n, deviation=1.0).requires_grad_() for n in (32, 16)]
        self.gradients = [draw(rows, n, deviation=1e-3) for n in (32, 16)]

    def run(self, scales):
        """Forward and backward; results in `y` and `.grad`."""
        for leaf in (self.x, *self.weights, *self.biases):
            leaf.grad = None
        results = product(self.x, self.weights, self.biases, scales)
        torch.autograd.backward(results, self.gradients)
        self.y = torch.cat(results, dim=1).detach()

    def check(self, scales):
        """All results within what rounding to FP8 under these scales, and then to bf16, allows."""
        x, w = self.x.detach(), torch.cat([each.detach() for each in self.weights])
        g = torch.cat(self.gradients, dim=1)
        x8, w8, g8 = (
            bounds(values, scales.units[role], DTYPES[role])
            for values, role in ((x, INPUT), (w, WEIGHT), (g, GRADIENT))
        )
        bias = torch.cat([each.detach() for each in self.biases]).double()
        assert_within(self.y, product_bounds(x8, transposed(w8)), bias)
        assert self.x.grad is not None
        assert_within(self.x.grad, product_bounds(g8, w8))
        of_weights = torch.cat([each.grad for each in self.weights if each.grad is not None])
        assert_within(of_weights, product_bounds(transposed(g8), x8))
        of_bias = torch.cat([each.grad for each in self.biases if each.grad is not None])
        torch.testing.assert_close(of_bias.double(), g.double().sum(0), rtol=2**-8, atol=1e-6)


def bounds(values, unit, dtype):
    """Error bounds of rounding to FP8: half a unit in the last place, and half the smallest."""
    info = torch.finfo(dtype)
    exact = values.double()
    smallest = info.smallest_normal * info.eps * unit.double()
    assert exact.abs().max() <= info.max * unit
    return exact, exact.abs() * info.eps / 2 + smallest / 2


def transposed(matrix):
    return matrix[0].t(), matrix[1].t()


def product_bounds(a, b):
    """Error bounds of the product a b."""
    largest = (a[0].abs() + a[1]) @ (b[0].abs() + b[1])
    return a[0] @ b[0], largest - a[0].abs() @ b[0].abs()


def assert_within(found, allowed, bias=0.0):
    exact = allowed[0] + bias
    error = (found.double() - exact).abs()
    # Sums in float32, or in Hopper's fewer bits, then one rounding to bf16.
    assert (error <= 1.02 * allowed[1] + 2**-7 * exact.abs() + 1e-12).all()
    assert error.max() > 0  # FP8 it was


def make_keys(rows, device):
    """Keys for rows that are samples of one token each."""
    numbers = torch.arange(rows, device=device)
    return DropoutKeys(7, step_of(3, device), numbers, torch.zeros_like(numbers))


LINEARS = {
    **{"first": (32, 32), "wide": (32, 80), "last": (80, 32)},
    **{"query": (32, 32), "key": (32, 32), "value": (32, 32), "end": (32, 32)},
}
PRODUCTS = (("first",), ("wide",), ("last",), ("query", "key", "value"), ("end",))


def make_layers(rows, device, *, is_modern=False):
    """Products of one encoder layer behind its attention and of the next one, and the input.

    If they are modern, without biases and with a gate.
    """
    generator = torch.Generator().manual_seed(rows)
    has_bias, sizes = not is_modern, LINEARS | ({"wide": (32, 160)} if is_modern else {})
    linears = {name: nn.Linear(*each, bias=has_bias) for name, each in sizes.items()}
    names = ("first", "last", "end")
    norms = {f"norm_of_{name}": nn.LayerNorm(32, bias=has_bias) for name in names}
    layers = nn.ModuleDict({**linears, **norms})
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if name.startswith("norm") and name.endswith("weight"):
                parameter.add_(1.0)
    hidden = torch.randn(rows, 32, generator=generator)
    return layers.to(device, torch.bfloat16), hidden.to(device, torch.bfloat16).requires_grad_()


def run_layers(blocks, made, site, *, is_modern):
    """Results, gradients of input and parameters. Without a site queries are of all rows."""
    layers, hidden = made

    def normed(name, x, residual):
        """The next residual, which of modern layers is the sum, and the LayerNorm of the sum."""
        block = blocks.sum_norm if is_modern else blocks.residual_output
        found = block(x, residual, layers[name], layers[f"norm_of_{name}"], site)
        return found if is_modern else (found, found)

    residual, attended = normed("first", hidden, hidden)
    wide = (blocks.gated if is_modern else blocks.intermediate)(attended, layers["wide"])
    residual, middle = normed("last", wide, residual)
    wanted = middle if site is None else middle[::2]
    q, k, v = blocks.project_qkv(middle, wanted, *(layers[name] for name in PRODUCTS[3]))
    last = normed("end", v, residual)
    results = (q, k, *(last if is_modern else last[1:]))
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in results]
    gradients = torch.autograd.grad(results, (hidden, *layers.parameters()), given)
    return [*(each.detach() for each in results), *gradients]


def scales_of(made, device):
    scales = Fp8Scales(len(PRODUCTS), torch.device(device))
    scales.assign([[made[0][name] for name in names] for names in PRODUCTS])
    return scales


def check_blocks(make, rows, site, device, *, is_modern=False):
    """Results and gradients are hardly farther from exact ones than those of the readable blocks.

    They are not the same: where one rounds to bf16 and then to FP8, the other may round once.
    """
    made = make_layers(rows, device, is_modern=is_modern)
    exactly = copy.deepcopy(made[0]).double(), made[1].detach().double().requires_grad_()
    exact = run_layers(Blocks(), exactly, site, is_modern=is_modern)
    errors, maxima = [], []
    for kind in (Fp8Blocks, make):
        scales = scales_of(made, device)
        for number in (1, 2):
            scales.follow(step_of(number, device))
            results = run_layers(kind(scales), made, site, is_modern=is_modern)
        assert all(each.dtype == torch.bfloat16 for each in results)
        errors.append([float((a - b).norm()) for a, b in zip(results, exact, strict=True)])
        maxima.append(scales.state[1])
    for one, other, result in zip(*reversed(errors), exact, strict=True):
        assert one <= 1.5 * other + 2**-7 * float(result.norm())
        assert one <= 0.25 * float(result.norm())
    torch.testing.assert_close(*maxima, rtol=0.1, atol=0.0)
    assert (maxima[0] > 0).all()

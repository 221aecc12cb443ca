"""Matrix products in FP8 with scales from the previous update, and blocks that use them.

Shape letters: R rows, K input features, N output features of all weights of a product together.

A matrix is divided by its *unit*, the power of two that one stands for, and rounded: inputs and
weights to E4M3, gradients to E5M2 (arXiv 2209.05433). Finding the maximum first would cost one more
pass over each matrix, so the unit follows from the largest |value| of the previous update ("delayed
scaling" with a history of one). Nothing here reads the device, so it can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.blocks import Blocks, side_by_side
from mlperf_bert.model.fp8_cast import COLUMNS_MULTIPLE, Fp8Matrix, Target, reference

PRODUCTS_PER_LAYER = 4  # query, key and value; attention's output; both feed-forward matrices
INPUT, WEIGHT, GRADIENT = 0, 1, 2  # roles of a product's matrices
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
# A new unit puts the observed maximum between limit / headroom and twice that, so a maximum may
# grow at least headroom / 2 times in the next update before it saturates. A unit that is too large
# costs no precision, only range at the lower end, where E5M2 has most. From one update to the next
# (cpu_tiny, 200 updates) inputs grew at most 1.5, weights 1.01 and gradients 3.7 times.
HEADROOM = (4.0, 4.0, 32.0)
# Assumed maxima of the first update: hidden states after LayerNorm lie around 1, weights below 1,
# and the gradient of a mean over masked tokens far below 1. Too large does no harm: FP8 resolves
# down to 2**-15 (E4M3) or 2**-26 (E5M2) of a maximum.
FIRST_MAXIMA = (32.0, 4.0, 2.0**-4)
_SMALLEST_UNIT = 2.0**-60  # keeps the product of two units a normal float32
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True, slots=True, eq=False)
class ProductScales:
    """A product's scales: float32 [3] each (input, weight, gradient), views of model state."""

    units: Tensor
    maxima: Tensor  # so far in this update

    def target(self, role: int, *, records: bool = True) -> Target:
        """The cast target of the matrix in that role; records its maximum if `records` is set."""
        maximum = self.maxima[role] if records else None
        return Target(DTYPES[role], self.units[role], maximum)


class Fp8Scales:
    """Units and maxima of all products, on the device: `state` is float32 [2, products, 3].

    Every rank has its own, as in published runs: a maximum over ranks would need a collective in
    every update. Rounding therefore differs a little between ranks, as their samples do.
    """

    def __init__(self, num_products: int, device: torch.device) -> None:
        """Start from units that fit FIRST_MAXIMA; no maximum is recorded yet."""
        limits = [torch.finfo(dtype).max for dtype in DTYPES]
        self._headroom = torch.tensor(HEADROOM, device=device) / torch.tensor(limits, device=device)
        self.state = torch.zeros((2, num_products, 3), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._number_of: dict[nn.Linear, int] = {}
        self.state[1] = torch.tensor(FIRST_MAXIMA, device=device)
        self.follow(self.step + 1)
        self.step.zero_()

    def assign(self, products: Sequence[Sequence[nn.Linear]]) -> None:
        """Register the layers that form each product."""
        assert len(products) == self.state.shape[1]
        self._number_of = {
            linear: number for number, linears in enumerate(products) for linear in linears
        }

    def of(self, linear: nn.Linear) -> ProductScales:
        """Scales of the product that `linear` is part of."""
        return self._get(self._number_of[linear])

    def behind(self, linear: nn.Linear) -> ProductScales | None:
        """Scales of the product after that of `linear`; None after the last."""
        number = self._number_of[linear] + 1
        return self._get(number) if number < self.state.shape[1] else None

    def _get(self, number: int) -> ProductScales:
        units, maxima = self.state
        return ProductScales(units[number], maxima[number])

    def follow(self, step: Tensor) -> None:
        """Set the units from the previous step's maxima; called before each forward of training.

        They change in a new step only, so all forwards of one update use the same units. A product
        with only zeros or non-finite values keeps its unit.

        Args:
            step: int64 [1], the number of the update.
        """
        units, maxima = self.state
        is_new = step != self.step
        # A float32 without its mantissa is the power of two below it.
        powers = (maxima * self._headroom).view(torch.int32).bitwise_and_(_EXPONENT_BITS)
        wanted = powers.view(torch.float32).clamp_(_SMALLEST_UNIT, 1 / _SMALLEST_UNIT)
        units.copy_(torch.where(is_new & (maxima > 0), wanted, units))
        maxima.masked_fill_(is_new, 0.0)
        self.step.copy_(step)

    def tensors(self) -> dict[str, Tensor]:
        """All state that a step changes, by name, for saving and restoring."""
        return {"fp8.state": self.state, "fp8.step": self.step}


def cast(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """`fp8_cast.reference`, or on CUDA its kernel."""
    if parts[0].device.type == "cuda":
        from mlperf_bert.model import triton_fp8  # imports triton

        return triton_fp8.cast(parts, dim, target, transpose=transpose)
    return reference(parts, dim, target, transpose=transpose)


def cast_with_sums(parts: Sequence[Tensor], target: Target) -> tuple[Fp8Matrix, Tensor]:
    """`cast` of parts side by side with a transpose, and the sums over rows [C] in their dtype."""
    if parts[0].device.type == "cuda":
        from mlperf_bert.model import triton_fp8

        return triton_fp8.cast_with_sums(parts, target)
    return reference(parts, 1, target, transpose=True), torch.cat([each.sum(0) for each in parts])


def check_fp8(config: ModelSection, device: torch.device) -> None:
    """Raise ConfigError if the encoder's products cannot run in FP8."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(config, name)
        if size % COLUMNS_MULTIPLE:
            raise ConfigError(
                f"model.{name}",
                f"{size} is no multiple of {COLUMNS_MULTIPLE}, which FP8 products need",
                "round it up, or set model.precision to 'bf16'",
            )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "model.precision",
            f"'fp8' cannot run on {torch.cuda.get_device_name(device)}",
            "use 'bf16' (or a device of capability 8.9 or more)",
        )


def product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: ProductScales,
    x8: Fp8Matrix | None = None,
) -> tuple[Tensor, ...]:
    """x W^T (+ b) for each weight (and bias), as one product in FP8; bfloat16.

    If gradients are recorded, maxima are recorded and the backward runs in FP8 too: it keeps the
    transposed FP8 copies of input and weights, not the input.

    Args:
        x: [R, K], floating dtype.
        weights: [N_i, K] each, K and N_i multiples of 16.
        biases: [N_i] each, or none.
        scales: the product's own.
        x8: `x` in FP8 under these scales, if its producer has cast it; `x` is then not read.

    Returns:
        [R, N_i] each, columns of one [R, N].
    """
    records = torch.is_grad_enabled()
    results: tuple[Tensor, ...] = _Product.apply(
        x, x8, scales, records, len(weights), *weights, *biases
    )  # type: ignore[no-untyped-call]
    return results


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x8: Fp8Matrix | None,
        scales: ProductScales,
        records: bool,
        num_weights: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        y, *transposed = multiply_inputs(x, x8, weights, biases, scales, records)
        ctx.save_for_backward(*transposed)
        ctx.scales, ctx.sizes = scales, [len(weight) for weight in weights]
        ctx.has_biases = bool(biases)
        return tuple(y.split_with_sizes(ctx.sizes, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        target = ctx.scales.target(GRADIENT)
        if ctx.has_biases:
            g8, *of_biases = cast_with_sums(grads, target)
        else:
            g8, of_biases = cast((side_by_side(grads),), 0, target, transpose=True), []
        of_x, of_weights = product_gradients(g8, ctx.saved_tensors, ctx.scales)
        of_parameters = (each.split_with_sizes(ctx.sizes) for each in (of_weights, *of_biases))
        return of_x, None, None, None, None, *chain.from_iterable(of_parameters)


def multiply_inputs(
    x: Tensor,
    x8: Fp8Matrix | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: ProductScales,
    records: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A product's result [R, N], and both factors' transposes in FP8 for its backward.

    There are as many biases as weights, or none if they are added elsewhere.
    """
    if x8 is None:
        x8 = cast((x,), 0, scales.target(INPUT, records=records), transpose=records)
    w8 = cast(weights, 0, scales.target(WEIGHT, records=records), transpose=records)
    bias = torch.cat(tuple(biases)).to(torch.bfloat16) if biases else None
    y = _multiply(x8.rows, w8.rows, x8.unit, w8.unit, bias, is_forward=True)
    return y, x8.transposed, w8.transposed


def product_gradients(
    g8: Fp8Matrix, transposed: Sequence[Tensor], scales: ProductScales
) -> tuple[Tensor, Tensor]:
    """Gradients of input [R, K] and weights [N, K], bfloat16, from that of the result [R, N].

    `transposed` are both factors' transposes in FP8.
    """
    assert g8.transposed is not None
    x8_transposed, w8_transposed = transposed
    input_unit, weight_unit, _ = scales.units.unbind()
    of_x = _multiply(g8.rows, w8_transposed, g8.unit, weight_unit)
    return of_x, _multiply(g8.transposed, x8_transposed, g8.unit, input_unit)


def _multiply(
    a: Tensor,
    b: Tensor,
    a_unit: Tensor,
    b_unit: Tensor,
    bias: Tensor | None = None,
    *,
    is_forward: bool = False,
) -> Tensor:
    """a b^T (+ bias) of FP8 [m, k] and [n, k] in bfloat16 [m, n]: n and k multiples of 16."""
    if a.device.type == "cpu":  # torch's own FP8 product is slow there
        y = a.float() @ b.float().t() * (a_unit * b_unit)
        return (y if bias is None else y + bias).bfloat16()
    return _multiply_in_fp8(a, b, a_unit, b_unit, bias, is_forward=is_forward)


def _multiply_in_fp8(
    a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, bias: Tensor | None, *, is_forward: bool
) -> Tensor:
    """`_multiply` by torch's operator, on every device that has it."""
    # Forward sums may use fewer bits, which is faster on Hopper; published runs do so.
    return torch._scaled_mm(
        a, b.t(), a_unit, b_unit, bias, out_dtype=torch.bfloat16, use_fast_accum=is_forward
    )


class Fp8Blocks(Blocks):
    """The readable blocks with the encoder's products in FP8, for every device that has it.

    Embeddings, heads and pooler do not change. A tensor's attribute `fp8` is its FP8 copy under the
    scales of the product that reads it, if the kernel that made the tensor has cast it.
    """

    def __init__(self, scales: Fp8Scales) -> None:
        self._scales = scales

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """See `Blocks`."""
        return multiply_fp8(self._scales, x, layers)


def multiply_fp8(scales: Fp8Scales, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """`Blocks.multiply` in FP8."""
    weights = [each.weight for each in layers]
    biases = [each.bias for each in layers if each.bias is not None]
    return product(x, weights, biases, scales.of(layers[0]), take_copy(x))


def take_copy(x: Tensor) -> Fp8Matrix | None:
    """Remove the FP8 copy from `x` and return it; else a backward that keeps `x` keeps the copy."""
    copy: Fp8Matrix | None = x.__dict__.pop("fp8", None)
    return copy

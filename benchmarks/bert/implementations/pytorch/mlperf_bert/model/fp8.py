"""Matrix products in FP8 with scales from the previous update, and blocks that use them.

Shapes use the letters R (rows), K (input features) and N (output features of all weights of a
product together).

A cast to FP8 divides a matrix by its *unit*, a power of two, and rounds it. The value 1 in FP8 then
represents one unit. Inputs and weights are rounded to E4M3, and gradients to E5M2 (arXiv
2209.05433). The unit is derived from the largest |value| of the previous update ("delayed scaling"
with a history of one), because finding the current maximum first would cost another pass over each
matrix. The host reads nothing from the device, so these products can be captured in a CUDA graph.
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

# One product for query, key and value, one for attention's output, and two for feed-forward.
PRODUCTS_PER_LAYER = 4
INPUT, WEIGHT, GRADIENT = 0, 1, 2  # roles of a product's matrices
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
# A new unit puts the observed maximum between limit / headroom and twice that value. So a maximum
# may grow by a factor of at least headroom / 2 in the next update before it saturates. A unit that
# is too large costs no precision, only range at the lower end, where E5M2 has the most. In 200
# updates of bert_cpu_tiny, maxima grew from one update to the next by a factor of at most 1.5 for
# inputs, 1.01 for weights and 3.7 for gradients.
HEADROOM = (4.0, 4.0, 32.0)
# The first update assumes these maxima. Hidden states after LayerNorm are around 1, weights are
# below 1, and the gradient of a mean over masked tokens is far below 1. Assuming too much does no
# harm, because FP8 resolves values down to 2**-15 (E4M3) or 2**-26 (E5M2) of a maximum.
FIRST_MAXIMA = (32.0, 4.0, 2.0**-4)
_SMALLEST_UNIT = 2.0**-60  # so that the product of two units is a normal float32
_EXPONENT_BITS = 0x7F800000  # mask of a float32's exponent


@dataclass(frozen=True, slots=True, eq=False)
class ProductScales:
    """The units and maxima of one product's three matrices, as views of the model's state.

    Units and maxima are each float32 [3], for input, weight and gradient.
    """

    units: Tensor
    maxima: Tensor  # recorded so far in this update

    def target(self, role: int, *, records: bool = True) -> Target:
        """Return the dtype, unit and maximum for casting the matrix that has the given role.

        If `records` is set, the cast records the matrix's maximum.
        """
        maximum = self.maxima[role] if records else None
        return Target(DTYPES[role], self.units[role], maximum)


class Fp8Scales:
    """The units and maxima of all products, on the device. `state` is float32 [2, products, 3].

    As in published runs, every rank has its own scales, because a maximum over all ranks would need
    a collective in every update. So rounding differs slightly between ranks, just as their samples
    do.
    """

    def __init__(self, num_products: int, device: torch.device) -> None:
        """Initialize the units to fit FIRST_MAXIMA, and the recorded maxima to zero."""
        limits = [torch.finfo(dtype).max for dtype in DTYPES]
        self._headroom = torch.tensor(HEADROOM, device=device) / torch.tensor(limits, device=device)
        self.state = torch.zeros((2, num_products, 3), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._number_of: dict[nn.Linear, int] = {}
        self.state[1] = torch.tensor(FIRST_MAXIMA, device=device)
        self.follow(self.step + 1)
        self.step.zero_()

    def assign(self, products: Sequence[Sequence[nn.Linear]]) -> None:
        """Store the linear layers of each product, for all products in order."""
        assert len(products) == self.state.shape[1]
        self._number_of = {
            linear: number for number, linears in enumerate(products) for linear in linears
        }

    def of(self, linear: nn.Linear) -> ProductScales:
        """Return the scales of the product to which the layer `linear` belongs."""
        return self._get(self._number_of[linear])

    def behind(self, linear: nn.Linear) -> ProductScales | None:
        """Return the scales of the next product after that of `linear`, or None if none follows."""
        number = self._number_of[linear] + 1
        return self._get(number) if number < self.state.shape[1] else None

    def _get(self, number: int) -> ProductScales:
        units, maxima = self.state
        return ProductScales(units[number], maxima[number])

    def follow(self, step: Tensor) -> None:
        """Update the units from the previous step's maxima, before each training forward pass.

        The units change only when a new step starts, so all micro-batches of an update use the same
        units. If a matrix had only zeros or non-finite values, its unit does not change.

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
        """Return the tensors that a step changes, by name, so that callers can save them."""
        return {"fp8.state": self.state, "fp8.step": self.step}


def cast(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """Join matrices along `dim` and cast the result to FP8, with a transpose if requested.

    On CUDA a Triton kernel does this, and on other devices `fp8_cast.reference`.
    """
    if parts[0].device.type == "cuda":
        from mlperf_bert.model import triton_fp8  # imports triton

        return triton_fp8.cast(parts, dim, target, transpose=transpose)
    return reference(parts, dim, target, transpose=transpose)


def cast_with_sums(parts: Sequence[Tensor], target: Target) -> tuple[Fp8Matrix, Tensor]:
    """Join the columns of parts, cast the result to FP8, and sum each column over the rows.

    The FP8 matrix has a transpose. The sums are [C] in the dtype of the parts.
    """
    if parts[0].device.type == "cuda":
        from mlperf_bert.model import triton_fp8

        return triton_fp8.cast_with_sums(parts, target)
    return reference(parts, 1, target, transpose=True), torch.cat([each.sum(0) for each in parts])


def check_fp8(config: ModelSection, device: torch.device) -> None:
    """Raise ConfigError if the model's sizes or the device rule out FP8 products."""
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(config, name)
        if size % COLUMNS_MULTIPLE:
            problem = f"must be a multiple of {COLUMNS_MULTIPLE} for FP8 products, not {size}"
            remedy = "round the size up, or set model.precision to 'bf16'"
            raise ConfigError(f"model.{name}", problem, remedy)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "model.precision",
            f"'fp8' needs compute capability 8.9 or higher, which "
            f"{torch.cuda.get_device_name(device)} does not have",
            "set model.precision to 'bf16', or use a newer GPU",
        )


def product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: ProductScales,
    x8: Fp8Matrix | None = None,
) -> tuple[Tensor, ...]:
    """Compute x W^T (+ b) for each weight (and bias) as one product in FP8.

    If gradients are enabled, maxima are recorded and the backward pass also runs in FP8. For the
    backward pass, autograd saves the transposed FP8 copies of input and weights instead of the
    input.

    Args:
        x: [R, K], floating dtype.
        weights: [N_i, K] each, where K and N_i are multiples of 16.
        biases: [N_i] each, or an empty sequence.
        scales: the scales of this product.
        x8: `x` in FP8 under these scales if the kernel that computed `x` has cast it, or None. If
            `x8` is given, `x` is not read.

    Returns:
        bfloat16 [R, N_i] each, which are columns of one [R, N].
    """
    records = torch.is_grad_enabled()
    results: tuple[Tensor, ...] = _Product.apply(
        x, x8, scales, records, len(weights), *weights, *biases
    )
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
            g8, *grad_biases = cast_with_sums(grads, target)
        else:
            g8, grad_biases = cast((side_by_side(grads),), 0, target, transpose=True), []
        grad_x, grad_weights = product_gradients(g8, ctx.saved_tensors, ctx.scales)
        parts = (each.split_with_sizes(ctx.sizes) for each in (grad_weights, *grad_biases))
        return grad_x, None, None, None, None, *chain.from_iterable(parts)


def multiply_inputs(
    x: Tensor,
    x8: Fp8Matrix | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    scales: ProductScales,
    records: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a product [R, N], and the FP8 transposes of both factors for its backward pass.

    The transposes are None if `records` is False. There are as many biases as weights, or none if
    the caller adds the biases itself.
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
    """Compute a product's gradients of the input [R, K] and of the weights [N, K], in bfloat16.

    `g8` is the gradient of the result [R, N]. `transposed` contains the FP8 transposes of both
    factors.
    """
    assert g8.transposed is not None
    x8_transposed, w8_transposed = transposed
    input_unit, weight_unit, _ = scales.units.unbind()
    grad_x = _multiply(g8.rows, w8_transposed, g8.unit, weight_unit)
    return grad_x, _multiply(g8.transposed, x8_transposed, g8.unit, input_unit)


def _multiply(
    a: Tensor,
    b: Tensor,
    a_unit: Tensor,
    b_unit: Tensor,
    bias: Tensor | None = None,
    *,
    is_forward: bool = False,
) -> Tensor:
    """Compute a b^T (+ bias) of FP8 matrices [m, k] and [n, k], as bfloat16 [m, n].

    n and k must be multiples of 16.
    """
    if a.device.type == "cpu":  # torch's own FP8 product is slow on a CPU
        y = a.float() @ b.float().t() * (a_unit * b_unit)
        return (y if bias is None else y + bias).bfloat16()
    return _multiply_in_fp8(a, b, a_unit, b_unit, bias, is_forward=is_forward)


def _multiply_in_fp8(
    a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, bias: Tensor | None, *, is_forward: bool
) -> Tensor:
    """Compute the result of `_multiply` with torch's FP8 operator, if the device supports it."""
    # Sums of the forward pass may use fewer bits, as in published runs, which is faster on Hopper.
    return torch._scaled_mm(
        a, b.t(), a_unit, b_unit, bias, out_dtype=torch.bfloat16, use_fast_accum=is_forward
    )


class Fp8Blocks(Blocks):
    """Reference blocks with the encoder's products in FP8.

    Embeddings, heads and pooler are the same as in `Blocks`. If the kernel that computed a tensor
    has also cast it to FP8, the tensor's attribute `fp8` is the FP8 copy. The copy was cast with
    the scales of the product that reads it.
    """

    def __init__(self, scales: Fp8Scales) -> None:
        super().__init__()
        self._scales = scales

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Apply all layers to `x` [R, any] as one product in FP8. See `Blocks.multiply`."""
        return multiply_fp8(self._scales, x, layers)


def multiply_fp8(scales: Fp8Scales, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply linear layers to `x` [R, K] as one product in FP8. See `Blocks.multiply`."""
    weights = [each.weight for each in layers]
    biases = [each.bias for each in layers if each.bias is not None]
    return product(x, weights, biases, scales.of(layers[0]), pop_fp8_copy(x))


def pop_fp8_copy(x: Tensor) -> Fp8Matrix | None:
    """Remove the FP8 copy of `x` from its attributes, and return the copy or None.

    If the copy stayed, a backward pass that saves `x` would keep it in memory too.
    """
    copy: Fp8Matrix | None = x.__dict__.pop("fp8", None)
    return copy

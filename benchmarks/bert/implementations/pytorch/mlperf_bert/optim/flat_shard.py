"""What an update kernel works on: equal slices of all flat buffers, cut into blocks of one tensor.

A flat buffer holds many tensors one after the other, each beginning at a multiple of BLOCK elements
and followed by zeros up to the next. So every block of BLOCK elements belongs to one tensor, and so
does every block of a slice that is cut at a multiple of BLOCK: a kernel looks up whose it is. The
zeros stay zero under both update rules.
"""

from dataclasses import dataclass

from torch import Tensor

from mlperf_bert.optim.flat_layout import BLOCK


@dataclass(frozen=True, slots=True)
class FlatShard:
    """n elements (a multiple of BLOCK) of all flat buffers, contiguous, on one device."""

    masters: Tensor  # [n] float32 or float64: the weights that are updated
    gradients: Tensor  # [n] of any float dtype
    weights: Tensor | None  # [n] bfloat16 or float16: receives the rounded masters; None if they do
    exp_avg: Tensor  # [n] as masters
    exp_avg_sq: Tensor  # [n] as masters
    tensor_of_block: Tensor  # [n / BLOCK] int32: which tensor a block belongs to
    weight_decay: Tensor  # [tensors] float64, of the whole model
    adapted: Tensor  # [tensors] bool: whether LAMB scales the tensor's update

    def part(self, start: int, stop: int) -> "FlatShard":
        """The elements `start` to `stop`, both multiples of BLOCK, as views."""
        elements, blocks = slice(start, stop), slice(start // BLOCK, stop // BLOCK)
        return FlatShard(
            masters=self.masters[elements],
            gradients=self.gradients[elements],
            weights=None if self.weights is None else self.weights[elements],
            exp_avg=self.exp_avg[elements],
            exp_avg_sq=self.exp_avg_sq[elements],
            tensor_of_block=self.tensor_of_block[blocks],
            weight_decay=self.weight_decay,
            adapted=self.adapted,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """An optimizer's constants, the same for all tensors and steps."""

    beta_1: float
    beta_2: float
    epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScalars:
    """What changes from step to step: 0-d tensors on the shard's device, never read by the host
    where that is a GPU.
    """

    learning_rate: Tensor  # float64
    correction_1: Tensor  # float64: 1 - beta_1 ** t, of the t-th update from 1
    correction_2: Tensor  # float64: 1 - beta_2 ** t
    gradient_factor: Tensor  # float32: multiplies every gradient first (clip, loss scale)
    skip: Tensor  # float32: where it is 1.0, nothing is written

"""What Adam and LAMB scale each element of a gradient by, for measures of its noise.

P = 1 / (sqrt(v / (1 - beta_2^t)) + epsilon), from second moments v of before the update: those of
after it hold a part of the very noise that is measured. But rows of rare words have moments that
were forgotten: the update itself is held back by what the new gradient adds to v, (1 - beta_2) g^2,
while P of before it would let a few such elements outweigh all others. So v is not taken below
(1 - beta_2) times its mean over the tensor, which stands for that g^2. LAMB's trust ratio, one
number a tensor, is left out.
"""

import torch
from torch import Tensor


def least_moment(exp_avg_sq: Tensor, beta_2: float) -> Tensor:
    """0-d: below which no element of a tensor's second moments is taken."""
    return (1 - beta_2) * exp_avg_sq.mean()


def preconditioner(
    exp_avg_sq: Tensor, least: Tensor, correction_2: Tensor, epsilon: float
) -> Tensor:
    """P, element by element; 0 where there are no moments at all, as before the first update.

    Args:
        exp_avg_sq: any shape, float32 or float64, as is the result.
        least: of `least_moment`, 0-d or of a shape that broadcasts.
        correction_2: 0-d, 1 - beta_2^t after t updates.
    """
    moments = torch.maximum(exp_avg_sq, least)
    is_unknown = moments == 0
    scaling = moments.div_(correction_2).sqrt_().add_(epsilon).reciprocal_()
    return scaling.masked_fill_(is_unknown, 0)

"""What tokens see in layers with windows. No torch."""

import numpy as np
from numpy.typing import NDArray


def attended_tokens(lengths: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """The number of tokens at most `reach` places away, summed over the tokens of a sequence.

    The sum over i < L of min(i, reach) + 1 + min(L - 1 - i, reach), for lengths L of any shape.
    """
    far = np.minimum(reach, lengths - 1)
    return lengths + far * (2 * lengths - 1 - far)

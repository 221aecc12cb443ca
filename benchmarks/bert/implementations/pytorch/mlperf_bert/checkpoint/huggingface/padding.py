"""Rows that pad the vocabulary where a source has none: made so that they never matter.

The word embedding has a multiple of 8 rows (decision 0002), foreign ones often have a row a word.
A row of zeros with a bias of PADDING_BIAS has a probability of exactly zero in the softmax, and so
a gradient of zero: training leaves it as it is, loss and accuracy are those without it, and export
knows it again and leaves it out.
"""

import numpy as np
from numpy.typing import NDArray

PADDING_BIAS = -10_000.0  # float16 holds it, and exp of it is zero in float64 too
MOST_SPARE_ROWS = 1024  # beyond the tokens: the padding in use is to multiples of 8 .. 1,024


def with_rows(values: NDArray[np.float32], num_rows: int, fill: float) -> NDArray[np.float32]:
    """The first `num_rows` rows of an array [R] or [R, D], or all and filled rows after them."""
    if len(values) >= num_rows:
        return np.ascontiguousarray(values[:num_rows])
    padded = np.full((num_rows, *values.shape[1:]), fill, np.float32)
    padded[: len(values)] = values
    return padded


def rows_that_matter(words: NDArray[np.float32], bias: NDArray[np.float32], num_tokens: int) -> int:
    """How many rows are left without those at the end that pad as described above.

    Args:
        words: float32 [R, D], the word embedding.
        bias: float32 [R], of the masked-LM head.
        num_tokens: of the vocabulary; so many rows at least matter.
    """
    spare = (bias == PADDING_BIAS) & ~words.any(axis=1)
    spare[:num_tokens] = False
    return len(spare) - int(np.argmin(spare[::-1])) if not spare.all() else num_tokens

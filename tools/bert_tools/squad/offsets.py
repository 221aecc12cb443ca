"""Splits a text into tokens with the position of each, by the `tokenizers` library.

Word pieces are split as `transformers` splits them with a saved model's tokenizer.json. A test
compares the tokens with those that `prepare` makes. They differ on a few rare characters only, such
as a capital sigma at the end of a Greek word.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_tools.huggingface.tokenizer import word_piece_tokenizer
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import Vocabulary


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text and the characters of each, from `starts` to before `ends`; int64 [n].

    A token's characters may begin with white space. An accent that its letter dropped belongs to no
    token.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def make_offset_encoder(vocabulary: Vocabulary) -> Callable[[str], Tokens]:
    """A function from a text to its tokens, without special ones.

    Raises ConfigError if the `tokenizers` package is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tokenizers"
        raise ConfigError("squad", "needs the package `tokenizers`", remedy) from None
    library = tokenizers.Tokenizer.from_str(json.dumps(word_piece_tokenizer(vocabulary)))
    library.encode_special_tokens = True  # "[SEP]" in a text was written by its author

    def encode(text: str) -> Tokens:
        found = library.encode(text, add_special_tokens=False)
        bounds = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Tokens(np.array(found.ids, dtype=np.int64), bounds[:, 0], bounds[:, 1])

    return encode

"""Vocabulary training: exact size, frequent words whole, nothing left to chance."""

import subprocess
import sys

import pytest

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.prepare.train_vocabulary import train_vocabulary
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

LINES = ["the thing sings the song", "the Thing! thinks; the things sing", "oh, oh oh."]


def test_size_is_exact_and_special_tokens_come_first() -> None:
    tokens = train_vocabulary(LINES, 50)
    assert len(tokens) == len(set(tokens)) == 50
    assert tuple(tokens[:5]) == SPECIAL_TOKENS
    assert {"the", "oh", "thing", "!", "##s"} <= set(tokens)


def test_small_text_is_filled_up() -> None:
    tokens = train_vocabulary(LINES, 300)
    assert len(tokens) == 300
    assert tokens[-1].startswith("[unused")


def test_too_small_a_size_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: is 10"):
        train_vocabulary(LINES, 10)


def test_the_most_frequent_pair_is_merged_first() -> None:
    first = next(token for token in train_vocabulary(LINES, 300) if len(token) == 2)
    assert first == "th"


def test_neither_line_order_nor_hash_seed_matters() -> None:
    tokens = train_vocabulary(LINES, 45)
    assert train_vocabulary(LINES[::-1], 45) == tokens
    code = (
        "from mlperf_bert.prepare.train_vocabulary import train_vocabulary\n"
        f"print(train_vocabulary({LINES!r}, 45))"
    )
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == str(tokens)

"""A tiny random BERT with its tokenizer, and files of made-up texts."""

import random

import pytest
import torch
from score_cases import WORDS, opinions, save_model, write_lines


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    return save_model(tmp_path_factory.mktemp("score") / "small", seed=1)


@pytest.fixture(scope="session")
def other(model):
    return save_model(model.parent / "other", seed=2, hidden_size=16)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("labelled") / "set.jsonl", opinions(80))


@pytest.fixture(scope="session")
def rated(tmp_path_factory):
    """Pairs of texts with the number of words that the second one took from the first one."""
    rng = random.Random(3)
    rows = []
    for _ in range(40):
        words, kept = rng.sample(WORDS, 5), rng.randint(0, 5)
        rest = [word for word in WORDS if word not in words]
        second = [*words[:kept], *rng.sample(rest, 5 - kept)]
        rows.append({"text": " ".join(words), "text_pair": " ".join(second), "score": kept})
    return write_lines(tmp_path_factory.mktemp("rated") / "pairs.jsonl", rows)

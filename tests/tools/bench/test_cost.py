"""`bench cost`: the fit finds what times are made of, and the command prints a config's lines."""

import argparse
import itertools
import json
import tomllib

import numpy as np
import pytest

from bert_tools.bench import cli, timing
from bert_tools.bench.cost import batch_shapes, fit_cost
from bert_tools.bench.timing import Contender
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from support import CONFIGS

COUNTS, LENGTHS = np.array(batch_shapes(3072, 512)).T
TOKENS, SQUARES = COUNTS * LENGTHS, COUNTS * LENGTHS**2
TINY = (
    *("cost", "--layers", "1", "--hidden", "32", "--heads", "2", "--vocab", "101"),
    *("--max-length", "32", "--tokens", "64", "--seconds", "0.1", "--threads", "1"),
)
CONFIG = CONFIGS / "cpu_tiny.toml"
COST_A, COST_B, CONSTANT = 0.25, 1e-3, 4.0


def bench(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(argument) for argument in arguments]))


def times_made_of(
    monkeypatch: pytest.MonkeyPatch, tokens: int, max_length: int
) -> list[tuple[int, int]]:
    """Let batches take what their shapes cost, and return those; the model still runs."""
    shapes = batch_shapes(tokens, max_length)
    ms = itertools.cycle(
        CONSTANT + COST_A * count * length + COST_B * count * length**2 for count, length in shapes
    )

    def seconds_of(run: Contender, batch: int) -> float:
        assert run(batch).isfinite()
        return next(ms) / 1e3

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    return shapes


@pytest.mark.parametrize("cost_b", [0.0, 2e-4])
def test_fit_finds_the_coefficients(cost_b: float) -> None:
    ms = 7.0 + 0.3 * TOKENS + cost_b * SQUARES
    fit = fit_cost(TOKENS, SQUARES, ms)
    assert (fit.constant, fit.cost_a) == pytest.approx((7.0, 0.3))
    assert fit.cost_b == pytest.approx(cost_b, abs=1e-12)
    np.testing.assert_allclose(fit.fitted_ms, ms)


def test_negative_quadratic_cost_counts_as_zero() -> None:
    fit = fit_cost(TOKENS, SQUARES, 7.0 + 0.3 * TOKENS - 1e-5 * SQUARES)
    assert fit.free_cost_b == pytest.approx(-1e-5)
    assert fit.cost_b == 0
    np.testing.assert_allclose(fit.fitted_ms, fit.constant + fit.cost_a * TOKENS)


def test_time_that_does_not_grow_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench cost: .*--tokens or more --seconds"):
        fit_cost(TOKENS, SQUARES, 900.0 - 0.1 * TOKENS)


def test_shapes_have_equal_totals_of_tokens() -> None:
    assert set(TOKENS.tolist()) == {1536, 3072}
    assert {16, 512} <= set(LENGTHS.tolist())
    # Totals and lengths vary each for themselves, or the three terms could not be told apart.
    assert np.linalg.matrix_rank(np.stack([np.ones(len(TOKENS)), TOKENS, SQUARES / 512])) == 3


@pytest.mark.parametrize(("tokens", "max_length"), [(1, 8), (50, 50), (7, 100)])
def test_any_length_has_shapes(tokens: int, max_length: int) -> None:
    shapes = batch_shapes(tokens, max_length)
    assert max(length for _, length in shapes) == max_length
    assert min(min(shape) for shape in shapes) >= 1


def test_json_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = times_made_of(monkeypatch, 64, 32)
    assert bench(*TINY, "--attention", "packed", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    assert result["unit"] == "ms"
    assert (result["layers"], result["hidden"], result["attention"]) == (1, 32, "packed")
    assert result["cost_a"] == pytest.approx(COST_A)
    assert result["cost_b"] == pytest.approx(COST_B)
    assert result["constant"] == pytest.approx(CONSTANT)
    assert result["residual"] == pytest.approx(0, abs=1e-6)
    assert list(zip(result["batch_sizes"], result["lengths"], strict=True)) == shapes


def test_words_hold_lines_for_the_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times_made_of(monkeypatch, 16 * 64 // 2, 64)  # half of cpu_tiny's batch
    changes = ("--set", "model.vocab_size=101", "--set", "model.hidden_size=32")
    assert bench("cost", "--config", CONFIG, *changes, "--seconds", "0.1", "--threads", "1") == 0
    printed = capsys.readouterr()
    words, _, lines = printed.out.partition("[data]\n")
    assert "residual" in words and "hidden 32, 2 heads, 101 words" in words
    data = tomllib.loads(lines)
    overrides = [f"data.{name}={value}" for name, value in data.items()]
    config = load_config(CONFIG, overrides)
    assert config.cost_coefficients == pytest.approx((COST_A, COST_B))
    assert "round 1/" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", CONFIG, "--layers", "2"), "--layers: is given beside --config"),
        (("--config", CONFIG, "--max-length", "64"), "--max-length: is given beside"),
        (("--set", "model.num_layers=1"), "--set: is given without --config"),
        (("--tokens", "0"), "--tokens: is 0"),
        (("--seconds", "0"), "--seconds: is 0"),
        (("--hidden", "100"), "--hidden: 100 cannot be divided by 64"),
        (("--dropout", "1"), "--dropout: is 1"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench("cost", *arguments)

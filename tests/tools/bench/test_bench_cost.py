"""`bench cost`: the fit finds what times are made of, and the command prints a config's lines."""

import itertools
import tomllib
from collections.abc import Callable

import numpy as np
import pytest
from bench_cases import bench, result_of

from bert_tools.bench import timing
from bert_tools.bench.cost import batch_shapes, fit_cost
from bert_tools.bench.timing import Contender
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from support import CONFIGS

COUNTS, LENGTHS = np.array(batch_shapes(3072, 512)).T
TOKENS, SQUARES = COUNTS * LENGTHS, COUNTS * LENGTHS**2
CONFIG = CONFIGS / "cpu_tiny.toml"
COST_A, COST_B, CONSTANT = 0.25, 1e-3, 4.0


def times_made_of(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    max_length: int,
    attended: Callable[[int], float] = lambda length: length**2,
) -> list[tuple[int, int]]:
    """Let batches take what their shapes cost, and return those; the model still runs."""
    shapes = batch_shapes(tokens, max_length)
    ms = itertools.cycle(
        CONSTANT + count * (COST_A * length + COST_B * attended(length)) for count, length in shapes
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
    assert (fit["constant"], fit["cost_a"]) == pytest.approx((7.0, 0.3))
    assert fit["cost_b"] == pytest.approx(cost_b, abs=1e-12)
    np.testing.assert_allclose(fit["fitted_ms"], ms)


def test_negative_quadratic_cost_counts_as_zero() -> None:
    fit = fit_cost(TOKENS, SQUARES, 7.0 + 0.3 * TOKENS - 1e-5 * SQUARES)
    assert fit["free_cost_b"] == pytest.approx(-1e-5)
    assert fit["cost_b"] == 0
    np.testing.assert_allclose(fit["fitted_ms"], fit["constant"] + fit["cost_a"] * TOKENS)


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


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = times_made_of(monkeypatch, 64, 32)
    options = ("--tokens", 64, "--seconds", 0.1)
    result = result_of("cost", *options, settings=("model.attention=packed",))
    assert result["unit"] == "ms"
    assert (result["layers"], result["hidden"], result["attention"]) == (1, 32, "packed")
    assert result["cost_a"] == pytest.approx(COST_A)
    assert result["cost_b"] == pytest.approx(COST_B)
    assert result["constant"] == pytest.approx(CONSTANT)
    assert result["residual"] == pytest.approx(0, abs=1e-6)
    assert list(zip(result["batch_sizes"], result["lengths"], strict=True)) == shapes


def test_windows_cost_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer sees all 32 tokens, one three tokens: each but the first and the last."""
    times_made_of(monkeypatch, 64, 32, lambda length: (length**2 + 3 * length - 2) / 2)
    modern = ("architecture=modern", "objective=mlm", "attention_window=2", "num_layers=2")
    settings = tuple(f"model.{each}" for each in modern)
    result = result_of("cost", "--tokens", 64, "--seconds", 0.1, settings=settings)
    assert (result["cost_a"], result["cost_b"]) == pytest.approx((COST_A, COST_B))


def test_words_hold_lines_for_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    times_made_of(monkeypatch, 16 * 64 // 2, 64)  # half of cpu_tiny's batch
    changes = ("model.vocab_size=101", "model.hidden_size=32")
    printed, progress = bench("cost", "--config", CONFIG, "--seconds", 0.1, settings=changes)
    words, _, lines = printed.partition("[data]\n")
    assert "residual" in words and "hidden 32, 2 heads, 101 words" in words
    data = tomllib.loads(lines)
    overrides = [f"data.{name}={value}" for name, value in data.items()]
    config = load_config(CONFIG, overrides)
    assert config.cost_coefficients == pytest.approx((COST_A, COST_B))
    assert "round 1/" in progress

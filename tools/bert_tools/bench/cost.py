"""`bench cost`: cost of a sequence of L tokens, cost_a * L + cost_b * L**2, measured here.

Forward and backward of the whole model, heads included, run over batches of equal lengths. Only
attention is quadratic, so at equal tokens the time rises with the length. Two totals of tokens
separate the cost of tokens from the fixed cost of a forward (launches, memory, the loss). In layers
with windows, what the tokens see counts in place of L**2 (`CostModel`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_tools.bench.synthetic import synthetic_samples
from bert_tools.bench.timing import Contender, InterleavedTimes
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import cost_model
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.length_histogram import SHORTEST
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import pretraining_loss
from mlperf_bert.step.eager import training_loss_sums, weights_dtype

Float64Array = NDArray[np.float64]

# Shares of the longest length; 3 times that, at 512 tokens, divides evenly by all of them.
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
MOST_ROUNDS = 50


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    tokens: int | None,
    seconds: float,
) -> dict[str, Any]:
    """The JSON object of `bench cost`; only the first round may begin after `seconds`.

    The larger batches have `tokens` tokens, by default about a rank's forward; the smaller ones
    have half as many. Raises ConfigError if the time does not grow with the tokens.
    """
    seed, longest = int(config.run.seed), config.data.max_seq_length
    torch.manual_seed(derive_seed(seed, "dropout"))
    model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
    model.to(weights_dtype(config.model.precision))
    shapes = batch_shapes(tokens or config.parallel.local_batch_size * longest // 2, longest)
    contenders = {
        f"{count} x {length}": _contender(model, _batch(count, length, config).to(device))
        for count, length in shapes
    }
    report(f"{len(contenders)} shapes, each once to warm up, then in turn")
    times = InterleavedTimes(contenders, num_batches=1)
    times.run_once()
    times.measure(
        num_steps=MOST_ROUNDS,
        seconds=seconds,
        report=lambda line: report(line.partition(":")[0].replace("step", "round")),
    )
    ms = np.array([1e3 * times.seconds_per_batch(name) for name in contenders])
    counts, lengths = np.array(shapes).T
    attended = cost_model(config).attended(lengths.astype(np.float64))
    fit = fit_cost(counts * lengths, counts * attended, ms)
    deviation = fit["fitted_ms"] / ms - 1
    return {
        "schema_version": 1,
        **fit,
        "unit": "ms",
        "lengths": lengths.tolist(),
        "batch_sizes": counts.tolist(),
        "ms": ms.tolist(),
        "fitted_ms": fit["fitted_ms"].tolist(),
        "residual": float(np.sqrt((deviation**2).mean())),
        "largest_residual": float(np.abs(deviation).max()),
        "rounds": times.num_steps,
        "layers": config.model.num_layers,
        "hidden": config.model.hidden_size,
        "heads": config.model.num_heads,
        "vocabulary": config.model.vocab_size,
        "attention": model.attention.name,
        "precision": config.model.precision,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def batch_shapes(tokens: int, max_length: int) -> list[tuple[int, int]]:
    """Sequences and their length, for about `tokens` and half as many."""
    lengths = sorted({max(SHORTEST, round(max_length * share)) for share in SHARES})
    shapes = {
        (max(1, round(total / length)), length)
        for total in (tokens / 2, tokens)
        for length in lengths
    }
    return sorted(shapes, key=lambda shape: (shape[1], shape[0]))


def fit_cost(
    tokens: NDArray[np.int64], attended: NDArray[np.int64] | Float64Array, ms: Float64Array
) -> dict[str, Any]:
    """Least squares of ms = constant + cost_a * tokens + cost_b * attended tokens, each [n].

    A negative `cost_b` counts as zero; `free_cost_b` keeps its value. Raises ConfigError if
    `cost_a` is not above zero.
    """
    terms = np.stack([np.ones(len(ms)), tokens, attended.astype(np.float64)], axis=1)
    constant, cost_a, free_cost_b = _least_squares(terms, ms)
    cost_b = free_cost_b
    if free_cost_b < 0:
        constant, cost_a = _least_squares(terms[:, :2], ms)
        cost_b = 0.0
    if not cost_a > 0:
        raise ConfigError(
            "bench cost",
            f"the time of a token came out as {cost_a:.1e} ms",
            "measure on a quieter machine, with more --tokens or more --seconds",
        )
    return {
        "cost_a": cost_a,
        "cost_b": cost_b,
        "constant": constant,
        "free_cost_b": free_cost_b,
        "fitted_ms": terms @ (constant, cost_a, cost_b),
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people, with the lines for a config."""
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['heads']} heads, "
        f"{result['vocabulary']} words, attention {result['attention']}, {result['precision']} on "
        f"{result['device']}, {result['threads']} threads",
        f"forward and backward, median of {result['rounds']} rounds:",
        "sequences  length        ms    fitted",
    ]
    columns = (result[name] for name in ("batch_sizes", "lengths", "ms", "fitted_ms"))
    lines += [
        f"{count:9} {length:7} {ms:9.2f} {fitted:9.2f}"
        for count, length, ms, fitted in zip(*columns, strict=True)
    ]
    lines.append(
        f"residual {result['residual']:.1%} (root mean square), at most "
        f"{result['largest_residual']:.1%}; {result['constant']:.3g} ms a forward whatever its size"
    )
    if result["free_cost_b"] < 0:
        lines.append(
            f"the fit gave a negative cost_b ({result['free_cost_b']:.1e}), so 0 it is: the "
            "machine was not quiet enough to see attention, or attention is 'packed', in rows of "
            "one length"
        )
    lines += ["[data]", f"cost_a = {result['cost_a']:.4g}", f"cost_b = {result['cost_b']:.4g}"]
    return "\n".join(lines)


def _least_squares(terms: Float64Array, ms: Float64Array) -> list[float]:
    scale = terms.max(axis=0)  # the squares are a million times the constant
    solution = np.linalg.lstsq(terms / scale, ms, rcond=None)[0] / scale
    coefficients: list[float] = solution.tolist()
    return coefficients


def _batch(count: int, length: int, config: RunConfig) -> UnpaddedBatch:
    samples = synthetic_samples(
        np.full(count, length),
        vocab_size=config.model.vocab_size,
        max_predictions=config.data.max_predictions,
        seed=derive_seed(int(config.run.seed), "samples", length),
    )
    num_masked = int(samples.masked_counts.sum())
    return make_batch(samples, np.arange(count), mlm_denominator=num_masked, nsp_denominator=count)


def _contender(model: BertForPretraining, batch: UnpaddedBatch) -> Contender:
    def run(number: int) -> Tensor:
        model.zero_grad()
        sums = training_loss_sums(model, batch, model.config.precision)
        loss = pretraining_loss(sums, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        # Reading it waits for the backward too, which is on the same stream.
        return loss.detach()

    return run

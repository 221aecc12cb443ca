"""`bench scale`: rate by sequences of a forward, eager and captured, and by its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bert_tools.bench.batches import run_updates
from bert_tools.bench.out_of_memory import OUT_OF_MEMORY, free_memory, reason_of
from bert_tools.bench.train import HowLong, model_in_words, rates, surroundings, timed
from bert_tools.bench.training_run import training_run
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.length_histogram import SHORTEST
from mlperf_bert.run.metrics import memory_bytes

NUM_UPDATES = 2
CAPACITY_STEP = 128  # tokens: rows of a tile of a matrix product
CAPACITIES_EACH_WAY = 4
PUBLISHED_BATCH = 448  # a global batch of the published runs, on one GPU
MODES = ("eager", "captured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of a whole sweep: no row begins after `total_seconds` but the first."""

    of_row: HowLong
    total_seconds: float
    clock: Callable[[], float]


def batch_sizes(largest: int) -> list[int]:
    """2, 4, 8, ... up to `largest`, with PUBLISHED_BATCH where that is not above it."""
    sizes = {2**power for power in range(1, largest.bit_length()) if 2**power <= largest}
    if largest >= PUBLISHED_BATCH:
        sizes.add(PUBLISHED_BATCH)
    return sorted(sizes)


def measure_batches(
    config: RunConfig,
    sizes: Sequence[int],
    device: torch.device,
    limits: Limits,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The JSON object of `bench scale`: every size, eager and captured. `report` gets progress.

    A mode goes no further when it is out of memory.
    """
    start = limits.clock()
    rows: list[dict[str, Any]] = []
    is_full: set[str] = set()
    for size in sizes:
        for mode in MODES:
            row: dict[str, Any] = {"batch": size, "step_mode": mode, "samples_per_s": None}
            if mode in is_full:
                row["reason"] = "fewer sequences were out of memory already"
            elif rows and limits.clock() - start > limits.total_seconds:
                row["reason"] = f"not begun after {limits.total_seconds:g} s"
            else:
                row |= _measured(_with(config, batch=size, mode=mode), device, limits.of_row, None)
                if row.get("reason", "").startswith(OUT_OF_MEMORY):
                    is_full.add(mode)
            report(_progress(f"batch {size}, {mode}", row))
            rows.append(row)
    return {"schema_version": 1, "rows": rows, **surroundings(config, device)}


def measure_capacities(
    config: RunConfig, device: torch.device, limits: Limits, report: Callable[[str], None]
) -> dict[str, Any]:
    """The JSON object of `bench scale --sweep`: forwards of more and fewer tokens than the mean.

    Every forward has the same sequences and exactly that many tokens. `report` gets progress.
    """
    start = limits.clock()
    rows: list[dict[str, Any]] = []
    for tokens in capacities(config):
        row: dict[str, Any] = {"tokens": tokens, "samples_per_s": None}
        if rows and limits.clock() - start > limits.total_seconds:
            row["reason"] = f"not begun after {limits.total_seconds:g} s"
        else:
            row |= _measured(config, device, limits.of_row, tokens)
        report(_progress(f"{tokens} tokens", row))
        rows.append(row)
    return {"schema_version": 1, "sweep": rows, **surroundings(config, device)}


def capacities(config: RunConfig) -> list[int]:
    """Multiples of CAPACITY_STEP around a forward's mean tokens, within what sequences can have.

    Raises ConfigError where a forward is too small for two of them.
    """
    batch, longest = config.parallel.local_batch_size, config.data.max_seq_length
    tokens = [len(part.input_ids) for update in run_updates(config, 8) for part in update]
    middle = round(sum(tokens) / len(tokens) / CAPACITY_STEP)
    found = [
        number * CAPACITY_STEP
        for number in range(middle - CAPACITIES_EACH_WAY, middle + CAPACITIES_EACH_WAY + 1)
        if SHORTEST * batch <= number * CAPACITY_STEP <= longest * batch
    ]
    if len(found) < 2:
        problem = f"{batch} sequences of at most {longest} tokens leave nothing to sweep"
        raise ConfigError("--sweep", problem, f"use more: steps are of {CAPACITY_STEP} tokens")
    return found


def _with(config: RunConfig, *, batch: int, mode: Any) -> RunConfig:
    parallel = replace(config.parallel, local_batch_size=batch)
    return replace(config, parallel=parallel, run=replace(config.run, step_mode=mode))


def _measured(
    config: RunConfig, device: torch.device, how_long: HowLong, tokens: int | None
) -> dict[str, Any]:
    """The measured part of a row, or the reason why there is none."""
    try:
        return _rates_of_run(config, device, how_long, tokens)
    except torch.OutOfMemoryError as error:
        return {"reason": reason_of(error)}
    except ConfigError as error:
        return {"reason": str(error)}
    finally:
        free_memory()  # the next row needs it


def _rates_of_run(
    config: RunConfig, device: torch.device, how_long: HowLong, tokens: int | None
) -> dict[str, Any]:
    # A function of its own, so that nothing holds the run's parts when memory is collected.
    with training_run(config, device, num_updates=NUM_UPDATES, tokens=tokens) as run:
        return {**rates(run, timed(run, how_long)), "memory_peak_bytes": memory_bytes(device)}


def _progress(what: str, row: dict[str, Any]) -> str:
    if row["samples_per_s"] is None:
        return f"{what}: {row['reason']}"
    return f"{what}: {row['samples_per_s']:.1f} samples/s, step {row['step_ms']:.2f} ms"


def title(result: dict[str, Any]) -> str:
    """What was measured, in one line for people."""
    if "sweep" not in result:
        return model_in_words(result)
    config = result["config"]
    batch, mode = config["parallel"]["local_batch_size"], config["run"]["step_mode"]
    return f"{model_in_words(result)}, batch {batch}, step {mode}"


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    if "sweep" in result:
        lines = [title(result), "  tokens  samples/s   tokens/s  step ms"]
        for row in result["sweep"]:
            lines.append(f"{row['tokens']:8} " + _cells(row, ("samples_per_s", "tokens_per_s")))
        return "\n".join(lines)
    lines = [
        title(result),
        "batch  step mode  samples/s   tokens/s  step ms  padding  memory MiB",
    ]
    for row in result["rows"]:
        cells = _cells(row, ("samples_per_s", "tokens_per_s"))
        if row["samples_per_s"] is not None:
            cells += f"  {row['padding_share']:7.2%} {row['memory_peak_bytes'] / 2**20:11.0f}"
        lines.append(f"{row['batch']:5}  {row['step_mode']:9} {cells}")
    return "\n".join(lines)


def _cells(row: dict[str, Any], names: Sequence[str]) -> str:
    if row["samples_per_s"] is None:
        return f"not measured: {row['reason']}"
    return " ".join(f"{row[name]:10.1f}" for name in names) + f" {row['step_ms']:8.2f}"

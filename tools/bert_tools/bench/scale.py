"""`bench scale`: rate by sequences per forward, eager and captured, and by tokens per forward."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.timing import OUT_OF_MEMORY, free_memory, reason_of
from bert_tools.bench.train import heading, model_in_words, rates, surroundings, timed
from bert_tools.bench.training_run import run_updates, training_run
from bert_tools.common.figures import check_picture, new_figure, png
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.length_histogram import SHORTEST
from mlperf_bert.run.metrics import memory_bytes

NUM_UPDATES = 2
CAPACITY_STEP = 128  # tokens: rows of a tile of a matrix product
CAPACITIES_EACH_WAY = 4
PUBLISHED_BATCH = 448  # a global batch of the published runs, on one GPU
MODES = ("eager", "captured")
Form = tuple[dict[str, Any], RunConfig]
"""What opens a row, and what runs."""


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    max_batch: int,
    sweep: int | None,
    total_seconds: float,
    out: Path | None,
) -> dict[str, Any]:
    """The JSON object of `bench scale`, and its rows as a PNG in `out`.

    Measures every size up to `max_batch`, eager and captured; a mode stops when it is out of
    memory. With `sweep`, forwards of so many sequences, each of a fixed number of tokens around the
    mean. After `total_seconds` no further row begins. Raises ConfigError for impossible sizes.
    """
    if out is not None:
        check_picture(out)
    rows: list[dict[str, Any]] = []
    is_full: set[str] = set()
    start = time.perf_counter()
    forms = _batches(config, max_batch) if sweep is None else _capacities(config, sweep)
    for head, of_row in forms:
        mode = of_row.run.step_mode
        row = {**head, "samples_per_s": None}
        if mode in is_full:
            row["reason"] = "fewer sequences were out of memory already"
        elif rows and time.perf_counter() - start > total_seconds:
            row["reason"] = f"not begun after {total_seconds:g} s"
        else:
            row |= _measured(of_row, device, steps, seconds, head.get("tokens"))
        if sweep is None and row.get("reason", "").startswith(OUT_OF_MEMORY):
            is_full.add(mode)
        report(_progress(row))
        rows.append(row)
    result = {
        "schema_version": 1,
        "rows" if sweep is None else "sweep": rows,
        **surroundings(config if sweep is None else _with(config, sweep), device),
    }
    if out is not None:
        write_file(out, _picture(result))
    return result


def batch_sizes(largest: int) -> list[int]:
    """Sizes 2, 4, 8, ... up to `largest`, with PUBLISHED_BATCH if it is not larger."""
    sizes = {2**power for power in range(1, largest.bit_length()) if 2**power <= largest}
    if largest >= PUBLISHED_BATCH:
        sizes.add(PUBLISHED_BATCH)
    return sorted(sizes)


def _with(config: RunConfig, batch: int, **run: Any) -> RunConfig:
    parallel = replace(config.parallel, local_batch_size=batch)
    return replace(config, parallel=parallel, run=replace(config.run, **run))


def _batches(config: RunConfig, max_batch: int) -> list[Form]:
    return [
        ({"batch": size, "step_mode": mode}, _with(config, size, step_mode=mode))
        for size in batch_sizes(max_batch)
        for mode in MODES
    ]


def _capacities(config: RunConfig, batch: int) -> list[Form]:
    """Multiples of CAPACITY_STEP around a forward's mean tokens that sequences can have.

    Raises ConfigError if a forward is too small for two of them.
    """
    config, longest = _with(config, batch), config.data.max_seq_length
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
    return [({"tokens": count}, config) for count in found]


def _measured(
    config: RunConfig, device: torch.device, steps: int, seconds: float, tokens: int | None
) -> dict[str, Any]:
    """The measurements of a row, or the reason why there are none."""
    try:
        return _rates_of_run(config, device, steps, seconds, tokens)
    except torch.OutOfMemoryError as error:
        return {"reason": reason_of(error)}
    except ConfigError as error:
        return {"reason": str(error)}
    finally:
        free_memory()  # the next row needs it


def _rates_of_run(
    config: RunConfig, device: torch.device, steps: int, seconds: float, tokens: int | None
) -> dict[str, Any]:
    # A separate function, so that nothing holds the run's parts when memory is collected.
    with training_run(config, device, num_updates=NUM_UPDATES, tokens=tokens) as run:
        return {**rates(run, timed(run, steps, seconds)), "memory_peak_bytes": memory_bytes(device)}


def _progress(row: dict[str, Any]) -> str:
    what = f"batch {row['batch']}, {row['step_mode']}" if "batch" in row else ""
    what = what or f"{row['tokens']} tokens"
    if row["samples_per_s"] is None:
        return f"{what}: {row['reason']}"
    return f"{what}: {row['samples_per_s']:.1f} samples/s, step {row['step_ms']:.2f} ms"


def title(result: dict[str, Any]) -> str:
    """Title of the measurement, one line for people."""
    return heading(result) if "sweep" in result else model_in_words(result)


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    if "sweep" in result:
        lines = [title(result), "  tokens  samples/s   tokens/s  step ms"]
        return "\n".join(lines + [f"{row['tokens']:8} {_cells(row)}" for row in result["sweep"]])
    lines = [
        title(result),
        "batch  step mode  samples/s   tokens/s  step ms  padding  memory MiB",
    ]
    for row in result["rows"]:
        cells = _cells(row)
        if row["samples_per_s"] is not None:
            cells += f"  {row['padding_share']:7.2%} {row['memory_peak_bytes'] / 2**20:11.0f}"
        lines.append(f"{row['batch']:5}  {row['step_mode']:9} {cells}")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    if row["samples_per_s"] is None:
        return f"not measured: {row['reason']}"
    return f"{row['samples_per_s']:10.1f} {row['tokens_per_s']:10.1f} {row['step_ms']:8.2f}"


def _picture(result: dict[str, Any]) -> bytes:
    """Draw the measured rows as a PNG."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    rows, x, y = result.get("sweep", ()), "tokens", "tokens_per_s"
    axes.set(xlabel="tokens of a forward", ylabel="tokens a second")
    if "rows" in result:
        rows, x, y = result["rows"], "batch", "samples_per_s"
        axes.set(xlabel="sequences of a forward", ylabel="sequences a second")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for mode in dict.fromkeys(row.get("step_mode") for row in rows):
        of_mode = [row for row in rows if row.get("step_mode") == mode]
        measured = [row for row in of_mode if row["samples_per_s"] is not None]
        axes.plot([row[x] for row in measured], [row[y] for row in measured], "o-", label=mode)
    if "rows" in result:
        axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_title(title(result), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return png(figure)

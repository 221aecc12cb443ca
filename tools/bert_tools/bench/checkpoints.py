"""`bench checkpoints`: cost of writing checkpoints while training continues.

Blocks of steps with one checkpoint and with none take turns on the same training objects.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.synthetic import DIGEST
from bert_tools.bench.train import heading, surroundings
from bert_tools.bench.training_run import ALONE, TrainingRun, training_run
from mlperf_bert.checkpoint.manifest import CheckpointState, complete_checkpoints
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig

NUM_UPDATES = 4  # distinct ones
WARM_UP_STEPS = 8


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    pairs: int,
    steps: int,
    out: Path | None,
) -> dict[str, Any]:
    """The JSON object of `bench checkpoints`, from `pairs` pairs of blocks of `steps` steps.

    Checkpoints go below `out`, which is left as it was. The first block of a pair alternates, as a
    machine may slow down over time. `report` gets a line for each pair. Raises ConfigError or
    CheckpointError if nothing can be written.
    """
    try:
        own = tempfile.TemporaryDirectory(prefix="mlperf_bert-bench-", dir=out)
    except OSError as error:
        problem = f"{error.strerror}: {out}"
        raise ConfigError("--out", problem, "name one that can be written") from None
    report(f"building on {device}, step {config.run.step_mode}")
    rows: list[dict[str, float]] = []
    with own as root, training_run(config, device, num_updates=NUM_UPDATES) as run:
        writer = CheckpointWriter(
            Path(root),
            run.optimizer,
            config,
            ALONE,
            device,
            fp8_state=run.model.fp8_state(),
            keep_last=1,
        )
        block(run, 0, WARM_UP_STEPS, writer)  # takes the memory of all later copies
        for number in range(pairs):
            first = WARM_UP_STEPS + 2 * steps * number
            order = (writer, None) if number % 2 else (None, writer)
            found = [block(run, first + steps * n, steps, each) for n, each in enumerate(order)]
            plain, written = found[::-1] if number % 2 else found
            (without_s, *_), (with_s, paused_s, waited_s) = plain, written
            row = {"without_s": without_s, "with_s": with_s, "ratio": with_s / without_s}
            rows.append({**row, "paused_s": paused_s, "waited_s": waited_s})
            report(f"pair {number + 1}/{pairs}: {_pair_in_words(rows[-1])}")
        newest = complete_checkpoints(Path(root))[0]
        num_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    ratios = sorted(row["ratio"] for row in rows)
    return {
        "schema_version": 1,
        "median_ratio": statistics.median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
        "pairs": rows,
        "steps_per_block": steps,
        "checkpoint_bytes": num_bytes,
        **surroundings(config, device),
    }


def block(
    run: TrainingRun, first: int, steps: int, writer: CheckpointWriter | None
) -> tuple[float, float, float]:
    """Train from step `first` on; with a writer a checkpoint is begun in the middle.

    Returns three times in seconds: in all, until the checkpoint is on disk; to begin it, between
    two steps; to wait for it after the last step. Raises CheckpointError if it cannot be written.
    """
    started = time.perf_counter()
    if writer is None:
        _train(run, first, first + steps)
        return time.perf_counter() - started, 0.0, 0.0
    middle = first + steps // 2
    _train(run, first, middle)
    state = CheckpointState(
        step=middle,
        samples=middle * run.config.parallel.global_batch_size,
        seed=int(run.config.run.seed),
        mlm_accuracy=None,
        vocabulary_sha256=DIGEST,
    )
    begun = time.perf_counter()
    writer.begin(state)
    going_on = time.perf_counter()
    _train(run, middle, first + steps)
    trained = time.perf_counter()
    writer.finish()
    ended = time.perf_counter()
    return ended - started, going_on - begun, ended - trained


def _train(run: TrainingRun, start: int, stop: int) -> None:
    for step in range(start, stop):
        loss = run(step)
    if stop > start:
        loss.item()  # on CUDA: waits for the device, so that the time is true


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    pairs = result["pairs"]
    return "\n".join(
        (
            heading(result),
            f"{len(pairs)} pairs of blocks of {result['steps_per_block']} steps; one of each pair "
            f"writes a checkpoint of {result['checkpoint_bytes'] / 1e6:,.1f} MB meanwhile",
            *(f"pair {number}: {_pair_in_words(pair)}" for number, pair in enumerate(pairs, 1)),
            f"median ratio {result['median_ratio']:.4f} (lowest {result['lowest_ratio']:.4f}, "
            f"highest {result['highest_ratio']:.4f})",
        )
    )


def _pair_in_words(pair: dict[str, float]) -> str:
    return (
        f"{pair['without_s']:.3f} s without, {pair['with_s']:.3f} s with: {pair['ratio']:.4f} "
        f"(stood still {1e3 * pair['paused_s']:.1f} ms, waited {1e3 * pair['waited_s']:.1f} ms)"
    )

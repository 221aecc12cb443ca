"""`bench checkpoints`: what it costs to write checkpoints while training goes on.

Blocks of steps with one checkpoint and without any take turns, on the same training objects.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.loader_data import DIGEST
from bert_tools.bench.train import heading, surroundings
from bert_tools.bench.training_run import ALONE, TrainingRun, training_run
from mlperf_bert.checkpoint.manifest import CheckpointState, complete_checkpoints
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.run_config import RunConfig

NUM_UPDATES = 4  # distinct ones
WARM_UP_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Seconds of a block, from before its first step until its checkpoint is on disk as well."""

    seconds: float
    paused_s: float = 0.0  # while the checkpoint was begun, between two steps
    waited_s: float = 0.0  # for the checkpoint, after the last step


class Blocks:
    """Runs blocks of steps one after the other.

    Args:
        run: what trains.
        writer: of its checkpoints.
    """

    def __init__(self, run: TrainingRun, writer: CheckpointWriter) -> None:
        self._run = run
        self._writer = writer
        self.step = 0  # steps done so far

    def plain(self, steps: int) -> Block:
        """A block without a checkpoint."""
        started = time.perf_counter()
        self._train(steps)
        return Block(seconds=time.perf_counter() - started)

    def with_checkpoint(self, steps: int) -> Block:
        """A block with one, begun in its middle. Raises CheckpointError where it fails."""
        started = time.perf_counter()
        self._train(steps // 2)
        begun = time.perf_counter()
        self._writer.begin(self._state())
        going_on = time.perf_counter()
        self._train(steps - steps // 2)
        trained = time.perf_counter()
        self._writer.finish()
        ended = time.perf_counter()
        return Block(seconds=ended - started, paused_s=going_on - begun, waited_s=ended - trained)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self._run(self.step)
            self.step += 1
        if steps:
            loss.item()  # on CUDA: waits for the device, so that the clock means what it says

    def _state(self) -> CheckpointState:
        config = self._run.config
        return CheckpointState(
            step=self.step,
            samples=self.step * config.parallel.global_batch_size,
            seed=int(config.run.seed),
            mlm_accuracy=None,
            vocabulary_sha256=DIGEST,
        )


def measure_checkpoints(
    config: RunConfig,
    device: torch.device,
    directory: Path,
    *,
    pairs: int,
    steps: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure `pairs` pairs of blocks of `steps` steps; the JSON object of `bench checkpoints`.

    Checkpoints go below `directory`, of which the last one stays. Which block of a pair comes first
    alternates, as a machine may slow down over time. `report` gets a line of each pair. Raises
    CheckpointError where one cannot be written.
    """
    report(f"building on {device}, step {config.run.step_mode}")
    measured: list[tuple[Block, Block]] = []
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        writer = CheckpointWriter(
            directory,
            run.optimizer,
            config,
            ALONE,
            device,
            fp8_state=run.model.fp8_state(),
            keep_last=1,
        )
        blocks = Blocks(run, writer)
        blocks.with_checkpoint(WARM_UP_STEPS)  # takes the memory of all later copies
        for number in range(pairs):
            if number % 2:
                written = blocks.with_checkpoint(steps)
                plain = blocks.plain(steps)
            else:
                plain = blocks.plain(steps)
                written = blocks.with_checkpoint(steps)
            measured.append((plain, written))
            report(f"pair {number + 1}/{pairs}: {_pair_in_words(_pair(plain, written))}")
    newest = complete_checkpoints(directory)[0]
    ratios = sorted(written.seconds / plain.seconds for plain, written in measured)
    return {
        "schema_version": 1,
        "median_ratio": statistics.median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
        "pairs": [_pair(plain, written) for plain, written in measured],
        "steps_per_block": steps,
        "checkpoint_bytes": sum(
            path.stat().st_size for path in newest.rglob("*") if path.is_file()
        ),
        **surroundings(config, device),
    }


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


def _pair(plain: Block, written: Block) -> dict[str, float]:
    return {
        "without_s": plain.seconds,
        "with_s": written.seconds,
        "ratio": written.seconds / plain.seconds,
        "paused_s": written.paused_s,
        "waited_s": written.waited_s,
    }


def _pair_in_words(pair: dict[str, float]) -> str:
    return (
        f"{pair['without_s']:.3f} s without, {pair['with_s']:.3f} s with: {pair['ratio']:.4f} "
        f"(stood still {1e3 * pair['paused_s']:.1f} ms, waited {1e3 * pair['waited_s']:.1f} ms)"
    )

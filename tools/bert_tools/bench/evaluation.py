"""`bench eval`: rate of evaluation, and its share of a run at the config's interval."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.synthetic import make_held_out
from bert_tools.bench.train import heading, rates, surroundings, timed
from bert_tools.bench.training_run import ALONE, TrainingRun, training_run
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.parts.build import make_evaluator

NUM_UPDATES = 4
FORWARD_SHARE = 1 / 3  # share of the operations of a training step


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    samples: int,
    rounds: int,
) -> dict[str, Any]:
    """The JSON object of `bench eval`: training, then `rounds` evaluations after the first.

    The held-out set is synthetic: `samples` samples of real lengths.
    """
    report(f"building on {device}, step {config.run.step_mode}")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        train_rate = rates(run, timed(run, steps, seconds))["samples_per_s"]
        report(f"training {train_rate:.1f} samples/s; evaluating {samples} samples")
        with tempfile.TemporaryDirectory(prefix="mlperf_bert-bench-") as directory:
            first, *later = _seconds(run, Path(directory), samples, rounds, report)
    middle, interval = statistics.median(later), config.eval_interval_samples
    training_s = interval / train_rate
    return {
        "schema_version": 1,
        "num_samples": samples,
        "evaluation_s": middle,
        "first_evaluation_s": first,
        "evaluation_samples_per_s": samples / middle,
        "train_samples_per_s": train_rate,
        "interval_samples": interval,
        "share_of_training": middle / training_s,
        "share_of_run": middle / (middle + training_s),
        "floor_share": FORWARD_SHARE * samples / interval,
        "rounds": rounds,
        **surroundings(config, device),
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    return "\n".join(
        (
            heading(result),
            f"{result['evaluation_samples_per_s']:.1f} samples/s: {result['evaluation_s']:.3f} s "
            f"for {result['num_samples']}, median of {result['rounds']}; the first one, with its "
            f"reading, {result['first_evaluation_s']:.3f} s",
            f"training {result['train_samples_per_s']:.1f} samples/s; at an evaluation every "
            f"{result['interval_samples']} samples, evaluation is {result['share_of_run']:.2%} of "
            f"a run and {result['share_of_training']:.2%} of its training",
            f"a forward is a third of a step's operations: {result['floor_share']:.2%} of training "
            "where it ran at the rate of training",
        )
    )


def _seconds(
    run: TrainingRun, set_dir: Path, samples: int, rounds: int, report: Callable[[str], None]
) -> list[float]:
    """Seconds of the first evaluation, and of each of `rounds` later ones."""
    index = make_held_out(set_dir, run.config, samples)
    reader = SampleReader(set_dir, index.manifest)
    evaluator = make_evaluator(run.config, index, reader, ALONE, run.device)
    evaluator.prepare(run.model)
    seconds = []
    with evaluator:
        for number in range(1 + rounds):
            start = time.perf_counter()
            evaluator(run.model)  # its counts reach the host, so it is complete
            seconds.append(time.perf_counter() - start)
            report(f"evaluation {number + 1}/{1 + rounds}: {seconds[-1]:.3f} s")
    return seconds

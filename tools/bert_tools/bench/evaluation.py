"""`bench eval`: how fast evaluation is, and its share of a run at the interval of the config."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.loader_data import DIGEST, write_set
from bert_tools.bench.synthetic import synthetic_samples
from bert_tools.bench.train import HowLong, heading, rates, surroundings, timed
from bert_tools.bench.training_run import ALONE, TrainingRun, training_run
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.index import LengthIndex, ShardSettings
from mlperf_bert.data.length_histogram import real_lengths
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.parts.build import make_evaluator

NUM_UPDATES = 4
FORWARD_SHARE = 1 / 3  # of the operations of a training step


def measure_evaluation(
    config: RunConfig,
    num_samples: int,
    rounds: int,
    device: torch.device,
    how_long: HowLong,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure training, then `rounds` evaluations after the first; the JSON object of `bench eval`.

    The held-out set is made up, of real lengths. `report` gets lines of progress.
    """
    report(f"building on {device}, step {config.run.step_mode}")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        train_rate = rates(run, timed(run, how_long))["samples_per_s"]
        report(f"training {train_rate:.1f} samples/s; evaluating {num_samples} samples")
        with tempfile.TemporaryDirectory(prefix="mlperf_bert-bench-") as directory:
            first, later = _evaluations(run, Path(directory), num_samples, rounds, report)
    seconds, interval = statistics.median(later), config.eval_interval_samples
    training_s = interval / train_rate
    return {
        "schema_version": 1,
        "num_samples": num_samples,
        "evaluation_s": seconds,
        "first_evaluation_s": first,
        "evaluation_samples_per_s": num_samples / seconds,
        "train_samples_per_s": train_rate,
        "interval_samples": interval,
        "share_of_training": seconds / training_s,
        "share_of_run": seconds / (seconds + training_s),
        "floor_share": FORWARD_SHARE * num_samples / interval,
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


def _evaluations(
    run: TrainingRun,
    directory: Path,
    num_samples: int,
    rounds: int,
    report: Callable[[str], None],
) -> tuple[float, list[float]]:
    """Seconds of the first evaluation, and of each later one."""
    config = run.config
    index = write_held_out(directory, config, num_samples)
    reader = SampleReader(directory, index.manifest)
    evaluator = make_evaluator(config, index, reader, ALONE, run.device)
    evaluator.prepare(run.model)
    seconds = []
    with evaluator:
        for number in range(1 + rounds):
            start = time.perf_counter()
            evaluator(run.model)  # its counts reach the host, so all of it is done
            seconds.append(time.perf_counter() - start)
            report(f"evaluation {number + 1}/{1 + rounds}: {seconds[-1]:.3f} s")
    return seconds[0], seconds[1:]


def write_held_out(directory: Path, config: RunConfig, num_samples: int) -> LengthIndex:
    """A held-out set of made-up samples of real lengths, in `directory`."""
    data, seed = config.data, derive_seed(int(config.run.seed), "held-out samples")
    samples = synthetic_samples(
        real_lengths(num_samples, data.max_seq_length, seed),
        vocab_size=config.model.vocab_size,
        max_predictions=data.max_predictions,
        seed=seed,
    )
    settings = ShardSettings(
        vocabulary_sha256=DIGEST,
        max_seq_length=data.max_seq_length,
        max_predictions=data.max_predictions,
        seed=seed,
        dupe_factor=1,
        split_sentences=False,
        pick_eval=None,
    )
    write_set(directory, samples, settings, config.model.vocab_size)
    return LengthIndex.open(directory)

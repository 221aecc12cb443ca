"""The training loop, read top to bottom: init phase (untimed), run phase (timed), checkpoint."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from mlperf_bert.build import Parts
from mlperf_bert.checkpoint import CheckpointState, save_checkpoint
from mlperf_bert.evaluate import Accuracy
from mlperf_bert.warm_up import warm_up

MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    status: Literal["success", "aborted"]
    steps: int
    samples: int
    seconds: float
    accuracy: Accuracy | None


def train(parts: Parts) -> Outcome:
    """Train until the target accuracy or `run.max_steps`; every rank returns the same outcome."""
    config, log = parts.config, parts.log
    warm_up(config, parts.step, parts.model, parts.optimizer, parts.device)
    _settle(parts)
    log.init_stop()
    log.run_start()
    _settle(parts)  # until rank 0 has written that line, no other rank may open a shard
    parts.metrics.start()
    started = time.perf_counter()
    step = samples = 0
    accuracy = None
    updating = True
    with parts.loader as batches:
        for batch in batches:
            step = batch.plan.step
            result = parts.step(step, batch.micro_batches)
            samples += config.parallel.global_batch_size
            parts.metrics.add(batch, result)
            is_last = step == config.run.max_steps
            evaluated = None
            if is_last or _evaluation_is_due(samples, parts):
                evaluated = accuracy = _evaluate(samples, parts)
            if is_last or evaluated or parts.metrics.interval_is_full:
                updating = _report(samples, evaluated, accuracy, parts)
            if is_last or not updating or _reached(accuracy, parts):
                break
        outcome = _stop_clock(started, step, samples, accuracy, parts)
    _save(outcome, parts)
    return outcome


def _stop_clock(
    started: float, step: int, samples: int, accuracy: Accuracy | None, parts: Parts
) -> Outcome:
    _finish_queued_work(parts.device)
    seconds = time.perf_counter() - started
    status: Literal["success", "aborted"] = "success" if _reached(accuracy, parts) else "aborted"
    parts.log.run_stop(samples, parts.evaluator.num_samples, status)
    return Outcome(status, step, samples, seconds, accuracy)


def _evaluation_is_due(samples: int, parts: Parts) -> bool:
    """Whether the last step passed a multiple of the evaluation interval."""
    interval = parts.config.eval_interval_samples
    before = samples - parts.config.parallel.global_batch_size
    return samples // interval > before // interval


def _evaluate(samples: int, parts: Parts) -> Accuracy:
    _finish_queued_work(parts.device)  # training's, which must not count as evaluation
    started = time.perf_counter()
    parts.log.eval_start(samples)
    accuracy = parts.evaluator(parts.model)
    parts.log.eval_accuracy(samples, accuracy.mlm_accuracy)
    parts.log.eval_stop(samples)
    seconds = time.perf_counter() - started
    parts.metrics.exclude(seconds)
    parts.reporter.line(
        f"evaluation at {samples:,} samples: {parts.evaluator.in_words(accuracy)} ({seconds:.1f} s)"
    )
    return accuracy


def _report(
    samples: int, evaluated: Accuracy | None, latest: Accuracy | None, parts: Parts
) -> bool:
    """Write and show the interval's record; False where too many steps in a row were skipped."""
    record = parts.metrics.record(samples, evaluated.mlm_accuracy if evaluated else None)
    parts.metrics_file.write(record)
    parts.reporter.progress(record, latest.mlm_accuracy if latest else None)
    if evaluated:
        parts.log.tracked_stats(samples, parts.metrics.throughput_since_evaluation())
    skipped = parts.metrics.most_skipped_in_a_row
    if skipped < MAX_SKIPPED_IN_A_ROW:
        return True
    parts.reporter.line(
        f"{skipped} steps in a row had a gradient that is not finite and were skipped, "
        f"seen at step {record['step']}: stopped; "
        "lower optim.learning_rate or lengthen schedule.warmup_steps"
    )
    return False


def _reached(accuracy: Accuracy | None, parts: Parts) -> bool:
    return accuracy is not None and accuracy.mlm_accuracy >= parts.config.eval.target_accuracy


def _save(outcome: Outcome, parts: Parts) -> None:
    if parts.config.checkpoint.save == "never":
        return
    state = CheckpointState(
        step=outcome.steps,
        samples=outcome.samples,
        seed=parts.seed,
        mlm_accuracy=outcome.accuracy.mlm_accuracy if outcome.accuracy else None,
        vocabulary_sha256=parts.vocabulary_sha256,
    )
    path = save_checkpoint(
        parts.directory.checkpoints,
        parts.optimizer,
        parts.config,
        state,
        parts.info,
        parts.device,
    )
    parts.reporter.line(f"checkpoint {path.relative_to(parts.directory.root)}")


def _settle(parts: Parts) -> None:
    """Wait until every rank is here and has done all that it queued."""
    _finish_queued_work(parts.device)
    if parts.info.world_size > 1:
        dist.barrier()


def _finish_queued_work(device: torch.device) -> None:
    """Wait for the device, so that a clock read next to this means what it says."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The training loop, read top to bottom: init phase (untimed), run phase (timed), end."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from mlperf_bert.common.errors import DataError
from mlperf_bert.distributed.failures import saying_failures
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank
from mlperf_bert.distributed.sum_check import check_sums
from mlperf_bert.evaluation.schedule import Evaluated
from mlperf_bert.parts.build import Parts
from mlperf_bert.run.outcome import RunOutcome
from mlperf_bert.step.replay import finish_queued_work
from mlperf_bert.step.warm_up import warm_up

MAX_SKIPPED_IN_A_ROW = 10


def train(parts: Parts) -> RunOutcome:
    """Train until the target accuracy or `run.max_steps`; every rank returns the same outcome.

    A run without a target has succeeded when its last step is done.
    """
    run, log, at = parts.run, parts.log, parts.run.whereabouts.at
    at("warm-up")
    check_sums(run.info, run.device)
    warm_up(run.config, parts.step, parts.model, parts.optimizer, run.device)
    parts.evaluation.prepare()
    parts.saving.prepare()
    _settle(parts)
    log.init_stop()
    log.run_start()
    _settle(parts)  # no rank may open a shard before rank 0 has written that line
    parts.saving.start()
    step, samples = run.start.step, run.start.samples
    latest = stopped_by = None
    updating = True
    patience = timedelta(seconds=run.config.run.hang_timeout_s)
    saying = saying_failures(run.info, run.whereabouts, patience)  # left first
    with (
        parts.stop,
        parts.contents,
        parts.step,
        parts.evaluator,
        parts.saving,
        parts.loader as batches,
        saying,
    ):
        at("batch", step + 1)
        for batch in batches:
            step = batch.plan.step
            at("step", step)
            parts.slowest_rank.step_begins(batch)
            result = parts.step(step, batch.micro_batches)
            samples += run.config.parallel.global_batch_size
            parts.metrics.add(batch, result)
            is_last = step == run.config.max_steps
            stopped_by = None if is_last else parts.stop.agreed(step)
            saves = parts.saving.is_due(step, parts.stop.step_s)
            evaluated = _evaluate(samples, is_last, is_last or bool(stopped_by) or saves, parts)
            latest = evaluated or latest
            if is_last or stopped_by or evaluated or parts.metrics.interval_is_full:
                updating = _report(samples, evaluated, latest, parts)
            if is_last or stopped_by or not updating or _reached(latest, parts):
                break
            parts.saving.after_step(step, samples, evaluated, parts.stop.step_s)
            at("batch", step + 1)
        status = _stop_clock(step, samples, latest, stopped_by, parts)
        if run.config.eval.target is None and updating and step == run.config.max_steps:
            status = "success"
    at("checkpoint", step)
    return parts.saving.at_end(status, step, samples, latest, stopped_by)


def _stop_clock(
    step: int, samples: int, latest: Evaluated | None, stopped_by: str | None, parts: Parts
) -> Literal["success", "aborted"]:
    finish_queued_work(parts.run.device)
    if latest is not None and _reached(latest, parts):
        parts.log.run_stop(latest.samples, parts.evaluator.num_samples, "success")
        return "success"
    parts.log.run_stop(samples, parts.evaluator.num_samples, "aborted")
    if stopped_by:
        parts.reporter.line(f"{stopped_by} received: stopped after step {step}")
    return "aborted"


def _evaluate(samples: int, is_last: bool, wait: bool, parts: Parts) -> Evaluated | None:
    """Start an evaluation if one is due; return the newest result if there is a new one.

    `wait` for a running evaluation: its result would be lost, or missing from a checkpoint.
    """
    is_due = is_last or parts.run.config.evaluation_is_due(samples)
    evaluated = _poll(samples, is_due or wait, parts)
    if is_due and not _reached(evaluated, parts):
        _await_contents(parts)
        parts.run.whereabouts.at("evaluation", samples)
        parts.metrics.exclude(parts.evaluation.begin(samples))
        evaluated = _poll(samples, wait, parts) or evaluated
    return evaluated


def _poll(samples: int, wait: bool, parts: Parts) -> Evaluated | None:
    evaluated = parts.evaluation.poll(samples, wait=wait)
    if evaluated:
        parts.reporter.line(
            f"evaluation at {evaluated.samples:,} samples: "
            f"{parts.evaluator.in_words(evaluated.accuracy)} ({evaluated.seconds:.1f} s)"
        )
    return evaluated


def _await_contents(parts: Parts) -> None:
    """Wait, before the first result, until the shards are known to be right.

    Raises DataError on every rank if one of them found a wrong shard, or if the nodes have copies
    that differ. The wait is no training, but the clock goes on.
    """
    if parts.contents.was_asked:
        return
    run, began = parts.run, time.perf_counter()
    found = on_every_rank(run.info, parts.contents.result)
    of_nodes = set(filter(None, from_all_ranks(run.info, found or "")))
    if len(of_nodes) > 1:
        remedy = "find the shards that are wrong with `mlperf_bert verify --full` on each node"
        error = DataError(str(run.data_dir), "is not the same on all nodes", remedy)
        error.is_of_all_ranks = True
        raise error
    parts.saving.identity = replace(parts.saving.identity, blocks_sha256=found)
    parts.metrics.exclude(time.perf_counter() - began)


def _report(
    samples: int, evaluated: Evaluated | None, latest: Evaluated | None, parts: Parts
) -> bool:
    """Write and show the interval's record; False if too many of the latest steps were skipped.

    A row of skipped steps that has ended does not count: the run has recovered.
    """
    _await_contents(parts)
    accuracy = evaluated.accuracy.mlm_accuracy if evaluated else None
    record = parts.metrics.record(samples, accuracy, parts.slowest_rank.compare())
    parts.metrics_file.write(record)
    parts.reporter.progress(record, latest.accuracy.mlm_accuracy if latest else None)
    if evaluated:
        parts.log.tracked_stats(samples, parts.metrics.throughput_since_evaluation())
    skipped = parts.metrics.skipped_in_a_row()
    if skipped < MAX_SKIPPED_IN_A_ROW:
        return True
    parts.reporter.line(
        f"the last {skipped} steps in a row had a gradient that is not finite and were skipped, "
        f"seen at step {record['step']}: stopped; "
        "lower optim.learning_rate or lengthen schedule.warmup_steps"
    )
    return False


def _reached(evaluated: Evaluated | None, parts: Parts) -> bool:
    target = parts.run.config.eval.target
    if evaluated is None or target is None:
        return False
    return evaluated.accuracy.mlm_accuracy >= target


def _settle(parts: Parts) -> None:
    """Wait until every rank has arrived and its device has finished all queued work."""
    finish_queued_work(parts.run.device)
    if parts.run.info.world_size > 1:
        dist.barrier()

"""Train a model in three phases: untimed setup, timed training loop, and end of the run.

The caller, `cli/train.py`, reads the config, connects the ranks and decides whether the run starts
from a checkpoint.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mlperf_bert import git_commit
from mlperf_bert.checkpoint.first_weights import origin_of_run
from mlperf_bert.checkpoint.load import (
    load_checkpoint,
    load_phase,
    load_weights,
    restore_rank_states,
)
from mlperf_bert.checkpoint.manifest import LATEST, CheckpointState
from mlperf_bert.checkpoint.resume import (
    NEW_RUN,
    Start,
    agree_on_kernels,
    changed_kernels,
    check_data,
)
from mlperf_bert.checkpoint.saving import Saving
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import sets_sha256
from mlperf_bert.data.make_loader import make_loader
from mlperf_bert.data.sampler import PublishedStrataSampler
from mlperf_bert.data.set_checks import ContentsCheck, open_data
from mlperf_bert.distributed.failures import saying_failures
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.distributed.stop_request import StopRequest
from mlperf_bert.distributed.sum_check import check_sums
from mlperf_bert.errors import ConfigError, DataError, UserError
from mlperf_bert.evaluation.evaluate import Evaluated, Evaluator
from mlperf_bert.model.bert import check_memory, make_model, tensorflow_name
from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.optim.schedule import rates_of_run
from mlperf_bert.run.console import ProgressLines, Reporter
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.hints import Hints
from mlperf_bert.run.metrics import Metrics, MetricsFile, SlowestRank
from mlperf_bert.run.mlperf_log import MlperfLog
from mlperf_bert.run.outcome import RunOutcome, Status
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.captured import (
    CapturedStep,
    Step,
    check_capturable,
    use_capturable_stream,
    warm_up,
)
from mlperf_bert.step.data_parallel import make_data_parallel
from mlperf_bert.step.eager import EagerStep
from mlperf_bert.step.replay import finish_queued_work

MAX_SKIPPED_IN_A_ROW = 10  # a limit that is checked whenever metrics are written


def train(  # noqa: C901 (the steps of one run, in their order)
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    directory: RunDirectory,
    data_dir: Path,
    seed: int,
    *,
    start: Start = NEW_RUN,
    process: MpiProcess | None = None,
    cache_cleared: bool = False,
    whereabouts: Whereabouts | None = None,
    shown: ProgressLines | None = None,
    hints: Hints | None = None,
) -> RunOutcome:
    """Train until the target accuracy or `run.max_steps` is reached, and return the run's outcome.

    The outcome is the same on all ranks. A run without a target succeeds when its last step is
    done. The process group must already exist. Raises UserError if config, data, checkpoint and
    machine do not match each other.

    Args:
        config: config of the run.
        info: number of this rank among all ranks and among those of its node.
        device: device of this rank.
        directory: directory for the run's logs, metrics and checkpoints.
        data_dir: directory with the prepared sets train/ and eval/.
        seed: seed of the run, the same on every rank.
        start: a new run, or the checkpoint that the run resumes from.
        process: this rank's process among trainers and readers, or None without readers.
        cache_cleared: whether the page cache was dropped before the run. It is written to the log.
        whereabouts: object that `train` updates with what this rank is doing.
        shown: the console that already shows the progress of the start.
        hints: commands that the user can type next.
    """
    whereabouts = whereabouts or Whereabouts()
    at = whereabouts.at
    _check_world_size(config, info)
    if config.run.step_mode == "captured":
        use_capturable_stream(device)

    # Open the data. Before the clock starts, only sidecars, manifests and indexes may be read.
    data = on_every_rank(
        info, lambda: open_data(config, data_dir, checks_files=info.local_rank == 0)
    )
    # These entries are the same in all checkpoints of this run, except step and accuracy.
    identity = CheckpointState(
        step=0,
        samples=0,
        seed=seed,
        mlm_accuracy=None,
        vocabulary_sha256=data.train.manifest.vocabulary_sha256,
        data_sha256=sets_sha256(data.train_reader.set_dir, data.held_out_reader.set_dir),
        world_size=info.world_size,
    )
    _check_inputs(config, info, start, identity.data_sha256, data_dir)
    # The planner decides which samples each rank gets in each step, and the loader provides them.
    # `shapes` are the shapes that a captured step is captured with. An eager step has none.
    planner = make_planner(config, data.train, seed)
    loader, shapes = make_loader(
        config, planner, data.train_reader, seed, info, device, process, start.step + 1
    )
    on_every_rank(info, lambda: check_memory(config, device))

    vocabulary = data.train_reader.set_dir / data.train.manifest.vocabulary_file
    with directory.begun(
        config, seed, info, device, vocabulary=vocabulary, continues=start.continues
    ):
        log = on_every_rank(
            info, lambda: _begin_log(config, info, directory, seed, start, cache_cleared)
        )
        own_path = directory.run if info.rank == 0 else None
        reporter = on_every_rank(
            info,
            lambda: Reporter(
                own_path and own_path / "stdout.log",
                config,
                continued=start.continues,
                shown=shown,
            ),
        )
        for remark in start.remarks:
            reporter.line(remark)
        reporter.line(data.target_in_words)
        reporter.line(f"sampler {config.data.sampler}, balance {config.data.balance}")
        if isinstance(planner.sampler, PublishedStrataSampler):
            reporter.line(planner.sampler.in_words())

        # Build the model, with weights drawn from the seed or those of `run.init_checkpoint`. A new
        # phase (run.init_state) also loads the optimizer state from there, and a resumed run loads
        # both from its own checkpoint. Both happen below, after the optimizer has been built.
        model = on_every_rank(info, lambda: make_model(config, seed, device))
        agree_on_kernels(info, model)
        if shapes:
            check_capturable(model.attention, device)
        reporter.line(model.attention.note)
        identity = replace(identity, attention=model.attention.name, kernels=model.kernels)
        for remark in changed_kernels(start.state, identity):
            reporter.line(remark)
        log.weights_initialization(map(tensorflow_name, model.state_dict()))
        digest = identity.vocabulary_sha256
        first = Path(config.run.init_checkpoint) if config.run.init_checkpoint else None
        begins_phase = start.checkpoint is None and config.run.init_state == "training"
        if first is not None and start.checkpoint is None and not begins_phase:
            on_every_rank(info, partial(load_weights, model, first, digest))
            reporter.line(f"starting from the weights in {first}")

        # Dropout has its own keys, so this seeds only other libraries' kernels. The seed depends on
        # the step, because a run that resumes with other ranks has no random streams to restore.
        torch.manual_seed(derive_seed(seed, f"others' kernels from {start.step}", info.rank))
        # Set up averaging and clipping of gradients, whose order depends on clip.policy
        # (distributed/clipping.py), then the optimizer, and the step that calls both.
        averaged, initial = make_data_parallel(model, config, info, device)
        optimizer = make_optimizer(
            config.optim, averaged.buffers, initial, averaged.gradients, averaged.shards
        )
        del initial  # a sharded optimizer has copied its part
        eager = EagerStep(
            averaged.model,
            optimizer,
            rates_of_run(config, device),
            averaged.clipping,
            model.step,
            config.model.precision,
        )
        step: Step = eager
        if shapes:
            micro_batches = config.parallel.grad_accum_steps
            step = CapturedStep(eager, shapes, micro_batches=micro_batches, device=device)
        if start.checkpoint is not None:
            state = load_checkpoint(optimizer, start.checkpoint, digest, info, is_verified=True)
            restore_rank_states(start.checkpoint, state, model, info, device)
        elif begins_phase:
            assert first is not None  # guaranteed by `check_first_weights`
            reporter.line(load_phase(optimizer, model, first, digest, info, device))

        # Set up evaluation, metrics and checkpoints.
        evaluator = Evaluator.of_run(config, data.held_out, data.held_out_reader, info, device)
        is_checking = info.rank == 0 or info.local_rank == 0
        contents = ContentsCheck(
            (data.train_reader, data.held_out_reader) if is_checking else (),
            known=None if start.state is None else start.state.blocks_sha256,
            host=host_name() if config.parallel.nodes > 1 else "",
        )
        replays = device.type == "cuda" and config.run.step_mode == "captured"
        slowest_rank = SlowestRank(info, model.body.embeddings, device, replays=replays)
        metrics = Metrics(config, info.world_size, device)
        metrics_file = on_every_rank(
            info,
            lambda: MetricsFile(
                own_path and own_path / "metrics.jsonl", start.step if start.continues else None
            ),
        )
        origin = on_every_rank(
            info, lambda: origin_of_run(first, start.checkpoint, begins_phase=begins_phase)
        )
        writer = CheckpointWriter(
            directory.checkpoints,
            optimizer,
            config,
            info,
            device,
            fp8_state=model.fp8_state(),
            keep_last=config.checkpoint.keep_last,
            commit=git_commit() if info.rank == 0 else None,
            after=start.step if start.continues else None,
            origin=origin,
        )
        saving = Saving(
            config=config,
            identity=identity,
            start_of_run=start,
            writer=writer,
            metrics=metrics,
            reporter=reporter,
            write_outcome=partial(directory.write_outcome, info),
        )
        stop = StopRequest(info.world_size, device)  # after a signal, ranks agree on the last step

    hang_timeout = timedelta(seconds=config.run.hang_timeout_s)
    failure_report = saying_failures(info, whereabouts, hang_timeout)  # the innermost context
    with (
        reporter,
        closing(metrics_file),
        closing(log),
        _hint_on_failure(reporter, directory, hints),
    ):
        reporter.line(_describe_run(config, info, device, seed, directory, model))
        for line in hints.at_start() if hints else ():
            reporter.line(line)

        at("warm-up")
        check_sums(info, device)
        warm_up(config, step, model, optimizer, device)
        evaluator.prepare(model)
        saving.prepare()
        _wait_for_ranks(info, device)  # the init phase ends when the last rank is ready
        log.init_stop()
        log.run_start()  # the clock starts
        _wait_for_ranks(info, device)  # no rank may open a shard before rank 0 has logged this
        saving.start()

        number, samples = start.step, start.samples
        # Each finished batch of an evaluation counts as progress for the limit of a hang.
        evaluator.on_batch = lambda done, total: at("evaluation", samples)
        latest: Evaluated | None = None
        stopped_by: str | None = None
        diverged = False
        with stop, contents, step, evaluator, saving, loader as batches, failure_report:
            at("batch", number + 1)
            for batch in batches:
                number = batch.plan.step
                at("step", number)
                slowest_rank.step_begins(batch)
                metrics.add(batch, step(number, batch.micro_batches))
                samples += config.parallel.global_batch_size
                is_last = number == config.max_steps
                # After a signal to any rank, all ranks stop after the same step.
                stopped_by = None if is_last else stop.agreed(number)

                evaluated: Evaluated | None = None
                if is_last or config.evaluation_is_due(samples):
                    _wait_for_contents(contents, info, data_dir, saving, stop)
                    at("evaluation", samples)
                    finish_queued_work(device)  # so that the time excludes training
                    began = time.perf_counter()
                    log.eval_start(samples)
                    optimizer.wait_for_weights()
                    accuracy = evaluator(model)
                    log.eval_accuracy(samples, accuracy.mlm_accuracy)
                    log.eval_stop(samples)
                    evaluated = Evaluated(samples, accuracy, time.perf_counter() - began)
                    metrics.exclude(evaluated.seconds)
                    stop.exclude(evaluated.seconds)
                    latest = evaluated
                    reporter.line(
                        f"evaluation at {samples:,} samples: {evaluator.in_words(accuracy)} "
                        f"({evaluated.seconds:.1f} s)"
                    )

                is_due = saving.is_due(number, stop.step_s)
                if is_last or stopped_by or evaluated or is_due or metrics.interval_is_full:
                    _wait_for_contents(contents, info, data_dir, saving, stop)
                    record = metrics.record(
                        samples, _accuracy_of(evaluated), slowest_rank.compare()
                    )
                    metrics_file.write(record)
                    reporter.progress(record, _accuracy_of(latest))
                    if evaluated:
                        log.tracked_stats(samples, metrics.throughput_since_evaluation())
                    diverged = _has_diverged(metrics, number, reporter)
                if is_last or stopped_by or diverged or _reached(config, latest):
                    break
                saving.after_step(number, samples, evaluated, is_due=is_due)
                at("batch", number + 1)

            finish_queued_work(device)
            status: Status = "success" if _reached(config, latest) else "aborted"
            at_samples = latest.samples if latest and status == "success" else samples
            log.run_stop(at_samples, evaluator.num_samples, status)  # the clock stops
            if status == "aborted" and stopped_by:
                reporter.line(f"received {stopped_by} and stopped after step {number}")
            # MLPerf's status depends on the target. Without one, a complete run is a success.
            if config.eval.target is None and not diverged and number == config.max_steps:
                status = "success"

        at("checkpoint", number)
        outcome = saving.at_end(status, number, samples, latest, stopped_by)
        reporter.line(outcome.in_words(config.eval.target, evaluator.context_free_accuracy))
        is_saved = config.checkpoint.interval_steps != "never"
        for line in hints.at_end(outcome, is_saved=is_saved) if hints else ():
            reporter.line(line)
    return outcome


def _check_world_size(config: RunConfig, info: RankInfo) -> None:
    """Raise ConfigError if the number of started ranks differs from the number in the config."""
    parallel = config.parallel
    if parallel.world_size != info.world_size:
        raise ConfigError(
            "parallel.ranks_per_node",
            f"the config needs {parallel.nodes} x {parallel.ranks_per_node} ranks, but "
            f"{info.world_size} were started (launcher: {info.launcher})",
            f"start {parallel.world_size} ranks, or set parallel.nodes and parallel.ranks_per_node",
        )


def _check_inputs(
    config: RunConfig, info: RankInfo, start: Start, data_sha256: str, data_dir: Path
) -> None:
    """Check that all ranks have the same data and settings, and that a checkpoint fits the data.

    Without this check, nodes with another copy of the data or of the config would train on
    different batches. Seeds may differ, because rank 0 has sent its own to all ranks. Raises
    CheckpointError, DataError or ConfigError on every rank. All ranks must call this function.
    """
    on_every_rank(info, lambda: check_data(start, data_sha256, data_dir))
    tables = config_to_tables(replace(config, run=replace(config.run, seed="random")))
    settings = {
        f"{section}.{name}": tables[section][name] for section in tables for name in tables[section]
    }
    first, *others = from_all_ranks(info, [host_name(), data_sha256, settings])
    error: UserError | None = None
    for rank, (host, data, own) in enumerate(others, start=1):
        where = f"on rank {rank} (host {host})", f"on rank 0 (host {first[0]})"
        if data != first[1]:
            problem = f"the prepared sets {where[0]} differ from those {where[1]}"
            error = DataError(str(data_dir), problem, "copy the same prepared sets to all nodes")
        elif own != first[2]:
            name = next(each for each in own if own[each] != first[2][each])
            problem = f"{own[name]!r} {where[0]}, but {first[2][name]!r} {where[1]}"
            error = ConfigError(name, problem, "start all ranks with the same config and options")
        if error is not None:
            error.is_of_all_ranks = True
            raise error


def _begin_log(
    config: RunConfig,
    info: RankInfo,
    directory: RunDirectory,
    seed: int,
    start: Start,
    cache_cleared: bool,
) -> MlperfLog:
    """Open the MLPerf log, and write all records that precede training.

    A new run from the checkpoint of another run also writes where that checkpoint is.
    """
    if start.checkpoint is not None and info.rank == 0 and not start.continues:
        directory.write_started_from(start.checkpoint)
    log = MlperfLog(directory.mlperf_log if info.rank == 0 else None)
    log.init_start(cache_cleared=cache_cleared)
    log.submission(config)
    log.hyperparameters(config, seed)
    log.conditions(
        config,
        # These come from the launcher, because it may have started all ranks on this node, even if
        # the config has several nodes.
        number_of_nodes=-(-info.world_size // info.local_world_size),
        number_of_ranks=info.world_size,
        resumed_from=({"step": start.step, "samples": start.samples} if start.is_resumed else None),
        initial_weights="checkpoint" if config.run.init_checkpoint else "random",
    )
    return log


def _describe_run(
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    seed: int,
    directory: RunDirectory,
    model: nn.Module,
) -> str:
    """Describe the run in one line that is shown on the console."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ranks = f"{info.world_size} rank{'s' if info.world_size > 1 else ''}"
    return (
        f"{num_parameters:,} parameters, {ranks} on {device.type}, global batch "
        f"{config.parallel.global_batch_size}, seed {seed}, run directory {directory.run}"
    )


@contextmanager
def _hint_on_failure(
    reporter: Reporter, directory: RunDirectory, hints: Hints | None
) -> Iterator[None]:
    """If the with block fails and a checkpoint exists, print how to resume the run."""
    try:
        yield
    except Exception:
        if hints is not None and (directory.checkpoints / LATEST).exists():
            reporter.line(hints.to_resume())
        raise


def _wait_for_ranks(info: RankInfo, device: torch.device) -> None:
    """Wait until all ranks have called this function and their devices have no queued work left."""
    finish_queued_work(device)
    if info.world_size > 1:
        dist.barrier()


def _wait_for_contents(
    contents: ContentsCheck, info: RankInfo, data_dir: Path, saving: Saving, stop: StopRequest
) -> None:
    """Wait for the check of the shards' bytes, before the run reports its first result.

    Raises DataError on every rank if any rank found a wrong shard, or if the nodes' copies of the
    data differ. The metrics do not count the wait as training time, but MLPerf's clock keeps
    running.
    """
    if contents.was_asked:
        return
    began = time.perf_counter()
    found = on_every_rank(info, contents.result)
    digests = set(filter(None, from_all_ranks(info, found or "")))
    if len(digests) > 1:
        remedy = "run `mlperf_bert verify --full` on each node to find the wrong shards"
        error = DataError(str(data_dir), "the data is not the same on all nodes", remedy)
        error.is_of_all_ranks = True
        raise error
    saving.identity = replace(saving.identity, blocks_sha256=found)
    for clock in (saving.metrics, stop):
        clock.exclude(time.perf_counter() - began)


def _has_diverged(metrics: Metrics, step: int, reporter: Reporter) -> bool:
    """Return whether the last steps were all skipped, and print what to change if so.

    Only skipped steps at the end count, because the run has recovered from earlier ones.
    """
    skipped = metrics.skipped_in_a_row()
    if skipped < MAX_SKIPPED_IN_A_ROW:
        return False
    reporter.line(
        f"stopped at step {step}, because the last {skipped} steps had a non-finite gradient and "
        "were skipped; lower optim.learning_rate, or raise schedule.warmup_steps"
    )
    return True


def _accuracy_of(evaluated: Evaluated | None) -> float | None:
    return None if evaluated is None else evaluated.accuracy.mlm_accuracy


def _reached(config: RunConfig, evaluated: Evaluated | None) -> bool:
    target = config.eval.target
    if evaluated is None or target is None or not config.counts_as_result(evaluated.samples):
        return False
    return evaluated.accuracy.mlm_accuracy >= target

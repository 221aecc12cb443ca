"""One fine-tuning run: read, train, evaluate, save; its record is the last thing written.

Every rank of the engine calls `fine_tune` with the same settings and files, and reads all of them:
so any rank can build any microbatch.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from bert_tools.squad.answers import find_answers
from bert_tools.squad.bubble import StageClock
from bert_tools.squad.engines.build import make_engine
from bert_tools.squad.engines.contract import make_team
from bert_tools.squad.evaluate import TokenScores, mean_loss, score_windows
from bert_tools.squad.inputs import Prepared, SquadInputs, prepare
from bert_tools.squad.loop import Loop, TrainingLog
from bert_tools.squad.measures import Usage, UsageMeter
from bert_tools.squad.microbatches import UpdatePlan
from bert_tools.squad.progress import TrainingProgress
from bert_tools.squad.record import RESULT
from bert_tools.squad.result import Seconds, make_record, of_rank, to_plain
from bert_tools.squad.scores import evaluate
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.spans import WindowReader
from bert_tools.squad.update import Outcome
from bert_tools.squad.weights import is_saved, remove_saved, save_for_transformers
from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import ConfigError, say
from mlperf_bert.common.records import write_json
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank, on_rank_zero
from mlperf_bert.signals.stop_request import StopRequest
from mlperf_bert.signals.whereabouts import Whereabouts

WEIGHTS = "model"  # the directory in a run's


def fine_tune(
    settings: SquadSettings,
    inputs: SquadInputs,
    run_dir: Path,
    info: RankInfo,
    device: torch.device,
    *,
    save: Literal["weights", "nothing"] = "weights",
    whereabouts: Whereabouts | None = None,
) -> dict[str, Any] | None:
    """Train and evaluate; rank 0 writes `squad_result.json` and, where asked, the weights.

    `whereabouts` is told of every update.

    Returns:
        The record, on every rank; None where a signal ended the run, which then wrote nothing.

    Raises:
        ConfigError, DataError, CheckpointError: on every rank, where settings, files or weights
            cannot work; where `run_dir` has a record, or a model of something else; and where the
            training diverged.
    """
    begun = perf_counter()
    _check_ranks(settings, info)
    on_rank_zero(info, lambda: check_free(run_dir, save))
    prepared = on_every_rank(info, lambda: prepare(settings, inputs))
    if info.rank == 0:
        for remark in (*prepared.train_windows.remarks(), *prepared.dev_windows.remarks()):
            say(remark)
    plan = _plan(settings, prepared)
    team = make_team(settings.engine, device)
    clock = StageClock(info.rank, lambda: _synchronize(device))
    start, seed = prepared.start, derive_seed(settings.seed, "squad dropout")
    engine = on_every_rank(
        info,
        lambda: make_engine(settings, start.model, start.weights, plan, team, device, clock, seed),
    )
    reader = WindowReader(prepared.train_windows)
    loop = Loop(settings, engine, team, plan, lambda each: reader.batch(each).to(device), clock)
    started = perf_counter()
    log, usage = _train(settings, loop, info, device, whereabouts or Whereabouts())
    if log.stopped_by is not None:
        if info.rank == 0:
            say(f"{log.stopped_by}: ends after update {len(log.losses)}, nothing is written")
        return None
    trained = perf_counter()
    scores = score_windows(engine, team, prepared.dev_windows, device)
    evaluated = _evaluate(settings, prepared, scores)
    seconds = Seconds(started - begun, trained - started, perf_counter() - trained)
    of_ranks = [of_rank(each) for each in from_all_ranks(info, to_plain(usage, log.clocked))]
    record = make_record(settings, prepared, plan, log, of_ranks, seconds, evaluated, device)
    weights = engine.weights() if save == "weights" else {}
    on_rank_zero(info, lambda: _write(run_dir, record, prepared, weights))
    return record


def _plan(settings: SquadSettings, prepared: Prepared) -> UpdatePlan:
    windows = prepared.train_windows
    return UpdatePlan.make(
        windows.lengths,
        updates=settings.num_updates(len(windows)),
        global_batch=settings.global_batch,
        microbatches=settings.microbatches,
        seed=settings.seed,
    )


def _check_ranks(settings: SquadSettings, info: RankInfo) -> None:
    if info.world_size != settings.engine.ranks:
        problem = f"{settings.engine} is of {settings.engine.ranks} ranks"
        raise ConfigError(
            "--engine", f"{problem}, the launcher started {info.world_size}", "start as many"
        )


def check_free(run_dir: Path, save: Literal["weights", "nothing"]) -> None:
    """Make the directory of a run, and raise ConfigError where another has ended in it.

    A model without a record is of a run that was killed between the two; it is replaced.
    """
    make_directory(run_dir)
    result, weights = run_dir / RESULT, run_dir / WEIGHTS
    in_the_way = [result] if result.exists() else []
    if save == "weights" and weights.exists() and not is_saved(weights):
        in_the_way.append(weights)
    for path in in_the_way:
        raise ConfigError(str(path), "is there already", "give a new --run-dir")


def _train(
    settings: SquadSettings,
    loop: Loop,
    info: RankInfo,
    device: torch.device,
    whereabouts: Whereabouts,
) -> tuple[TrainingLog, Usage]:
    progress = TrainingProgress(
        str(settings.engine), loop.num_updates, settings.global_batch, speaks=info.rank == 0
    )

    def shown(update: int, outcome: Outcome) -> None:
        progress.shown(update, outcome.loss)
        whereabouts.at("step", update + 1)

    whereabouts.at("step", 1)
    with StopRequest(info.world_size, device) as request, progress, UsageMeter(device) as meter:
        log = loop.run(shown, request.agreed)
        _synchronize(device)
    whereabouts.at("end")  # evaluation and saving may take as long as they take
    return log, meter.usage


def _evaluate(settings: SquadSettings, prepared: Prepared, scores: TokenScores) -> dict[str, Any]:
    """The keys of the record that say how good the answers are."""
    windows = prepared.dev_windows
    loss = mean_loss(scores, windows)
    if not math.isfinite(loss):
        problem = f"is {settings.learning_rate:g}, with which the training diverged: the loss of "
        problem += "the validation questions is not finite"
        raise ConfigError("--learning-rate", problem, "lower it")
    found = find_answers(
        prepared.dev,
        windows,
        scores.starts,
        scores.ends,
        max_answer_length=settings.max_answer_length,
    )
    return {"validation_loss": loss, **evaluate(prepared.dev, found)}


def _write(
    run_dir: Path, record: dict[str, Any], prepared: Prepared, weights: Mapping[str, Tensor]
) -> None:
    if weights:
        remove_saved(run_dir / WEIGHTS)
        save_for_transformers(run_dir / WEIGHTS, prepared.start.model, weights, prepared.vocabulary)
    write_file(run_dir / RESULT, write_json(record))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

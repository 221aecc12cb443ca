"""One fine-tuning run: read the questions, train, evaluate, and save the results.

Every rank of the engine calls `fine_tune` with the same settings. Each rank reads all files, so
that it can build any micro-batch. The record of the run is written last, so a run with a record is
complete.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bert_tools.doctor.cli import cpu_model
from bert_tools.squad.answers import find_answers, mean_loss, score, texts
from bert_tools.squad.batches import UpdatePlan, WindowReader
from bert_tools.squad.comparison import RESULT, SCHEMA_VERSION
from bert_tools.squad.engines import RankMesh, make_engine, make_rank_mesh, score_windows
from bert_tools.squad.loop import Loop, TrainingLog
from bert_tools.squad.measures import Span, StageClock, measured_bubble, noise_scale
from bert_tools.squad.model import (
    Start,
    draw_weights,
    make_part,
    parameter_shapes,
    save_for_transformers,
    start_from,
    whole,
)
from bert_tools.squad.questions import Questions, read_questions
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.windows import Windows, make_windows
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank, on_rank_zero
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.distributed.stop_request import StopRequest
from mlperf_bert.errors import ConfigError, say
from mlperf_bert.files import make_directory, write_file, write_json
from mlperf_bert.machine import usable_cpus
from mlperf_bert.prepare.train_vocabulary import train_vocabulary
from mlperf_bert.run.console import ProgressLines, as_clock
from mlperf_bert.run.metrics import memory_bytes
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.replay import finish_queued_work
from mlperf_bert.vocabulary.word_pieces import (
    Vocabulary,
    check_uncased,
    load_vocabulary,
    parse_vocabulary,
)

WEIGHTS, PREDICTIONS = "model", "predictions.json"  # names in the run's directory
_QUICK_PIECES = 1024  # size of the vocabulary that is made from the questions if none is given
_MIB = 2**20


def fine_tune(
    settings: SquadSettings,
    run_dir: Path,
    info: RankInfo,
    device: torch.device,
    *,
    record_only: bool = False,
    whereabouts: Whereabouts | None = None,
) -> dict[str, Any] | None:
    """Train and evaluate. Rank 0 writes the weights, the answers and `squad_result.json`.

    All ranks must call this function with the same settings. With `record_only`, rank 0 writes
    only the record `squad_result.json`. `whereabouts` records which update is running.

    Returns the record on every rank, or None if a signal stopped the run before it wrote anything.
    Raises ConfigError, DataError or CheckpointError on every rank if settings, files or weights
    cannot be used, if `run_dir` contains another run, or if the training diverged.
    """
    begun = perf_counter()
    if info.world_size != settings.engine.ranks:
        problem = f"{settings.engine} needs {settings.engine.ranks} ranks"
        problem += f", but the launcher started {info.world_size}"
        raise ConfigError("--engine", problem, f"start {settings.engine.ranks} ranks")
    on_rank_zero(info, lambda: _check_free(run_dir))
    train, dev, vocabulary, start = on_every_rank(info, lambda: _read(settings))
    lengths = {"max_length": settings.max_length, "stride": settings.stride}
    windows, dev_windows = on_every_rank(
        info, lambda: [make_windows(each, vocabulary, **lengths) for each in (train, dev)]
    )
    for remark in (*windows.remarks, *dev_windows.remarks) if info.rank == 0 else ():
        say(remark)
    plan = UpdatePlan.make(windows.lengths, settings)
    clock = StageClock(info.rank, lambda: finish_queued_work(device))
    mesh = make_rank_mesh(settings.engine, device)
    engine = on_every_rank(info, lambda: make_engine(settings, start, plan, mesh, device, clock))
    reader = WindowReader(windows)
    loop = Loop(settings, engine, plan, lambda each: reader.batch(each).to(device), clock)
    started = perf_counter()
    log = _train(settings, loop, info, device, whereabouts or Whereabouts())
    if log.stopped_by is not None:
        if info.rank == 0:
            say(f"{log.stopped_by}: stopped after update {len(log.losses)}, and wrote nothing")
        return None
    trained = perf_counter()
    spans = [[asdict(span) for span in update] for update in log.clocked]
    of_ranks = from_all_ranks(info, [memory_bytes(device) / _MIB, sorted(usable_cpus()), spans])
    weights = engine.weights()
    predictions, quality = _evaluate(settings, start, weights, dev, dev_windows, mesh, device)
    model = start.model
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    record = {
        "schema_version": SCHEMA_VERSION,
        "engine": str(settings.engine),
        "ranks": settings.engine.ranks,
        "seed": settings.seed,
        "device": device.type,
        "processor": gpu or cpu_model(),
        # The CPUs of all ranks together, because each rank may be bound to some of them.
        "cores": len({cpu for _, cpus, _ in of_ranks for cpu in cpus}),
        "settings": settings.to_record(),
        "model": {
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_heads,
            "vocabulary": model.vocab_size,
            "parameters": sum(math.prod(shape) for shape in parameter_shapes(model).values()),
        },
        "init": start.origin,
        "data": {
            "train_sha256": train.sha256,
            "dev_sha256": dev.sha256,
            "vocabulary_sha256": vocabulary.sha256,
            "train_questions": len(train),
            "dev_questions": len(dev),
            "train_windows": len(windows),
            "dev_windows": len(dev_windows),
        },
        "updates": len(plan.windows),
        "samples": plan.windows.size,
        "losses": log.losses,
        "grad_norms": log.grad_norms,
        "seconds": {"train": trained - started, "end_to_end": perf_counter() - begun},
        "samples_per_s": log.samples_per_s(settings.global_batch)
        or plan.windows.size / (trained - started),
        "noise": log.noise,
        "noise_scale": noise_scale(log.noise),
        "memory_mib": max(peak for peak, _, _ in of_ranks),
        **quality,
        **_bubble(settings, [spans for _, _, spans in of_ranks]),
    }

    def write() -> None:
        if not record_only:
            save_for_transformers(run_dir / WEIGHTS, model, weights, vocabulary)
            write_file(run_dir / PREDICTIONS, write_json(predictions))
        write_file(run_dir / RESULT, write_json(record))

    on_rank_zero(info, write)
    return record


def _check_free(run_dir: Path) -> None:
    """Create a run's directory. Raises ConfigError if it already contains another run."""
    make_directory(run_dir)
    for path in (run_dir / RESULT, run_dir / WEIGHTS):
        if path.exists():
            raise ConfigError(str(path), "exists already", "pass a new directory as --run-dir")


def _read(settings: SquadSettings) -> tuple[Questions, Questions, Vocabulary, Start]:
    """Read the training and evaluation questions, the vocabulary and the initial weights.

    If the settings specify neither a vocabulary nor a checkpoint, the vocabulary is built from the
    training questions, and is the same on every rank. Raises ConfigError, DataError or
    CheckpointError.
    """
    train, dev = read_questions(settings.train), read_questions(settings.dev)
    seed = derive_seed(settings.seed, "squad weights")
    if settings.init_checkpoint is not None:
        vocabulary, start = start_from(settings.init_checkpoint, settings.vocab, seed)
    else:
        if settings.vocab is not None:
            vocabulary = load_vocabulary(settings.vocab)
            check_uncased(vocabulary, str(settings.vocab))
        else:
            lines = [*dict.fromkeys(each.context for each in train)]  # every context once
            lines += [each.question for each in train]
            tokens = train_vocabulary(lines, _QUICK_PIECES)
            vocabulary = parse_vocabulary(("\n".join(tokens) + "\n").encode("utf-8"), "vocab.txt")
        model = settings.random_model(len(vocabulary))
        start = Start(model, draw_weights(model, seed), "random")
    most = start.model.max_position_embeddings
    if settings.max_length > most:
        problem = f"is {settings.max_length}, but the model reads at most {most} tokens"
        raise ConfigError("--max-length", problem, "lower --max-length")
    return train, dev, vocabulary, start


def _train(
    settings: SquadSettings,
    loop: Loop,
    info: RankInfo,
    device: torch.device,
    whereabouts: Whereabouts,
) -> TrainingLog:
    """Train until the end of the plan or until a signal, and print progress lines."""
    total, began = loop.num_updates, perf_counter()
    line = ProgressLines(speaks=info.rank == 0)

    def shown(update: int, loss: float) -> None:
        if line.is_due() or update == total:
            rate = update / max(perf_counter() - began, 1e-9)
            line.line(
                f"{settings.engine}: update {update}/{total}  "
                f"{rate * settings.global_batch:,.1f} samples/s  loss {loss:.4f}  "
                f"{as_clock((total - update) / rate)} left"
            )
        whereabouts.at("step", update + 1)

    whereabouts.at("step", 1)
    if device.type == "cuda":  # the peak is that of training, without building the model
        torch.cuda.reset_peak_memory_stats(device)
    with StopRequest(info.world_size, device) as request, line:
        log = loop.run(shown, request.agreed)
        finish_queued_work(device)
    whereabouts.at("end")  # because evaluation and saving have no time limit
    return log


def _evaluate(
    settings: SquadSettings,
    start: Start,
    weights: Mapping[str, Tensor],
    dev: Questions,
    windows: Windows,
    mesh: RankMesh,
    device: torch.device,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Answer the dev questions, and return the answers and their scores for the record.

    All ranks must call this function. Raises ConfigError if the training diverged.
    """
    model = make_part(start.model, whole(start.model), weights, device, settings.precision)
    scores = score_windows(model, windows, mesh)
    loss = mean_loss(scores, windows)
    if not math.isfinite(loss):
        problem = (
            f"is {settings.learning_rate:g}, but the training diverged, because the loss of the "
            "validation questions is not finite"
        )
        raise ConfigError("--learning-rate", problem, "lower --learning-rate")
    predictions = texts(dev, find_answers(dev, windows, scores))
    found = score(dev, predictions)
    return predictions, {"validation_loss": loss, **found.pop("all"), **found}


def _bubble(settings: SquadSettings, of_ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the median pipeline bubble of the timed updates, and the timeline of the last one.

    `bubble_measured` is in percent. `timeline` has the spans of all ranks, ordered by start time.
    If no update was timed, `bubble_measured` is None and `timeline` is empty.
    """
    updates = [
        [Span(**span) for rank in of_ranks for span in rank[number]]
        for number in range(len(of_ranks[0]))
    ]
    if settings.engine.schedule is None or not updates:
        return {"bubble_measured": None, "timeline": []}
    last = sorted(updates[-1], key=lambda span: (span.begin_s, span.rank))
    rounded = [
        replace(each, begin_s=round(each.begin_s, 6), end_s=round(each.end_s, 6)) for each in last
    ]
    return {
        "bubble_measured": 100 * median(measured_bubble(update) for update in updates),
        "timeline": [asdict(span) for span in rounded],
    }

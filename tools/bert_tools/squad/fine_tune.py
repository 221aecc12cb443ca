"""One fine-tuning run: read, train, evaluate, save; its record is the last thing written.

Every rank of the engine calls `fine_tune` with the same settings and reads all files, so that it
can build any microbatch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from bert_tools.common.machine import read_machine
from bert_tools.squad.answers import answer
from bert_tools.squad.batches import UpdatePlan, WindowReader
from bert_tools.squad.bubble import Span, StageClock, bubble_by_formula, measured_bubble
from bert_tools.squad.comparison import RESULT, SCHEMA_VERSION
from bert_tools.squad.engines import Engine, make_engine, make_team, score_windows
from bert_tools.squad.loop import Loop, TrainingLog
from bert_tools.squad.model import draw_weights, parameter_shapes
from bert_tools.squad.questions import Questions, read_questions
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.weights import (
    Start,
    check_fits,
    save_for_transformers,
    start_from,
)
from bert_tools.squad.windows import Windows, make_windows
from mlperf_bert.checkpoint.manifest import read_manifest, resolve
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank, on_rank_zero
from mlperf_bert.distributed.stop_request import StopRequest
from mlperf_bert.distributed.whereabouts import Whereabouts
from mlperf_bert.errors import ConfigError, say
from mlperf_bert.files import make_directory, write_file, write_json
from mlperf_bert.machine import usable_cpus
from mlperf_bert.prepare.train_vocabulary import train_vocabulary
from mlperf_bert.run.console import ProgressLines, as_clock
from mlperf_bert.run.metrics import memory_bytes
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.replay import finish_queued_work
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary, vocabulary_of

WEIGHTS, VOCABULARY = "model", "vocab.txt"  # in a run's directory
_QUICK_PIECES = 1024  # words of the vocabulary made from the questions if none is given
_MOST_CHARACTERS = 20 * 2**20  # of text; SQuAD v2.0's has 15 MB of contexts, once each


@dataclass(frozen=True, slots=True)
class Prepared:
    """Contents of a run's input files."""

    train: Questions
    dev: Questions
    train_windows: Windows
    dev_windows: Windows
    vocabulary: AnyVocabulary
    start: Start


def fine_tune(
    settings: SquadSettings,
    run_dir: Path,
    info: RankInfo,
    device: torch.device,
    *,
    record_only: bool = False,
    whereabouts: Whereabouts | None = None,
) -> dict[str, Any] | None:
    """Train and evaluate; rank 0 writes `squad_result.json` and, unless `record_only`, weights.

    `whereabouts` is told of every update. If settings name neither a vocabulary nor a checkpoint,
    rank 0 writes a vocabulary first.

    Returns the record, on every rank; None if a signal ended the run, which then wrote nothing.

    Raises ConfigError, DataError or CheckpointError on every rank if settings, files or weights
    cannot work, `run_dir` has a record or a model of another run, or the training diverged.
    """
    begun = perf_counter()
    if info.world_size != settings.engine.ranks:
        problem = f"{settings.engine} is of {settings.engine.ranks} ranks"
        problem += f", the launcher started {info.world_size}"
        raise ConfigError("--engine", problem, "start as many")
    on_rank_zero(info, lambda: _check_free(run_dir))
    if settings.vocab is None and settings.init_checkpoint is None:
        on_rank_zero(info, partial(write_vocabulary, settings.train, run_dir / VOCABULARY))
        settings = replace(settings, vocab=run_dir / VOCABULARY)
    prepared = on_every_rank(info, lambda: _prepare(settings, speaks=info.rank == 0))
    plan = UpdatePlan.make(prepared.train_windows.lengths, settings)
    clock = StageClock(info.rank, lambda: finish_queued_work(device))
    making = (settings, prepared.start, plan, make_team(settings.engine, device), device, clock)
    engine = on_every_rank(info, lambda: make_engine(*making))
    reader = WindowReader(prepared.train_windows)
    loop = Loop(settings, engine, plan, lambda each: reader.batch(each).to(device), clock)
    started = perf_counter()
    log, usage = _train(settings, loop, info, device, whereabouts or Whereabouts())
    if log.stopped_by is not None:
        if info.rank == 0:
            say(f"{log.stopped_by}: ends after update {len(log.losses)}, nothing is written")
        return None
    trained = perf_counter()
    evaluated = _evaluate(settings, prepared, engine)
    seconds = (started - begun, trained - started, perf_counter() - trained)
    clocked = [[asdict(span) for span in update] for update in log.clocked]
    of_ranks = from_all_ranks(info, [usage, clocked])
    record = {
        **_who(settings, prepared, device),
        **_what(settings, prepared, plan, log, seconds),
        **evaluated,
        **_usage(log, [usage for usage, _ in of_ranks]),
        **_bubble(settings, [clocked for _, clocked in of_ranks]),
    }
    weights = {} if record_only else engine.weights()
    on_rank_zero(info, lambda: _write(run_dir, record, prepared, weights))
    return record


def _check_free(run_dir: Path) -> None:
    """Make the directory of a run; raise ConfigError if another has left a record or a model."""
    make_directory(run_dir)
    for path in (run_dir / RESULT, run_dir / WEIGHTS):
        if path.exists():
            raise ConfigError(str(path), "is there already", "give a new --run-dir")


def write_vocabulary(train: Path, path: Path) -> None:
    """Write a vocab.txt of word pieces made from the questions that a model is trained on.

    Raises DataError if they cannot be read or the file not be written, ConfigError if they are too
    much text, or have too many different characters.
    """
    questions = read_questions(train)
    lines = [*dict.fromkeys(each.context for each in questions)]  # every context once
    lines += [each.question for each in questions]
    if sum(map(len, lines)) > _MOST_CHARACTERS:
        problem = f"is missing, and {train} is too much text to make one of"
        raise ConfigError("--vocab", problem, "give a vocabulary, or --init-checkpoint")
    tokens = train_vocabulary(lines, _QUICK_PIECES)
    write_file(path, ("\n".join(tokens) + "\n").encode("utf-8"))


def _prepare(settings: SquadSettings, *, speaks: bool) -> Prepared:
    """Read questions, vocabulary and weights. Raises ConfigError, DataError, CheckpointError."""
    vocabulary, start = _start(settings)
    if (both := settings.dropout) is not None:
        model = replace(start.model, hidden_dropout=both, attention_dropout=both)
        start = replace(start, model=model)
    check_fits(start.model, len(vocabulary), settings.max_length)
    train, dev = read_questions(settings.train), read_questions(settings.dev)
    lengths = {"max_length": settings.max_length, "stride": settings.stride}
    windows = [make_windows(questions, vocabulary, **lengths) for questions in (train, dev)]
    for remark in (*windows[0].remarks, *windows[1].remarks) if speaks else ():
        say(remark)
    return Prepared(train, dev, windows[0], windows[1], vocabulary, start)


def _start(settings: SquadSettings) -> tuple[AnyVocabulary, Start]:
    seed = derive_seed(settings.seed, "squad weights")
    if settings.init_checkpoint is None:
        assert settings.vocab is not None
        vocabulary = load_any_vocabulary(settings.vocab)
        model = settings.random_model(len(vocabulary))
        return vocabulary, Start(model, draw_weights(model, seed), "random")
    checkpoint = resolve(settings.init_checkpoint)
    digest = read_manifest(checkpoint).vocabulary_sha256
    vocabulary = vocabulary_of(checkpoint, digest, settings.vocab)
    return vocabulary, start_from(checkpoint, vocabulary.sha256, seed)


def _train(
    settings: SquadSettings,
    loop: Loop,
    info: RankInfo,
    device: torch.device,
    whereabouts: Whereabouts,
) -> tuple[TrainingLog, dict[str, Any]]:
    """The loop's log, and what it used."""
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
    with StopRequest(info.world_size, device) as request, line, measured_usage(device) as usage:
        log = loop.run(shown, request.agreed)
        finish_queued_work(device)
    whereabouts.at("end")  # evaluation and saving have no time limit
    return log, usage


@contextmanager
def measured_usage(device: torch.device) -> Iterator[dict[str, Any]]:
    """Resources that this rank uses within; filled in at the end, as JSON can hold it.

    `cpu_seconds` are those of all threads of the process. `core_wait_seconds` is the time, summed
    over its threads, that they were ready and had no core; None if the system does not count it.
    `cpus` are the logical CPUs that the rank may run on, its own ones if it is bound. Beside them
    stands `peak_memory_bytes`, of the GPU if it is on one.
    """
    usage: dict[str, Any] = {}
    waited_before, cpu_begun = core_wait_seconds(), process_time()
    yield usage
    cpu, waited = process_time() - cpu_begun, core_wait_seconds()
    is_known = waited is not None and waited_before is not None
    usage |= {
        "cpu_seconds": cpu,
        "peak_memory_bytes": memory_bytes(device),
        "cpus": sorted(usable_cpus()),
        "core_wait_seconds": max(0.0, (waited or 0) - (waited_before or 0)) if is_known else None,
    }


def core_wait_seconds(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Seconds that the process's present threads have waited for a core so far.

    Source: the second number of Linux's `schedstat`, in nanoseconds; None if there is none.
    """
    waited = 0
    try:
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                waited += int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return waited / 1e9 if waited else None


def _evaluate(settings: SquadSettings, prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """The keys of the record on the quality of the answers; all ranks call it."""
    scores = score_windows(engine, prepared.dev_windows)
    _, evaluated = answer(prepared.dev, prepared.dev_windows, scores)
    if not math.isfinite(evaluated["validation_loss"]):
        problem = f"is {settings.learning_rate:g}, and the training diverged: the loss of "
        problem += "the validation questions is not finite"
        raise ConfigError("--learning-rate", problem, "lower it")
    return evaluated


def _who(settings: SquadSettings, prepared: Prepared, device: torch.device) -> dict[str, Any]:
    """The keys of the record known before training."""
    name, model = settings.engine, prepared.start.model
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": str(name),
        "ranks": name.ranks,
        "seed": settings.seed,
        "precision": settings.precision,
        "device": device.type,
        "processor": gpu or read_machine().cpu_model or "unknown",
        "model": {
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_heads,
            "vocabulary": model.vocab_size,
            "parameters": sum(math.prod(shape) for shape in parameter_shapes(model).values()),
        },
        "init": prepared.start.origin,
        "data": {
            "train_sha256": prepared.train.sha256,
            "dev_sha256": prepared.dev.sha256,
            "vocabulary_sha256": prepared.vocabulary.sha256,
            "train_questions": len(prepared.train),
            "dev_questions": len(prepared.dev),
            "train_windows": len(prepared.train_windows),
            "dev_windows": len(prepared.dev_windows),
        },
    }


def _what(
    settings: SquadSettings,
    prepared: Prepared,
    plan: UpdatePlan,
    log: TrainingLog,
    seconds: Sequence[float],
) -> dict[str, Any]:
    """The keys on the run; `seconds` are those of reading and building, training, evaluation."""
    model, samples = prepared.start.model, plan.windows.size
    rate = log.samples_per_s(settings.global_batch) or samples / seconds[1]
    in_effect = {  # numbers for settings left open
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "capacity_tokens": plan.capacity(settings.max_length),
    }
    names = ("start", "train", "evaluate", "end_to_end")  # without writing the weights
    return {
        "settings": settings.to_record(),
        "in_effect": in_effect,
        "updates": len(plan.windows),
        "samples": samples,
        "tokens": int(plan.tokens.sum()),
        "losses": _finite(log.losses),
        "grad_norms": _finite(log.grad_norms),
        "skipped_updates": log.skipped,
        "seconds": dict(zip(names, (*seconds, sum(seconds)), strict=True)),
        "step_seconds": log.step_seconds,
        "samples_per_s": {"train": rate, "end_to_end": samples / sum(seconds)},
    }


def _usage(log: TrainingLog, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "noise": log.noise,
        "plain_noise_scale": log.noise_scale.value,
        "peak_memory_bytes": [usage["peak_memory_bytes"] for usage in of_ranks],
        "cpu_seconds": [usage["cpu_seconds"] for usage in of_ranks],
        "core_wait_seconds": [usage["core_wait_seconds"] for usage in of_ranks],
        # CPUs of all ranks together: each may be bound to some of them.
        "cores": len({cpu for usage in of_ranks for cpu in usage["cpus"]}),
    }


def _bubble(settings: SquadSettings, of_ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Median bubble over updates with a clock, and the last of them span by span in time order."""
    updates = [
        [Span(**span) for rank in of_ranks for span in rank[number]]
        for number in range(len(of_ranks[0]))
    ]
    name = settings.engine
    if name.schedule is None or not updates:
        return {"bubble": None, "timeline": []}
    of_pipeline = settings.microbatches // name.replicas
    last = sorted(updates[-1], key=lambda span: (span.begin_s, span.rank))
    rounded = [
        replace(each, begin_s=round(each.begin_s, 6), end_s=round(each.end_s, 6)) for each in last
    ]
    return {
        "bubble": {
            "measured": median(measured_bubble(update) for update in updates),
            "formula": bubble_by_formula(name.schedule, name.stages, of_pipeline),
        },
        "timeline": [asdict(span) for span in rounded],
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _write(
    run_dir: Path, record: dict[str, Any], prepared: Prepared, weights: Mapping[str, Tensor]
) -> None:
    if weights:
        save_for_transformers(run_dir / WEIGHTS, prepared.start.model, weights, prepared.vocabulary)
    write_file(run_dir / RESULT, write_json(record))

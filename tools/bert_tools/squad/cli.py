"""The sub-command `squad`: fine-tune, compare engines, evaluate, score. Heavy imports are late."""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.squad.settings import (
    DEFAULTS,
    FORMS,
    SquadSettings,
    add_dev,
    add_device,
    add_settings,
    parse_engine,
    settings_of,
)
from mlperf_bert.errors import STOPPED, CheckpointError, ConfigError, one_line, typed

if TYPE_CHECKING:
    import torch

    from mlperf_bert.distributed.launch import RankInfo

DEFAULT_ENGINES = "single,ddp:2,fsdp:2,pipeline:2"
_MOST_SEEDS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, run_it, text in (
        ("train", add_train, _train, "fine-tune on questions, by one engine"),
        (
            "compare",
            _add_compare,
            _compare,
            "compare data parallel, sharded and pipelined training",
        ),
        ("evaluate", _add_evaluate, _evaluate, "answers and scores of a fine-tuned model"),
        ("score", _add_score, _score, "exact match and F1 of a file of answers"),
    ):
        command = commands.add_parser(name, help=text)
        add(command)
        command.set_defaults(squad=run_it)


def run(args: argparse.Namespace) -> int:
    """Run the chosen command. Raises UserError for a user's mistake."""
    return int(args.squad(args))


def _add(
    parser: argparse.ArgumentParser, name: str, kind: type, shown: str, text: str, **more: Any
) -> None:
    parser.add_argument(f"--{name}", type=kind, metavar=shown, help=text, **more)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of `squad train`."""
    _add(parser, "engine", str, "NAME", f"{FORMS}; default: single", default="single")
    _add(parser, "seed", int, "N", "default 1", default=1)
    text = "directory for record and model (default: runs/<utc>-squad)"
    _add(parser, "run-dir", Path, "DIR", text)
    text = "write the record alone, without the fine-tuned model, and print nothing"
    parser.add_argument("--record-only", action="store_true", help=text)
    add_settings(parser)


def _train(args: argparse.Namespace) -> int:
    """Train, starting ranks if need be; 0, or 75 if a signal ended the run."""
    from bert_tools.squad.fine_tune import WEIGHTS, fine_tune
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import from_rank_zero, in_session, on_rank_zero
    from mlperf_bert.distributed.signal_watch import SignalWatch
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.distributed.whereabouts import Whereabouts
    from mlperf_bert.run.lock import RunLock

    settings = settings_of(args, parse_engine(args.engine), args.seed)
    info = read_rank_info()
    if info.launcher == "single" and settings.engine.ranks > 1:
        return run_on_ranks(args.command_line, settings.engine.ranks)
    whereabouts = Whereabouts()
    default = Path("runs") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-squad"
    run_dir = args.run_dir or default  # keeps the time; rank 0's counts
    lock = RunLock(run_dir if info.rank == 0 else None, "squad")

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        on_rank_zero(info, lock.check)
        own_dir = Path(from_rank_zero(info, str(run_dir)))
        files: dict[str, Any] = {"record_only": args.record_only, "whereabouts": whereabouts}
        record = fine_tune(settings, own_dir, info, device, **files)
        if record is None:
            return STOPPED
        if info.rank == 0 and not args.record_only:
            print(_run_in_words(record))
            words = ("--model", own_dir / WEIGHTS, "--dev", settings.dev)
            print(f"to answer with it: {typed('squad', 'evaluate', *words)}")
        return 0

    with lock, SignalWatch(whereabouts, speaks=info.rank == 0):
        return in_session(run_rank, settings.device, "refuse", whereabouts=whereabouts)


def _run_in_words(record: dict[str, Any]) -> str:
    seconds, rates, data = record["seconds"], record["samples_per_s"], record["data"]
    return (
        f"{record['engine']}: {record['updates']:,} updates, {record['samples']:,} samples in "
        f"{seconds['train']:.1f} s of training, {rates['train']:.1f} samples/s; validation loss "
        f"{record['validation_loss']:.4f}, of {data['dev_questions']:,} questions exact match "
        f"{record['exact_match']:.2f} %, F1 {record['f1']:.2f} %"
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    text = f"{FORMS}; the first is what the others are compared with (default {DEFAULT_ENGINES})"
    _add(parser, "engines", str, "A,B,...", text, default=DEFAULT_ENGINES)
    _add(parser, "seeds", int, "N", "seeds 1 .. N of each (default 3)", default=3)
    text = "global batches to sweep, instead of --global-batch; the first is M0 of the statistical "
    text += "efficiency, and the learning rate follows the root of the batch"
    _add(parser, "batches", str, "A,B,...", text)
    text = "directory of the comparison, new or to be continued (default runs/squad-compare)"
    _add(parser, "out", Path, "DIR", text, default=Path("runs/squad-compare"))
    parser.add_argument("--json", action="store_true", help="print one JSON object, not the table")
    add_settings(parser)


def _compare(args: argparse.Namespace) -> int:
    """Run what has not ended, then compare; 0, or the status of the failed run."""
    from bert_tools.common.figures import new_figure
    from bert_tools.squad import compare
    from bert_tools.squad.fine_tune import VOCABULARY, write_vocabulary
    from mlperf_bert.files import make_directory

    new_figure(1, 1)  # pictures come last; a missing matplotlib is reported now
    batches, settings = _plan(args)
    path = args.out / VOCABULARY
    makes_vocabulary = args.vocab is None and args.init_checkpoint is None
    if makes_vocabulary:
        settings = [replace(each, vocab=path) for each in settings]
    jobs = compare.make_jobs(args.out, settings, batches)
    has_begun = bool(compare.read_ended(jobs))
    if makes_vocabulary and not (has_begun and path.exists()):
        make_directory(args.out)
        write_vocabulary(args.train, path)  # one for all runs
    status = compare.run_jobs(jobs)
    runs = compare.read_ended(jobs)
    if status != 0 and not runs:
        return status
    answer = compare.write_comparison(args.out, runs, batches[0])
    if args.json:
        print(json.dumps(answer, allow_nan=False), flush=True)
    else:
        print((args.out / compare.TABLE).read_text("utf-8"), end="", flush=True)
        print(one_line(f"table, JSON, picture and runs: {args.out}"))
    return status


def _plan(args: argparse.Namespace) -> tuple[list[int], list[SquadSettings]]:
    """Batches, and settings at the first batch by seed and engine."""
    if not 1 <= args.seeds <= _MOST_SEEDS:
        raise ConfigError("--seeds", f"is {args.seeds}", f"give 1 .. {_MOST_SEEDS}")
    changes: dict[str, Any] = {}
    if args.batches is not None:
        if args.global_batch is not None:
            raise ConfigError("--batches", "is given beside --global-batch", "leave one out")
        batches = _numbers("--batches", args.batches)
        changes["global_batch"] = batches[0]
    engines = [parse_engine(name) for name in args.engines.split(",")]
    settings = [
        settings_of(args, engine, seed, **changes)
        for seed in range(1, args.seeds + 1)
        for engine in engines
    ]
    if args.batches is None:
        batches = [settings[0].global_batch]
    return batches, settings


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 2**31 for word in words):
        raise ConfigError(option, f"is {text!r}", "give whole numbers, such as 16,32,64")
    numbers = [int(word) for word in words]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(option, f"is {text!r}", "name each once")
    return numbers


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    text = "`model` in a run's directory, or a BertForQuestionAnswering in safetensors"
    _add(parser, "model", Path, "DIR", text, required=True)
    _add(parser, "vocab", Path, "FILE", "default: beside the model")
    add_dev(parser)
    _add(parser, "out", Path, "FILE", "file for the answers, as JSON")
    text = f"tokens of a window (default {DEFAULTS['max_length']}, or what it can read)"
    _add(parser, "max-length", int, "N", text)
    text = f"tokens from one window's begin to the next (default {DEFAULTS['stride']}, "
    _add(parser, "stride", int, "N", f"{text}at most a third)")
    text = "no answer where it scores more than X above the best one (default 0); "
    text += "sets of v1.1 take none: each of their questions has an answer"
    _add(parser, "threshold", float, "X", text, default=0.0)
    add_device(parser)


def _evaluate(args: argparse.Namespace) -> int:
    """Answer, and print the scores."""
    import numpy as np

    from bert_tools.squad.answers import answer
    from bert_tools.squad.engines import Replicated, Team, score_windows
    from bert_tools.squad.model import make_part, whole
    from bert_tools.squad.questions import read_questions, write_predictions
    from bert_tools.squad.weights import read_model
    from bert_tools.squad.windows import make_windows
    from mlperf_bert.distributed.session import in_session
    from mlperf_bert.errors import say

    if not math.isfinite(args.threshold):
        raise ConfigError("--threshold", f"is {args.threshold}", "give a finite number, such as 0")
    questions = read_questions(args.dev)
    start, vocabulary = read_model(args.model, args.vocab)
    lengths = _lengths(args, start.model.max_position_embeddings)
    windows = make_windows(questions, vocabulary, **lengths)
    for remark in windows.remarks:
        say(remark)

    def run_rank(_info: "RankInfo", device: "torch.device") -> int:
        part = make_part(start.model, whole(start.model), start.weights, device)
        scores = score_windows(Replicated("single", part, Team()), windows)
        if not np.isfinite(scores).all():  # NaN gives no answers, which would still be scored
            problem, remedy = "gives scores that are no finite numbers", "whose training did not"
            raise CheckpointError(str(args.model), problem, f"give a model {remedy} diverge")
        found, values = answer(questions, windows, scores, args.threshold)
        if args.out is not None:
            write_predictions(args.out, found)
        _print_scores(questions.sha256, values)
        return 0

    return in_session(run_rank, args.device, "refuse")


def _lengths(args: argparse.Namespace, most: int) -> dict[str, int]:
    """Lengths of windows for a model that reads at most so many tokens."""
    length = min(DEFAULTS["max_length"], most) if args.max_length is None else args.max_length
    if not 0 < length <= most:
        raise ConfigError("--max-length", f"is {length}", f"give 1 .. {most}, as the model has")
    third = min(DEFAULTS["stride"], max(1, length // 3))
    return {"max_length": length, "stride": third if args.stride is None else args.stride}


def _print_scores(dev_sha256: str, values: dict[str, Any]) -> None:
    """Print scores as a JSON object, as SQuAD's own program does."""
    found = {"schema_version": 1, "dev_sha256": dev_sha256, **values}
    print(json.dumps(found, indent=1, allow_nan=False), flush=True)


def _add_score(parser: argparse.ArgumentParser) -> None:
    text = 'JSON: id of every question -> its answer, "" for none'
    _add(parser, "predictions", Path, "FILE", text, required=True)
    add_dev(parser)


def _score(args: argparse.Namespace) -> int:
    """Print the scores, without a model."""
    from bert_tools.squad.answers import score
    from bert_tools.squad.questions import read_predictions, read_questions

    questions = read_questions(args.dev)
    _print_scores(questions.sha256, score(questions, read_predictions(args.predictions, questions)))
    return 0

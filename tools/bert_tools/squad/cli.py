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
    SquadSettings,
    add_dev,
    add_device,
    add_settings,
    parse_engine,
    settings_of,
)
from mlperf_bert.common.errors import STOPPED, CheckpointError, ConfigError, one_line, typed

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
    text = "single, ddp:N, fsdp:N, pipeline:S or pipeline:Sxddp:R, pipelines with @schedule "
    _add(parser, "engine", str, "NAME", f"{text}(default single)", default="single")
    _add(parser, "seed", int, "N", "default 1", default=1)
    text = "directory for record and model (default: runs/<utc>-squad)"
    _add(parser, "run-dir", Path, "DIR", text)
    text = "the fine-tuned model beside the record (default), or the record alone"
    choices = ("weights", "nothing")
    parser.add_argument("--save", choices=choices, default="weights", help=text)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    add_settings(parser)


def _default_ranks() -> int:
    """Ranks of an engine without a number: one per GPU, or two if there are fewer than two GPUs."""
    import torch

    return max(2, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _train(args: argparse.Namespace) -> int:
    """Train, starting ranks if need be; 0, or 75 if a signal ended the run."""
    from bert_tools.squad.fine_tune import WEIGHTS, fine_tune
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import from_rank_zero, in_session, on_rank_zero
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock
    from mlperf_bert.signals.signal_watch import SignalWatch
    from mlperf_bert.signals.whereabouts import Whereabouts

    engine = parse_engine(args.engine, args.schedule, _default_ranks())
    settings = settings_of(args, engine, args.seed)
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
        record = fine_tune(settings, own_dir, info, device, save=args.save, whereabouts=whereabouts)
        if record is None:
            return STOPPED
        if info.rank == 0 and not args.quiet:
            print(_run_in_words(record))
            if args.save == "weights":
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
    text = "single, ddp:N, fsdp:N, pipeline:S, pipeline:Sxddp:R, with @gpipe, @1f1b, @interleaved "
    text += "or @zero_bubble; the first is what the others are compared with "
    text += f"(default {DEFAULT_ENGINES})"
    _add(parser, "engines", str, "A,B,...", text, default=DEFAULT_ENGINES)
    _add(parser, "seeds", int, "N", "seeds 1 .. N of each (default 3)", default=3)
    text = "global batches to sweep, instead of --global-batch"
    _add(parser, "batches", str, "A,B,...", text)
    text = "how the learning rate follows --batches, from the first on (default square_root)"
    choices = ("square_root", "keep")
    parser.add_argument("--rate-rule", choices=choices, default="square_root", help=text)
    text = "M0 of the statistical efficiency (default: the first global batch)"
    _add(parser, "initial-batch", int, "N", text)
    text = "directory of the comparison, new or to be continued (default runs/squad-compare)"
    _add(parser, "out", Path, "DIR", text, default=Path("runs/squad-compare"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser)


def _compare(args: argparse.Namespace) -> int:
    """Run what has not ended, then compare; 0, or the status of the failed run."""
    from bert_tools.common.figures import new_figure
    from bert_tools.squad import compare
    from bert_tools.squad.comparison import Conditions, compare_runs
    from bert_tools.squad.fine_tune import VOCABULARY, write_vocabulary

    new_figure(1, 1)  # pictures come last; a missing matplotlib is reported now
    batches, settings = _plan(args)
    facts, path = compare.facts_of(settings[0]), args.out / VOCABULARY
    makes_vocabulary = args.vocab is None and args.init_checkpoint is None
    if makes_vocabulary:
        settings = [replace(each, vocab=path) for each in settings]
    jobs = compare.make_jobs(args.out, settings, batches, args.rate_rule)
    begun = compare.hold_to_comparison(args.out, facts)
    if makes_vocabulary and (begun == "other" or not path.exists()):
        write_vocabulary(args.train, path)  # one for all runs, made once
    peak = compare.peak_of_machine(args.out, settings[0])
    runs, status = compare.run_jobs(jobs)
    if status != 0 and not runs:
        return status
    # The first engine's runs come first: the others are compared with it.
    order = [(str(job.settings.engine), job.settings.global_batch) for job in jobs]
    runs.sort(key=lambda run: order.index((run.engine, run.global_batch)))
    conditions = Conditions(
        initial_batch=args.initial_batch or batches[0],
        peak_tflops=peak["tflops"],
        peak_means=peak["means"],
    )
    answer = compare.write_comparison(args.out, compare_runs(runs, conditions))
    if args.json:
        print(json.dumps(answer, allow_nan=False), flush=True)
    else:
        print((args.out / compare.TABLE).read_text("utf-8"), end="", flush=True)
        print(one_line(f"table, JSON, pictures and runs: {args.out}"))
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
    names, ranks = args.engines.split(","), _default_ranks()
    engines = [parse_engine(name, args.schedule, ranks) for name in names]
    settings = [
        settings_of(args, engine, seed, **changes)
        for seed in range(1, args.seeds + 1)
        for engine in engines
    ]
    if args.batches is None:
        batches = [settings[0].global_batch]
    if args.initial_batch is not None and args.initial_batch < 1:
        raise ConfigError("--initial-batch", f"is {args.initial_batch}", "give 1 or more")
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
    for name, text in (
        ("max-length", "tokens of a window (default {}, or what it can read)"),
        ("stride", "tokens from one window's begin to the next (default {}, at most a third)"),
        ("max-question-length", "tokens ({})"),
        ("max-answer-length", "tokens ({})"),
    ):
        default = DEFAULTS[name.replace("-", "_")]
        kept = {"default": default} if text == "tokens ({})" else {}
        _add(parser, name, int, "N", text.format(default), **kept)
    text = "no answer where it scores more than X above the best one (default 0); "
    text += "sets of v1.1 take none: each of their questions has an answer"
    _add(parser, "threshold", float, "X", text, default=0.0)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _evaluate(args: argparse.Namespace) -> int:
    """Answer, score, print."""
    import numpy as np

    from bert_tools.squad.answers import answer
    from bert_tools.squad.engines import Replicated, Team, score_windows
    from bert_tools.squad.model import make_part, whole
    from bert_tools.squad.questions import read_questions, write_predictions
    from bert_tools.squad.weights import read_model
    from bert_tools.squad.windows import make_windows
    from mlperf_bert.common.errors import say
    from mlperf_bert.distributed.session import in_session

    _check_evaluation(args)
    questions = read_questions(args.dev)
    start, vocabulary = read_model(args.model, args.vocab)
    windows = make_windows(
        questions, vocabulary, **_lengths(args, start.model.max_position_embeddings)
    )
    for remark in windows.remarks:
        say(remark)

    def run_rank(_info: "RankInfo", device: "torch.device") -> int:
        part = make_part(start.model, whole(start.model), start.weights, device)
        scores = score_windows(Replicated("single", part, Team()), windows)
        if not np.isfinite(scores).all():  # NaN gives no answers, which would still be scored
            problem, remedy = "gives scores that are no finite numbers", "whose training did not"
            raise CheckpointError(str(args.model), problem, f"give a model {remedy} diverge")
        found = answer(questions, windows, scores, args.max_answer_length, args.threshold)
        if args.out is not None:
            write_predictions(args.out, found[0])
        result = {"schema_version": 1, "dev_sha256": questions.sha256, **found[1]}
        if args.json:
            print(json.dumps(result, allow_nan=False), flush=True)
        else:
            print(_answers_in_words(result), flush=True)
        return 0

    return in_session(run_rank, args.device, "refuse")


def _check_evaluation(args: argparse.Namespace) -> None:
    if args.max_answer_length < 1:
        remedy = "give 1 or more"
        raise ConfigError("--max-answer-length", f"is {args.max_answer_length}", remedy)
    if not math.isfinite(args.threshold):
        raise ConfigError("--threshold", f"is {args.threshold}", "give a finite number, such as 0")


def _lengths(args: argparse.Namespace, most: int) -> dict[str, int]:
    """Lengths of windows for a model that reads at most so many tokens."""
    length = min(DEFAULTS["max_length"], most) if args.max_length is None else args.max_length
    if not 0 < length <= most:
        raise ConfigError("--max-length", f"is {length}", f"give 1 .. {most}, as the model has")
    third = min(DEFAULTS["stride"], max(1, length // 3))
    stride = third if args.stride is None else args.stride
    question = args.max_question_length
    return {"max_length": length, "stride": stride, "max_question_length": question}


def _answers_in_words(result: dict[str, Any]) -> str:
    counts = result["answerable"]["questions"] + result["unanswerable"]["questions"]
    return (
        f"{_scores_in_words({**result, 'all': {**result, 'questions': counts}})}\n"
        f"validation loss {result['validation_loss']:.4f}; with the best threshold, chosen on "
        f"these questions, F1 {result['best_f1']:.2f} % at {result['best_f1_threshold']:.3g}"
    )


def _scores_in_words(scores: dict[str, Any]) -> str:
    lines = []
    names = {"all": "questions", "answerable": "with an answer"}
    for part, words in (names | {"unanswerable": "without an answer"}).items():
        line = f"{scores[part]['questions']:,} {words}"
        if scores[part]["exact_match"] is not None:
            line += ": exact match {exact_match:.2f} %, F1 {f1:.2f} %".format(**scores[part])
        lines.append(line)
    return "\n".join(lines)


def _add_score(parser: argparse.ArgumentParser) -> None:
    text = 'JSON: id of every question -> its answer, "" for none'
    _add(parser, "predictions", Path, "FILE", text, required=True)
    add_dev(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _score(args: argparse.Namespace) -> int:
    """Print the scores, without a model."""
    from bert_tools.squad.answers import score
    from bert_tools.squad.questions import read_predictions, read_questions

    questions = read_questions(args.dev)
    scores = score(questions, read_predictions(args.predictions, questions))
    found = {"schema_version": 1, "dev_sha256": questions.sha256, **scores}
    print(json.dumps(found) if args.json else _scores_in_words(found))
    return 0

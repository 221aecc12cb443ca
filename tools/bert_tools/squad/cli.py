"""The command `squad`, which fine-tunes and evaluates BERT on questions.

Slow modules are imported only when a sub-command runs.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.squad.settings import FORMS, SquadSettings, add_settings, parse_engine, settings_of
from mlperf_bert.arguments import add_command
from mlperf_bert.errors import STOPPED, ConfigError, one_line
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    import torch

    from mlperf_bert.distributed.launch import RankInfo

DEFAULT_ENGINES = "single,ddp:2,fsdp:2,pipeline:2"
DEFAULT_OUT = Path("runs/squad-compare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `squad` and their options."""
    parser.description = (
        "Fine-tune on SQuAD v2.0's questions, and compare ways to use several ranks."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = add_command(
        commands,
        "train",
        "fine-tune on questions with one training engine, such as ddp:2",
        "Fine-tune a model on questions with one engine, and write its record, model and answers "
        "to the run's directory. By default, the command uses a small included question set.",
        "mlperf_bert squad train --engine ddp:2 --epochs 1 --run-dir runs/questions",
    )
    add_train(train)
    train.set_defaults(squad=_train)
    compare = add_command(
        commands,
        "compare",
        "compare data-parallel, sharded and pipelined training",
        "Fine-tune with several engines and seeds, and print a table of speed and accuracy. The "
        "command writes runs, table and picture to --out, and continues after an interruption.",
        "mlperf_bert squad compare --engines single,ddp:2 --seeds 1 --updates 20",
    )
    _add_compare(compare)
    compare.set_defaults(squad=_compare)


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compared = compare.add_argument_group("what is compared")
    text = f"engines to compare, of which the first is the baseline: {FORMS}"
    compared.add_argument("--engines", metavar="A,B,...", default=DEFAULT_ENGINES, help=text)
    text = "number of runs of each engine, with the seeds 1, 2 and so on"
    compared.add_argument("--seeds", type=int, metavar="N", default=3, help=text)
    text = (
        "global batch sizes to compare, instead of --global-batch. The first one is the reference "
        "of the statistical efficiency. The learning rate scales with the square root of the batch"
    )
    compared.add_argument("--batches", metavar="A,B,...", help=text)
    text = f"directory of the comparison, which is resumed if it exists (default: {DEFAULT_OUT})"
    compared.add_argument("--out", type=Path, metavar="DIR", default=DEFAULT_OUT, help=text)
    text = "print one JSON object instead of the table"
    compared.add_argument("--json", action="store_true", help=text)
    add_settings(compare)


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-command and return its exit status. Raises UserError for a mistake."""
    return int(args.squad(args))


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `squad train` to its parser."""
    run = parser.add_argument_group("the run")
    run.add_argument("--engine", metavar="NAME", default="single", help=f"engine: {FORMS}")
    text = "seed of the weights and of the order of the questions"
    run.add_argument("--seed", type=int, metavar="N", default=1, help=text)
    text = "directory to write the record and the model to (default: runs/<utc>-squad)"
    run.add_argument("--run-dir", type=Path, metavar="DIR", help=text)
    text = "write only the record, not the model and the answers, and print nothing"
    run.add_argument("--record-only", action="store_true", help=text)
    add_settings(parser)


def _train(args: argparse.Namespace) -> int:
    """Run `squad train`, and start its ranks if the engine needs several.

    Returns the exit status: 0, or 75 after a signal.
    """
    from bert_tools.squad.fine_tune import fine_tune
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import from_rank_zero, in_session, on_rank_zero
    from mlperf_bert.distributed.signal_watch import SignalWatch, Whereabouts
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock

    info = read_rank_info()
    require_packages("squad train", "squad", "tokenizers")
    settings = settings_of(args, parse_engine(args.engine), args.seed)
    if info.launcher == "single" and settings.engine.ranks > 1:
        return run_on_ranks(args.command_line, settings.engine.ranks)
    whereabouts = Whereabouts()
    default = Path("runs") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-squad"
    run_dir = args.run_dir or default  # the default has the time, so all ranks use that of rank 0
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
        return 0

    with lock, SignalWatch(whereabouts, speaks=info.rank == 0):
        return in_session(run_rank, settings.device, "refuse", whereabouts=whereabouts)


def _run_in_words(record: dict[str, Any]) -> str:
    """Format the record of a fine-tuning run as one line."""
    return (
        f"{record['engine']}: {record['updates']:,} updates, {record['samples']:,} samples in "
        f"{record['seconds']['train']:.1f} s of training, {record['samples_per_s']:.1f} samples/s; "
        f"validation loss {record['validation_loss']:.4f}, exact match "
        f"{record['exact_match']:.2f}% and F1 {record['f1']:.2f}% on {record['questions']:,} "
        "questions"
    )


def _compare(args: argparse.Namespace) -> int:
    """Start all runs of a comparison that are not finished, then print the comparison.

    Returns 0, or the exit status of the run that failed.
    """
    require_packages("squad compare", "squad", "tokenizers", "matplotlib")
    from bert_tools.squad.compare import CONTENTS, run_all, write_comparison
    from bert_tools.squad.comparison import in_words

    planned = _plan(args)
    runs, status = run_all(args.out, planned)
    if runs:
        comparison = write_comparison(args.out, runs, planned[0].global_batch)
        if args.json:
            print(json.dumps(comparison, allow_nan=False), flush=True)
        else:
            print(in_words(comparison))
            print(one_line(f"wrote {args.out}: {CONTENTS}"), flush=True)
    return status


def _plan(args: argparse.Namespace) -> list[SquadSettings]:
    """Return the settings of all runs: one run per engine, batch and seed.

    The runs are ordered by seed, so that a slow phase of the machine affects all engines. Raises
    ConfigError for a malformed number, and for an engine or a batch that is given twice.
    """
    from bert_tools.squad.compare import at_batch

    batches: list[int] = []
    changes = {}
    if args.batches is not None:
        words = args.batches.split(",")
        if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
            problem = f"must be whole numbers above 0, separated by commas, not {args.batches!r}"
            raise ConfigError("--batches", problem, "write for example 16,32,64")
        if args.global_batch is not None:
            raise ConfigError(
                "--batches", "cannot be used with --global-batch", "remove --global-batch"
            )
        batches = [int(word) for word in words]
        if len(batches) > 1 and args.updates is None:  # epochs round to other numbers of samples
            remedy = f"set --updates to the number of updates at a batch of {batches[0]}"
            raise ConfigError("--batches", "needs --updates to compare batches", remedy)
        if len(batches) > 1 and not args.noise_every:
            problem = "needs --noise-every to compute the efficiency of each batch"
            raise ConfigError("--batches", problem, "add for example --noise-every 10")
        changes = {"global_batch": batches[0]}
    found = []
    for seed in range(1, args.seeds + 1):
        for name in args.engines.split(","):
            settings = settings_of(args, parse_engine(name), seed, **changes)
            found += [at_batch(settings, batch) for batch in batches or [settings.global_batch]]
    if not found:
        raise ConfigError("--seeds", f"must be at least 1, not {args.seeds}", "use 1 or more")
    if any(each in found[:number] for number, each in enumerate(found)):
        problem = "list an engine or a batch size twice"
        raise ConfigError("--engines, --batches", problem, "list each engine and batch size once")
    return found

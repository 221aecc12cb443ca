"""The sub-command `prepare`: its sources, their options, and the function for each.

Every source is an option with a function `_prepare_...`. Heavy imports wait until one runs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.config.options import find_config
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import usable_cpus

if TYPE_CHECKING:
    from mlperf_bert.data.index import Manifest, ShardSettings

SEED = 12_345
# Options that decide the examples, with their defaults.
_NUMBERS = {
    "max_seq_length": 512,
    "max_predictions": MAX_PREDICTIONS,
    "dupe_factor": 10,
    "seed": SEED,
}
_OF_EXAMPLES = ("vocab", "segments", *_NUMBERS)

_Prepare = Callable[[argparse.Namespace], int]
_Option = tuple[str, dict[str, Any]]


def _option(name: str, text: str, metavar: str = "", **words: Any) -> _Option:
    if metavar:
        kinds = {"N": int, "FILE": Path, "DIR": Path, "TEXTDIR": Path}
        words = {"type": kinds.get(metavar), "metavar": metavar, **words}
    return name, {"help": text, **words}


# An option that is not given must be None, False or [], so that `run` can tell.
_OPTIONS: tuple[_Option, ...] = (
    _option("out", "directory to make", "DIR", required=True),
    _option("vocab", "the model's vocab.txt, or a Hugging Face tokenizer.json", "FILE"),
    _option(
        "segments",
        "pair (default): two segments for next-sentence prediction; single: sequences of "
        "whole sentences for masked LM alone",
        choices=("pair", "single"),
    ),
    _option("max_seq_length", "most tokens of an example (default 512)", "N"),
    _option(
        "max_predictions",
        f"most masked positions of an example (default {MAX_PREDICTIONS})",
        "N",
    ),
    # A further pass over single segments only changes the masks, which training draws itself.
    _option("dupe_factor", "passes over the text (default 10; with --segments single 1)", "N"),
    _option("seed", f"seed of every text's random stream (default {SEED})", "N"),
    _option("workers", "worker processes (default: the cores of this process)", "N"),
    _option("text", "UTF-8 text files, one shard each", "FILE", nargs="+"),
    _option(
        "pick_eval",
        "with --text, --hdf5: keep N examples, evenly out of all (10000)",
        "N",
    ),
    _option(
        "split_sentences",
        "with --text: paragraphs, with an empty line between documents",
        action="store_true",
    ),
    _option("mlcommons", "the official text: part-*-of-00500, eval.txt, vocab.txt", "TEXTDIR"),
    _option(
        "parts", "with --mlcommons: make only the training shards of these parts, from 0 on", "A-B"
    ),
    _option(
        "join",
        "with --mlcommons: make the sets of the shards in --out and in these directories",
        "DIR",
        nargs="*",
    ),
    _option(
        "hdf5",
        "HDF5 files of published submissions, one padded example a row, one shard each",
        "FILE",
        nargs="+",
    ),
    _option(
        "embedded",
        "make DIR/train and DIR/eval from the documentation of this Python",
        action="store_true",
    ),
    _option("config", "with --embedded: the run's", "FILE", type=find_config),
    _option(
        "set",
        "with --embedded: change settings of the config",
        "SECTION.KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare`."""
    source = parser.add_mutually_exclusive_group(required=True)
    for name, words in _OPTIONS:
        (source if name in _SOURCES else parser).add_argument(_spelled(name), **words)


def run(args: argparse.Namespace) -> int:
    """Run `prepare`. Raises ConfigError or DataError for what the user can mend."""
    name = next(name for name in _SOURCES if _is_given(args, name))
    prepare, takes = _SOURCES[name]
    for option in sorted({option for _, options in _SOURCES.values() for option in options}):
        if option not in takes and _is_given(args, option):
            problem = f"does not go with {_spelled(name)}"
            raise ConfigError(_spelled(option), problem, "leave it out")
    return prepare(args)


def _prepare_text(args: argparse.Namespace) -> int:
    """`prepare --text`: text files with a given vocabulary to one prepared set."""
    from mlperf_bert.prepare.build import prepare_text

    settings = _settings(args, split_sentences=args.split_sentences, pick_eval=args.pick_eval)
    manifest = prepare_text(
        args.text, _needed_vocabulary(args), args.out, settings, workers=_workers(args)
    )
    print(_summary(args.out, manifest))
    return 0


def _prepare_mlcommons(args: argparse.Namespace) -> int:
    """`prepare --mlcommons`: the official text to the official sets, on one machine or several."""
    from mlperf_bert.data.index import examples_digest
    from mlperf_bert.prepare import mlcommons
    from mlperf_bert.prepare.verify import verify

    if args.parts is not None and args.join is not None:
        raise ConfigError("--join", "does not go with --parts", "join when all parts are made")
    vocab = args.vocab or args.mlcommons / "vocab.txt"
    places = mlcommons.Places(args.mlcommons, vocab, args.out)
    if args.parts is not None:
        numbers = mlcommons.parse_parts(args.parts)
        made = mlcommons.prepare_parts(places, numbers, _workers(args))
        num_samples = sum(sidecar.num_samples for sidecar in made)
        print(f"parts {args.parts}: {num_samples:,} examples in {len(made)} shards")
        print(f"examples sha256 {examples_digest(made)}")
        return 0
    if args.join is None:
        mlcommons.check_text(places, _workers(args))
    held_out = mlcommons.prepare_eval(places)
    print(_summary(args.out / "eval", held_out), flush=True)
    if args.join is None:
        mlcommons.prepare_parts(places, range(mlcommons.OFFICIAL.parts), _workers(args))
    train = mlcommons.join_parts(places, args.join or [])
    print(_summary(args.out / "train", train))
    published = mlcommons.OFFICIAL.num_samples
    same = "as" if train.num_samples == published else "NOT as"
    print(f"{train.num_samples:,} training examples, {same} published ({published:,})")
    report = verify(args.out, full=False, workers=1)
    print(report.to_text(), flush=True)
    report.raise_if_wrong()
    return 0


def _prepare_import(args: argparse.Namespace) -> int:
    """`prepare --hdf5`: examples of published submissions to one prepared set."""
    from mlperf_bert.prepare.import_examples import import_set

    # Only the maker of the examples knows seed and passes; these files do not hold them.
    settings = _settings(args, seed=0, dupe_factor=1, pick_eval=args.pick_eval)
    manifest = import_set(
        args.hdf5,
        _needed_vocabulary(args),
        args.out,
        settings,
        workers=_workers(args),
    )
    print(_summary(args.out, manifest))
    return 0


def _prepare_embedded(args: argparse.Namespace) -> int:
    """`prepare --embedded`: the small corpus from the user's own Python, to train/ and eval/."""
    from mlperf_bert.config.files import load_config
    from mlperf_bert.prepare.corpus import prepare_embedded

    if args.config is None:
        raise ConfigError("--config", "is missing", "--embedded takes its settings from it")
    config = load_config(args.config, args.set)
    settings = _settings(
        args,
        max_seq_length=config.data.max_seq_length,
        max_predictions=config.data.max_predictions,
        dupe_factor=config.data.dupe_factor,
        segments="single" if config.model.objective == "mlm" else "pair",
    )
    if not prepare_embedded(args.out, config.model.vocab_size, settings):
        print(f"{args.out}: already prepared with these settings")
    return 0


# The argument that chooses a source -> its function, and the options that go with it.
_SOURCES: dict[str, tuple[_Prepare, tuple[str, ...]]] = {
    "text": (_prepare_text, (*_OF_EXAMPLES, "workers", "pick_eval", "split_sentences")),
    "mlcommons": (_prepare_mlcommons, ("vocab", "workers", "parts", "join")),
    "hdf5": (
        _prepare_import,
        ("vocab", "max_seq_length", "max_predictions", "workers", "pick_eval"),
    ),
    "embedded": (_prepare_embedded, ("config", "set", "seed")),
}


def _is_given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return not (value is None or value is False or value == [])


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings(args: argparse.Namespace, **changes: Any) -> "ShardSettings":
    """The settings that decide the examples: `changes` first, then options, then defaults."""
    from mlperf_bert.data.index import ShardSettings

    values = {"segments": args.segments or "pair", **_NUMBERS}
    if args.segments == "single":
        values["dupe_factor"] = 1
    given = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    return ShardSettings(**{**values, **given, **changes})


def _workers(args: argparse.Namespace) -> int:
    return len(usable_cpus()) if args.workers is None else int(args.workers)


def _needed_vocabulary(args: argparse.Namespace) -> Path:
    if args.vocab is None:
        raise ConfigError("--vocab", "is missing", "give the model's vocab.txt")
    return Path(args.vocab)


def _summary(out_dir: Path, manifest: "Manifest") -> str:
    """A summary of a prepared set, with a digest to compare two sets."""
    from mlperf_bert.data.index import examples_digest, read_sidecar

    shards = [out_dir / "shards" / entry.file for entry in manifest.shards]
    digest = examples_digest(read_sidecar(shard) for shard in shards)
    num_tokens = sum(length * count for length, count in enumerate(manifest.length_histogram))
    return (
        f"{out_dir}: {manifest.num_samples} examples in {len(manifest.shards)} shards, "
        f"mean length {num_tokens / manifest.num_samples:.1f}\nexamples sha256 {digest}"
    )

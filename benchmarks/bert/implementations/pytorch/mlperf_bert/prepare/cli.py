"""The command `prepare`, with the options of its data sources and a function for each source.

Each source is an option with a function `_prepare_...`, which imports the large modules that it
needs.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import find_config, load_config
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import usable_cpus

if TYPE_CHECKING:
    from mlperf_bert.data.index import Manifest

SEED = 12_345
MAX_SEQ_LENGTH = 512
DUPE_FACTOR = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare`.

    An option that the user did not pass is None, so that `run` can detect this.
    """
    describe(
        parser,
        "Convert text, or the examples of a published submission, to a prepared set for `train`, "
        "with shards, sidecars and a length index. To resume an interrupted command, repeat it. "
        "Finished shards are kept. For your own text, see `prepare --corpus TEXT --help`.",
        "mlperf_bert prepare --embedded --config cpu_tiny --out my_data",
        "mlperf_bert prepare --text part_*.txt --vocab vocab.txt --out my_data/train",
        "mlperf_bert prepare --corpus my_text --out my_data",
    )
    _add_sources(parser)
    _add_examples(parser)
    embedded = parser.add_argument_group("with --embedded")
    embedded.add_argument(
        "--config", type=find_config, metavar="FILE", help="config that determines all data sizes"
    )
    embedded.add_argument(
        "--set",
        nargs="+",
        action="extend",
        metavar="SECTION.KEY=VALUE",
        help="override settings of the config",
    )


def _add_examples(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output, the vocabulary and the examples to generate."""

    def number(name: str, text: str) -> None:
        made.add_argument(name, type=int, metavar="N", help=text)

    files = parser.add_argument_group("output and vocabulary")
    files.add_argument("--out", type=Path, metavar="DIR", required=True, help="directory to create")
    files.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="the model's vocab.txt, or a Hugging Face tokenizer.json",
    )
    text = "number of worker processes (default: one per core)"
    files.add_argument("--workers", type=int, metavar="N", help=text)
    made = parser.add_argument_group("the examples")
    made.add_argument(
        "--segments",
        choices=("pair", "single"),
        help="write a `pair` of segments for next-sentence prediction, or a `single` sequence of "
        "whole sentences for masked words only (default: pair)",
    )
    number("--max-seq-length", f"maximum number of tokens per example (default: {MAX_SEQ_LENGTH})")
    number("--max-predictions", f"maximum masked tokens per example (default: {MAX_PREDICTIONS})")
    number(
        "--dupe-factor",
        f"passes over the text (default: {DUPE_FACTOR}, or 1 with --segments single)",
    )
    number("--seed", f"seed of every text's random stream (default: {SEED})")
    number(
        "--pick-eval",
        "with --text: keep only N evenly spaced examples, such as MLPerf's 10000 (default: all)",
    )


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the data source. The user must pass exactly one of them.

    The tools add the source `--corpus` for a user's own text (`__main__.VARIANTS`).
    """
    group = parser.add_argument_group("source (exactly one)")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="build one shard per UTF-8 text file"
    )
    source.add_argument(
        "--hdf5",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="convert HDF5 files of published submissions, with one padded example per row, to "
        "one shard per file",
    )
    source.add_argument(
        "--embedded",
        action="store_true",
        help="write DIR/train and DIR/eval from the documentation of this Python",
    )


# The options of each source, in addition to --out.
_OPTIONS = {
    "text": (
        *("vocab", "segments", "max_seq_length", "max_predictions", "dupe_factor", "seed"),
        *("workers", "pick_eval"),
    ),
    "hdf5": ("vocab", "max_seq_length", "max_predictions", "workers"),
    "embedded": ("config", "set", "seed"),
}


def run(args: argparse.Namespace) -> int:
    """Run `prepare`, and return 0. Raises ConfigError or DataError for a user's mistake."""
    source = next(name for name in _OPTIONS if getattr(args, name))
    for option in sorted({option for options in _OPTIONS.values() for option in options}):
        if option not in _OPTIONS[source] and getattr(args, option) is not None:
            spelled = "--" + option.replace("_", "-")
            raise ConfigError(spelled, f"cannot be used with --{source}", "remove this option")
    if source in ("text", "hdf5") and args.vocab is None:
        raise ConfigError("--vocab", "is missing", "pass the model's vocab.txt")
    workers = len(usable_cpus()) if args.workers is None else args.workers
    if source == "text":
        _prepare_text(args, workers)
    elif source == "hdf5":
        _prepare_hdf5(args, workers)
    else:
        _prepare_embedded(args)
    return 0


def _prepare_text(args: argparse.Namespace, workers: int) -> None:
    """Create a prepared set from text files and a vocabulary (`prepare --text`)."""
    from mlperf_bert.data.index import ShardSettings
    from mlperf_bert.prepare.build import prepare_text

    # Another pass over single segments only changes the masks, which training draws itself.
    passes = 1 if args.segments == "single" else DUPE_FACTOR
    settings = ShardSettings(
        max_seq_length=_given(args.max_seq_length, MAX_SEQ_LENGTH),
        max_predictions=_given(args.max_predictions, MAX_PREDICTIONS),
        dupe_factor=_given(args.dupe_factor, passes),
        seed=_given(args.seed, SEED),
        segments=args.segments or "pair",
        pick_eval=args.pick_eval,
    )
    manifest = prepare_text(args.text, args.vocab, args.out, settings, workers=workers)
    print(_summary(args.out, manifest))


def _prepare_hdf5(args: argparse.Namespace, workers: int) -> None:
    """Create a prepared set from HDF5 files of published submissions (`prepare --hdf5`)."""
    from mlperf_bert.data.index import ShardSettings
    from mlperf_bert.prepare.import_examples import import_set

    # The files do not say with which seed and how many passes their examples were made.
    settings = ShardSettings(
        max_seq_length=_given(args.max_seq_length, MAX_SEQ_LENGTH),
        max_predictions=_given(args.max_predictions, MAX_PREDICTIONS),
        dupe_factor=1,
        seed=0,
    )
    manifest = import_set(args.hdf5, args.vocab, args.out, settings, workers=workers)
    print(_summary(args.out, manifest))


def _prepare_embedded(args: argparse.Namespace) -> None:
    """Create train/ and eval/ from documentation in Python's library (`prepare --embedded`)."""
    from mlperf_bert.data.index import ShardSettings
    from mlperf_bert.prepare.corpus import prepare_embedded

    if args.config is None:
        raise ConfigError("--config", "is missing", "pass the config of the run that uses the data")
    config = load_config(args.config, args.set or [])
    settings = ShardSettings(
        max_seq_length=config.data.max_seq_length,
        max_predictions=config.data.max_predictions,
        dupe_factor=config.data.dupe_factor,
        seed=_given(args.seed, SEED),
        segments="single" if config.model.objective == "mlm" else "pair",
    )
    if not prepare_embedded(args.out, config.model.vocab_size, settings):
        print(f"{args.out} was already prepared with these settings")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _summary(out_dir: Path, manifest: "Manifest") -> str:
    """Return a summary of a prepared set, with a digest that equal sets share."""
    from mlperf_bert.data.index import examples_digest, read_sidecar

    shards = [out_dir / "shards" / entry.file for entry in manifest.shards]
    digest = examples_digest(read_sidecar(shard) for shard in shards)
    num_tokens = sum(length * count for length, count in enumerate(manifest.length_histogram))
    return (
        f"{out_dir}: {manifest.num_samples} examples in {len(manifest.shards)} shards, "
        f"mean length {num_tokens / manifest.num_samples:.1f}\nexamples sha256 {digest}"
    )

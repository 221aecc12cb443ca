"""Options of `prepare` that several sources share: their defaults, and their values."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.machine import usable_cpus

if TYPE_CHECKING:
    from mlperf_bert.data.index import Manifest, Segments

# Those that decide the examples, and their values where they are not given.
NUMBERS = {"max_seq_length": 512, "max_predictions": 76, "dupe_factor": 10, "seed": 12345}
# Another pass over single segments has other masks only, which training draws by itself.
_SINGLE_DEFAULT = {"dupe_factor": "; with --segments single 1"}
OF_EXAMPLES = ("vocab", "segments", *NUMBERS)
_WORDS = {
    "max_seq_length": "tokens of an example at most",
    "max_predictions": "masked positions of an example at most",
    "dupe_factor": "passes over the text",
    "seed": "of the random stream of every text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them; all default to None, so that one given where it means nothing is noticed."""
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="the model's vocab.txt, or a Hugging Face tokenizer.json",
    )
    parser.add_argument(
        "--segments",
        choices=("pair", "single"),
        help="pair (default): two segments for next-sentence prediction; single: sequences of "
        "whole sentences for masked LM alone",
    )
    for name, value in NUMBERS.items():
        option = "--" + name.replace("_", "-")
        text = f"{_WORDS[name]} (default {value}{_SINGLE_DEFAULT.get(name, '')})"
        parser.add_argument(option, type=int, metavar="N", help=text)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: the cores of this process)"
    )


def number(args: argparse.Namespace, name: str) -> int:
    """The value of one of `NUMBERS`, given or not."""
    given = getattr(args, name)
    if given is None and name in _SINGLE_DEFAULT and segments(args) == "single":
        return 1
    return NUMBERS[name] if given is None else int(given)


def segments(args: argparse.Namespace) -> "Segments":
    """What an example is made of."""
    chosen: Segments = args.segments or "pair"
    return chosen


def workers(args: argparse.Namespace) -> int:
    """How many processes work."""
    return len(usable_cpus()) if args.workers is None else int(args.workers)


def needed_vocabulary(args: argparse.Namespace) -> Path:
    """The file of --vocab. Raises ConfigError where it is not given."""
    if args.vocab is None:
        raise ConfigError("--vocab", "is missing", "give the model's vocab.txt")
    return Path(args.vocab)


def summary(out_dir: Path, manifest: "Manifest") -> str:
    """What a prepared set holds, and by which digest two of them can be compared."""
    from mlperf_bert.data.index import examples_digest, read_sidecar

    shards = [out_dir / "shards" / entry.file for entry in manifest.shards]
    digest = examples_digest(read_sidecar(shard) for shard in shards)
    num_tokens = sum(length * count for length, count in enumerate(manifest.length_histogram))
    return (
        f"{out_dir}: {manifest.num_samples} examples in {len(manifest.shards)} shards, "
        f"mean length {num_tokens / manifest.num_samples:.1f}\nexamples sha256 {digest}"
    )

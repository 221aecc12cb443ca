"""The sub-command `convert`: makes a checkpoint from another program's weights."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.errors import one_line

if TYPE_CHECKING:
    from bert_tools.huggingface.weights import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `convert`."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="directory, file or prefix")
    parser.add_argument(
        "--from", dest="format", choices=("tensorflow", "huggingface"), required=True
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="vocab.txt or tokenizer.json of these weights (default: the one beside them)",
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "draw"),
        default="refuse",
        help="for a head missing in the source: refuse (default), or draw it at random",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Convert, and print the fate of every tensor."""
    from bert_tools.convert.convert import in_words, report_of
    from bert_tools.huggingface.conversion import plan_conversion, write_checkpoint

    source = _open(args.format, args.source)
    conversion = plan_conversion(source, args.vocab, args.missing)
    write_checkpoint(conversion, args.out, {"format": args.format, **source.origin})
    report = report_of(conversion, args.out)
    lines = [json.dumps(report)] if args.json else map(one_line, in_words(report))
    print("\n".join(lines))
    return 0


def _open(source_format: str, path: Path) -> "Source":
    if source_format == "huggingface":
        from bert_tools.huggingface.reader import open_huggingface

        return open_huggingface(path)
    from bert_tools.convert.tensorflow_source import open_tensorflow_source

    return open_tensorflow_source(path)

"""The sub-command `convert`: weights of another program become a checkpoint."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import one_line
from mlperf_bert.config.options import find_config

if TYPE_CHECKING:
    from mlperf_bert.checkpoint.huggingface.weights import Source


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
        "--config",
        type=find_config,
        metavar="FILE",
        help="a config whose [model] these weights are for",
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "draw"),
        default="refuse",
        help="a head that the source has not: refuse (default), or draw it at random",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what became of every tensor."""
    from bert_tools.convert.convert import in_words, plan_conversion, report_of, write_checkpoint

    source = _open(args.format, args.source)
    conversion = plan_conversion(source, args.vocab, args.config, args.missing)
    write_checkpoint(conversion, args.out, {"format": args.format, **source.origin})
    report = report_of(conversion, args.out)
    lines = [json.dumps(report)] if args.json else map(one_line, in_words(report))
    print("\n".join(lines))
    return 0


def _open(source_format: str, path: Path) -> "Source":
    if source_format == "huggingface":
        from mlperf_bert.checkpoint.huggingface.reader import open_huggingface

        return open_huggingface(path)
    from bert_tools.convert.tensorflow_source import open_tensorflow_source

    return open_tensorflow_source(path)

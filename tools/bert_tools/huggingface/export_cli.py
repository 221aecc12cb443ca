"""The sub-command `export`: write a checkpoint as a directory that other programs load."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--to", choices=("huggingface",), required=True)
    parser.add_argument(
        "--vocab", type=Path, metavar="FILE", help="default: in the checkpoint or above it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export, and print what was written."""
    from bert_tools.huggingface.export import export_huggingface

    done = export_huggingface(args.checkpoint, args.out, args.vocab)
    if args.json:
        print(json.dumps({"schema_version": 1, **asdict(done)}))
    else:
        print(
            f"{done.architecture} of step {done.step:,}: {done.tensors} tensors, "
            f"{done.parameters:,} weights, {done.word_rows:,} rows of words"
        )
        print(f"written: {done.out}")
    return 0

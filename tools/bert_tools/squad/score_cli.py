"""`squad score`: exact match and F1 of a file of answers, without a model. No torch."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bert_tools.squad.options import QUICK_DEV


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `squad score`."""
    parser.add_argument(
        "--predictions",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: id of every question -> its answer, "" for none',
    )
    add_dev(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_dev(parser: argparse.ArgumentParser) -> None:
    """Add `--dev`."""
    parser.add_argument(
        "--dev",
        type=Path,
        default=QUICK_DEV,
        metavar="FILE",
        help="SQuAD's JSON, v2.0 or v1.1 (default: ours, dev.json of the quick set)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the scores. Raises DataError for a file that cannot be read."""
    from bert_tools.squad.predictions import read_predictions
    from bert_tools.squad.questions import read_questions
    from bert_tools.squad.scores import score

    questions = read_questions(args.dev)
    scores = score(questions, read_predictions(args.predictions, questions))
    found = {"schema_version": 1, "dev_sha256": questions.sha256, **asdict(scores)}
    if args.json:
        print(json.dumps(found))
        return 0
    for name, words in (("all", "all"), ("answerable", "with"), ("unanswerable", "without")):
        print(line(words, found[name]))
    return 0


def line(name: str, means: dict[str, Any]) -> str:
    """One part of the questions in words."""
    what = {"all": "questions", "with": "with an answer", "without": "without an answer"}[name]
    text = f"{means['questions']:,} {what}"
    if means["exact_match"] is None:
        return text
    return f"{text}: exact match {means['exact_match']:.2f} %, F1 {means['f1']:.2f} %"

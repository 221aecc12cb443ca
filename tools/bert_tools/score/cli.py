"""The command `score`, which measures what an encoder is worth on a user's own labelled texts.

Slow modules are imported only after the options and the files have been checked.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.arguments import describe
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.extras import require_packages
from mlperf_bert.files import check_writable, file_digest, write_file, write_json
from mlperf_bert.run.console import ProgressLines

if TYPE_CHECKING:
    from bert_tools.score.data import Texts
    from bert_tools.score.encoder import Encoder

RECORD, PICTURE = "score.json", "score.png"
_LEAST = {"seeds": 1, "epochs": 1, "max_length": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `score` to its parser."""
    describe(
        parser,
        "Measure how well an encoder classifies your labelled texts, compared with a bag of words "
        "and with another model. The command trains on three quarters of the texts, tests on the "
        "others, and repeats this with several seeds. It can also rank pairs by their similarity.",
        "mlperf_bert score my_model/exported --labelled my_labels.jsonl",
        "mlperf_bert score my_model/exported --pairs rated.csv --against other",
    )
    text = "directory that transformers loads, such as one written by `export`"
    parser.add_argument("model", type=Path, metavar="MODEL", help=text)
    scored = parser.add_argument_group("what is scored")
    for name, metavar, text in (
        ("labelled", "FILE", "JSON lines, CSV or Parquet with text, text_pair (if any) and label"),
        ("pairs", "FILE", "rated pairs of texts, with the fields text, text_pair and score"),
        ("against", "DIR", "directory of another model to compare with"),
    ):
        scored.add_argument(f"--{name}", type=Path, metavar=metavar, help=text)
    trained = parser.add_argument_group("how models are trained")
    text = "number of repetitions, with the seeds 1, 2 and so on"
    trained.add_argument("--seeds", type=int, metavar="N", default=5, help=text)
    text = "passes of fine-tuning (default: 4, or more for at least 200 updates)"
    trained.add_argument("--epochs", type=int, metavar="N", help=text)
    text = "peak of fine-tuning (default: 5e-5 for a hidden size of 768, and more for smaller ones)"
    trained.add_argument("--learning-rate", type=float, metavar="RATE", help=text)
    text = "score only frozen features, which is several times as fast"
    trained.add_argument("--no-fine-tune", action="store_true", help=text)
    text = "number of tokens after which a text is cut"
    trained.add_argument("--max-length", type=int, metavar="N", default=128, help=text)
    output = parser.add_argument_group("output")
    text = f"directory to write {RECORD} and {PICTURE} to"
    output.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "print one JSON object instead of the table"
    output.add_argument("--json", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Score the model and print the result. Returns the exit status.

    Raises UserError for a mistake in the options, the files or the directories.
    """
    _check_options(args)
    require_packages("score", "score", "transformers", "sklearn")
    if args.out is not None:
        require_packages("--out", "score", "matplotlib")
        check_writable(args.out / RECORD)  # before the work
    from bert_tools.common.results import png
    from bert_tools.score.encoder import check_model
    from bert_tools.score.report import conclusion, picture, table

    for path in filter(None, (args.model, args.against)):
        check_model(path)
    result = _score(args)
    if args.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        print(*table(result), "", *map(one_line, conclusion(result)), sep="\n", flush=True)
    if args.out is not None:
        write_file(args.out / RECORD, write_json(result))
        write_file(args.out / PICTURE, png(picture(result)))
        if not args.json:
            print(one_line(f"wrote {args.out / RECORD} and {args.out / PICTURE}"), flush=True)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if the options are wrong or cannot be combined."""
    if args.labelled is None and args.pairs is None:
        problem = "has nothing to score"
        raise ConfigError("score", problem, "add --labelled FILE, --pairs FILE or both")
    if args.against == args.model:
        raise ConfigError("--against", "is the model itself", "pass the directory of another model")
    for name, least in _LEAST.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < least:
            remedy = "use --no-fine-tune for none" if name == "epochs" else f"raise {option}"
            raise ConfigError(option, f"must be at least {least}, not {value}", remedy)
    rate = args.learning_rate
    if rate is not None and not 0 < rate < 1:
        raise ConfigError("--learning-rate", f"must be between 0 and 1, not {rate}", "use 1e-4")


def _score(args: argparse.Namespace) -> dict[str, Any]:
    """Read the files, load the models, and return the scores as values for JSON."""
    from bert_tools.score.data import read_labelled, read_pairs
    from bert_tools.score.report import SCHEMA_VERSION

    labelled = read_labelled(args.labelled) if args.labelled else None
    pairs = read_pairs(args.pairs) if args.pairs else None
    from bert_tools.score.classify import Settings
    from bert_tools.score.similarity import score_pairs

    epochs = 0 if args.no_fine_tune else args.epochs
    settings = Settings(seeds=args.seeds, epochs=epochs, learning_rate=args.learning_rate)
    with ProgressLines().never_silent() as lines:
        lines.counted("loading the models", "models", 0, 1)
        encoders = _load(args)
        models = [
            {**each.facts(), "peak_learning_rate": settings.rate_for(each)} for each in encoders
        ]
        result: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": models[0],
            "against": models[1] if len(models) > 1 else None,
            "settings": asdict(settings),
            "files": {
                name: {"path": str(path), "sha256": file_digest(path, "pass a file")}
                for name in ("labelled", "pairs")
                if (path := getattr(args, name)) is not None
            },
        }
        if labelled is not None:
            result["labelled"] = _labelled(encoders, labelled, settings, lines)
        if pairs is not None:
            advance = lines.counter("embedding pairs", "texts", 2 * len(encoders) * len(pairs[0]))
            found = score_pairs(encoders, *pairs, advance)
            result["pairs"] = {"examples": len(pairs[0]), **found}
    return result


def _load(args: argparse.Namespace) -> "list[Encoder]":
    from bert_tools.score.encoder import load, names_of
    from mlperf_bert.distributed.launch import RankInfo, choose_device, set_cpu_threads

    single = RankInfo(0, 1, 0, 1, 0, "single")
    device = choose_device("auto", single, "allow")
    set_cpu_threads(single)
    paths = [path for path in (args.model, args.against) if path is not None]
    pairs = zip(paths, names_of(paths), strict=True)
    return [load(path, name, device, args.max_length) for path, name in pairs]


def _labelled(
    encoders: "list[Encoder]", labelled: "Texts", settings: Any, lines: ProgressLines
) -> dict[str, Any]:
    """Score the labelled texts with all seeds, and return the summary."""
    from bert_tools.score.classify import TEST_RATIO, examples_fitted, score_all, split
    from bert_tools.score.report import summarize

    columns = 1 if labelled.seconds is None else 2
    embedded = lines.counter("embedding", "texts", columns * len(encoders) * len(labelled))
    total = examples_fitted(labelled, settings, len(encoders))
    fitted = lines.counter("fitting", "examples", total)
    scores = score_all(encoders, labelled, settings, embedded, fitted)
    train_rows, test_rows = split(labelled, 1)
    summary = summarize(scores, [each.name for each in encoders], TEST_RATIO, len(test_rows))
    counts = {"train": len(train_rows), "test": len(test_rows)}
    return {**counts, "classes": len(set(labelled.values)), **summary}

"""`squad evaluate`: a fine-tuned model's answers to questions, and their scores."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_tools.squad.options import DEVICES
from bert_tools.squad.score_cli import add_dev, line
from mlperf_bert.common.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from bert_tools.squad.evaluate import TokenScores
    from bert_tools.squad.weights import Start
    from bert_tools.squad.windows import Windows
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

_MAX_LENGTH, _STRIDE, _MAX_QUESTION, _MAX_ANSWER = 384, 128, 64, 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `squad evaluate`."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="`model` in a run's directory, or a BertForQuestionAnswering in safetensors",
    )
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="default: beside the model")
    add_dev(parser)
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="write the answers there, as JSON"
    )
    for name, default, text in (
        ("max-length", None, f"tokens of a window (default {_MAX_LENGTH}, or what it can read)"),
        ("stride", None, f"tokens by which a window moves on (default {_STRIDE}, at most a third)"),
        ("max-question-length", _MAX_QUESTION, f"tokens ({_MAX_QUESTION})"),
        ("max-answer-length", _MAX_ANSWER, f"tokens ({_MAX_ANSWER})"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.0,
        metavar="X",
        help="no answer where it scores more than X above the best one (default 0); "
        "sets of v1.1 take none: each of their questions has an answer",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Answer, score, print. Raises UserError for what the user can mend."""
    from bert_tools.squad.questions import read_questions
    from bert_tools.squad.saved_model import read_model
    from mlperf_bert.distributed.session import in_session

    if args.max_answer_length < 1:
        remedy = "give 1 or more"
        raise ConfigError("--max-answer-length", f"is {args.max_answer_length}", remedy)
    if not math.isfinite(args.threshold):
        raise ConfigError("--threshold", f"is {args.threshold}", "give a finite number, such as 0")
    questions = read_questions(args.dev)
    start, vocabulary = read_model(args.model, args.vocab)
    windows = _windows(args, questions, vocabulary, start.model.max_position_embeddings)

    def run_rank(_info: "RankInfo", device: "torch.device") -> int:
        scores = _scores(start, windows, device)
        _check_finite(args.model, scores)
        result = _evaluate(args, questions, windows, scores)
        result = {"schema_version": 1, "dev_sha256": questions.sha256, **result}
        print(json.dumps(result, allow_nan=False) if args.json else in_words(result), flush=True)
        return 0

    device: Literal["auto", "cpu", "cuda"] = args.device
    return in_session(run_rank, device, "refuse", binding="none")


def _windows(
    args: argparse.Namespace, questions: Any, vocabulary: "AnyVocabulary", most: int
) -> "Windows":
    from bert_tools.squad.windows import make_windows
    from mlperf_bert.common.errors import say

    length = min(_MAX_LENGTH, most) if args.max_length is None else args.max_length
    if not 0 < length <= most:
        raise ConfigError("--max-length", f"is {length}", f"give 1 .. {most}, as the model has")
    stride = min(_STRIDE, max(1, length // 3)) if args.stride is None else args.stride
    windows = make_windows(
        questions,
        vocabulary,
        max_length=length,
        stride=stride,
        max_question_length=args.max_question_length,
    )
    for remark in windows.remarks():
        say(remark)
    return windows


def _scores(start: "Start", windows: "Windows", device: "torch.device") -> "TokenScores":
    from bert_tools.squad.engines.contract import Team
    from bert_tools.squad.engines.replicated import Replicated
    from bert_tools.squad.evaluate import score_windows
    from bert_tools.squad.model import make_part, whole

    part = make_part(start.model, whole(start.model), start.weights, device, "fp32", 0)
    team = Team()
    return score_windows(Replicated("single", part, team), team, windows, device)


def _check_finite(folder: Path, scores: "TokenScores") -> None:
    """NaN answers nothing, which would look like a score."""
    import numpy as np

    if not (np.isfinite(scores.starts).all() and np.isfinite(scores.ends).all()):
        problem = "gives scores that are no finite numbers"
        raise CheckpointError(str(folder), problem, "give a model whose training did not diverge")


def _evaluate(
    args: argparse.Namespace, questions: Any, windows: "Windows", scores: "TokenScores"
) -> dict[str, Any]:
    from bert_tools.squad.answers import find_answers
    from bert_tools.squad.evaluate import mean_loss
    from bert_tools.squad.predictions import write_predictions
    from bert_tools.squad.scores import evaluate, texts

    found = find_answers(
        questions, windows, scores.starts, scores.ends, max_answer_length=args.max_answer_length
    )
    if args.predictions is not None:
        write_predictions(args.predictions, texts(questions, found, args.threshold))
    return {
        "validation_loss": mean_loss(scores, windows),
        **evaluate(questions, found, args.threshold),
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    counts = result["answerable"]["questions"] + result["unanswerable"]["questions"]
    everything = {"questions": counts, **{key: result[key] for key in ("exact_match", "f1")}}
    return "\n".join(
        (
            line("all", everything),
            line("with", result["answerable"]),
            line("without", result["unanswerable"]),
            f"validation loss {result['validation_loss']:.4f}; with the best threshold, chosen on "
            f"these questions, F1 {result['best_f1']:.2f} % at {result['best_f1_threshold']:.3g}",
        )
    )

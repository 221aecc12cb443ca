"""How good a model answers: scores of every token by the engine that trained, loss and answers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert_tools.squad.answers import find_answers
from bert_tools.squad.batches import WindowReader, evaluation_batches
from bert_tools.squad.engines import Engine
from bert_tools.squad.questions import Questions
from bert_tools.squad.scores import evaluate, texts
from bert_tools.squad.windows import Windows

Scores = NDArray[np.floating[Any]]  # [T, 2]: of being an answer's first and last token
TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16_384  # of a batch


def score_windows(engine: Engine, windows: Windows) -> Scores:
    """Float32 on every rank; called by all of them. Data-parallel ranks share the windows.

    A pipeline has them go through its stages one batch after the other.
    """
    device = engine.parts[0].device
    at_once = TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_GPU
    batches = evaluation_batches(windows.lengths, at_once)
    reader = WindowReader(windows)
    found = np.zeros((len(windows.input_ids), 2), dtype=np.float32)
    for part in engine.parts:
        part.eval()
    for which, scores in engine.scores(batches, lambda each: reader.batch(each).to(device)):
        found[reader.places(batches[which])] = scores.float().cpu().numpy()
    for part in engine.parts:
        part.train()
    # Zero but on one rank: their sum is exact.
    return engine.team.sum(torch.from_numpy(found).to(device)).cpu().numpy()


def mean_loss(scores: Scores, windows: Windows) -> float:
    """Of the windows: mean of (cross-entropy of the start + of the end) / 2, in nats.

    Not finite where a score is not.
    """
    first = windows.offsets[:-1]
    total = 0.0
    for values, answers in zip(scores.T, (windows.starts, windows.ends), strict=True):
        precise = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            logs = np.logaddexp.reduceat(precise, first)
            total += float((logs - precise[first + answers]).sum())
    return total / (2 * len(windows))


def answer(
    questions: Questions,
    windows: Windows,
    scores: Scores,
    max_answer_length: int,
    threshold: float = 0.0,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Each question's answer in text by its id, and what a record says of all answers."""
    found = find_answers(questions, windows, scores, max_answer_length)
    values = {"validation_loss": mean_loss(scores, windows)}
    return texts(questions, found, threshold), values | evaluate(questions, found, threshold)

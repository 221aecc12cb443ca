"""Scores of every token of a question set, by the engine that trained; and the loss they have."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert_tools.squad.engines.contract import Engine, Team
from bert_tools.squad.microbatches import evaluation_batches
from bert_tools.squad.spans import SpanWindows, WindowReader

FloatArray = NDArray[np.floating[Any]]
TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16_384  # of a batch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of every token of all windows, float32 [T], of being an answer's first and last."""

    starts: FloatArray
    ends: FloatArray


def score_windows(
    engine: Engine, team: Team, windows: SpanWindows, device: torch.device
) -> TokenScores:
    """Scores on every rank; called by all of them. Data-parallel ranks share the windows.

    A pipeline has them go through its stages one batch after the other.
    """
    at_once = TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_GPU
    batches = evaluation_batches(windows.lengths, at_once)
    reader = WindowReader(windows)
    found = np.zeros((int(windows.lengths.sum()), 2), dtype=np.float32)
    for part in engine.parts:
        part.eval()
    for which, scores in engine.scores(batches, lambda each: reader.batch(each).to(device)):
        found[reader.places(batches[which])] = scores.float().cpu().numpy()
    for part in engine.parts:
        part.train()
    # Zero but on one rank: their sum is exact.
    together = team.sum(torch.from_numpy(found).to(device)).cpu().numpy()
    return TokenScores(together[:, 0], together[:, 1])


def mean_loss(scores: TokenScores, windows: SpanWindows) -> float:
    """Of the windows: mean of (cross-entropy of the start + of the end) / 2, in nats.

    Not finite where a score is not.
    """
    first = np.cumsum(windows.lengths) - windows.lengths
    total = 0.0
    for values, answers in ((scores.starts, windows.starts), (scores.ends, windows.ends)):
        precise = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            logs = np.logaddexp.reduceat(precise, first)
            total += float((logs - precise[first + answers]).sum())
    return total / (2 * len(windows.lengths))

"""Compares the cosine similarity of pairs of texts with the numbers that people gave them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import paired_cosine_distances

from bert_tools.score.data import Texts
from bert_tools.score.encoder import Encoder
from bert_tools.score.report import TFIDF_COSINE
from mlperf_bert.seeds import derive_seed

DRAWS = 1000
_Numbers = npt.NDArray[np.float64]


def score_pairs(
    encoders: Sequence[Encoder],
    texts: Texts,
    numbers: Sequence[float],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return Spearman's correlation of each encoder, and of tf-idf, with bootstrap intervals.

    All of them use the same draws of pairs. A difference is that of the first encoder from another
    one.
    """
    assert texts.seconds is not None
    words = TfidfVectorizer(sublinear_tf=True).fit([*texts.firsts, *texts.seconds])
    ways: dict[str, Callable[[list[str]], Any]] = {
        each.name: partial(each.embed, advance=advance) for each in encoders
    }
    ways[TFIDF_COSINE] = words.transform
    cosines = {  # rounded, so that equal cosines stay ties
        name: np.round(1 - paired_cosine_distances(embed(texts.firsts), embed(texts.seconds)), 6)
        for name, embed in ways.items()
    }
    wanted = np.array(numbers)
    rng = np.random.default_rng(derive_seed(1, "bootstrap"))
    draws = rng.integers(len(wanted), size=(DRAWS, len(wanted)))
    found = {name: spearman(values, wanted) for name, values in cosines.items()}
    drawn = {
        name: np.array([spearman(values[rows], wanted[rows]) for rows in draws])
        for name, values in cosines.items()
    }
    model = encoders[0].name
    return {
        "correlations": [
            {"method": name, "spearman": found[name], **interval(drawn[name])} for name in cosines
        ],
        "differences": [
            {
                "method": model,
                "compared_with": name,
                "spearman": found[model] - found[name],
                **interval(drawn[model] - drawn[name]),
            }
            for name in cosines
            if name != model
        ],
    }


def spearman(values: _Numbers, wanted: _Numbers) -> float:
    """Return Spearman's rank correlation, or 0 if all values or all wanted numbers are equal."""
    ranks = [rankdata(each) - (len(each) + 1) / 2 for each in (values, wanted)]
    scale = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else 0.0


def interval(drawn: _Numbers) -> dict[str, float]:
    """Return the bounds of the 95% bootstrap interval."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}

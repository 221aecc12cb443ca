"""Compares the cosine similarity of pairs of texts with the numbers that people gave them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from scipy.stats import rankdata
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from bert_tools.score.data import Texts
from bert_tools.score.encoder import Encoder
from bert_tools.score.report import TFIDF_COSINE
from mlperf_bert.seeds import derive_seed

DRAWS = 1000
TOKEN = r"(?u)\b\w+\b|[^\w\s]"  # a word, or a sign such as an emoji, so that no text is empty
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
    columns = texts.firsts, texts.seconds
    cosines = {
        each.name: cosine(*(each.embed(column, advance) for column in columns)) for each in encoders
    }
    cosines[TFIDF_COSINE] = tfidf_cosine(*columns)
    cosines = {name: values.round(6) for name, values in cosines.items()}  # equal ones stay ties
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


def cosine(first: Any, second: Any) -> _Numbers:
    """Return the cosine of each pair of rows, dense or sparse [N, H]. It is 0 if a row is 0."""
    first, second = normalize(first), normalize(second)
    products = first.multiply(second) if scipy.sparse.issparse(first) else first * second
    return np.asarray(products.sum(1), dtype=np.float64).ravel()


def tfidf_cosine(firsts: Sequence[str], seconds: Sequence[str]) -> _Numbers:
    """Return the cosine of the tf-idf weights of each pair of texts."""
    words = TfidfVectorizer(sublinear_tf=True, token_pattern=TOKEN).fit([*firsts, *seconds])
    return cosine(words.transform(firsts), words.transform(seconds))


def spearman(values: _Numbers, wanted: _Numbers) -> float:
    """Return Spearman's rank correlation, or 0 if all values or all wanted numbers are equal."""
    ranks = [rankdata(each) - (len(each) + 1) / 2 for each in (values, wanted)]
    scale = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / scale if scale else 0.0


def interval(drawn: _Numbers) -> dict[str, float]:
    """Return the bounds of the 95% bootstrap interval."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}

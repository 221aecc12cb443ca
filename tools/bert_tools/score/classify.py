"""Scores ways of classifying texts over several seeds: probe, fine-tuning and plain baselines.

A seed determines the split into training and test examples, the folds of the cross-validation, the
head's initial weights, dropout and the order of the examples. All ways use the same split, so that
their scores can be compared seed by seed.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import sklearn.exceptions
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from bert_tools.score.data import Texts
from bert_tools.score.encoder import Encoder, pooled, quiet_transformers
from bert_tools.score.report import BAG_OF_WORDS, FINE_TUNED, MOST_FREQUENT, PROBE, Score
from bert_tools.score.similarity import TOKEN, cosine, tfidf_cosine
from mlperf_bert.errors import ConfigError
from mlperf_bert.seeds import derive_seed

TEST_SHARE = 0.25
TEST_RATIO = TEST_SHARE / (1 - TEST_SHARE)  # of test examples to training examples
BATCH = 16
MIN_UPDATES, _EPOCHS = 200, 4
STRENGTHS = [float(10**power) for power in range(-3, 3)]  # inverse of the regularization
_FOLDS = 5
_COSINE_WEIGHT = 5.0  # so that the regularization does not suppress one column among thousands
_BASE_RATE, _BASE_SIZE = 5e-5, 768  # usual for BERT-base
_WARM_UP, _WEIGHT_DECAY, _MAX_NORM, _DROPOUT = 0.1, 0.01, 1.0, 0.1

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a comparison.

    `epochs` is 0 if nothing is fine-tuned, and None for a number that fits the number of training
    examples. `learning_rate` is None for a rate that fits the size of each model.
    """

    seeds: int
    epochs: int | None
    learning_rate: float | None

    def epochs_for(self, num_train: int) -> int:
        """Return the passes over the training examples, by default 4, or more for a small set.

        A few dozen updates are too few for any encoder (arXiv 2006.04884), so there are at least
        MIN_UPDATES.
        """
        if self.epochs is not None:
            return self.epochs
        return max(_EPOCHS, math.ceil(MIN_UPDATES / math.ceil(num_train / BATCH)))

    def rate_for(self, encoder: Encoder) -> float:
        """Return the peak learning rate of an encoder.

        By default it is 5e-5 for BERT-base, and grows as a model gets narrower, because the best
        rate of Adam falls with the width (arXiv 2203.03466).
        """
        return self.learning_rate or _BASE_RATE * _BASE_SIZE / encoder.hidden_size


def split(texts: Texts, seed: int) -> tuple[Rows, Rows]:
    """Return the training rows and the test rows of a seed. All classes occur in both."""
    train, test = train_test_split(
        np.arange(len(texts)),
        test_size=TEST_SHARE,
        stratify=texts.values,
        random_state=derive_seed(seed, "split") % 2**32,
    )
    return train, test


def pair_features(first: Any, second: Any, cosines: npt.NDArray[Any]) -> Any:
    """Return u, v, |u - v|, u * v and the cosine as columns, for dense or sparse vectors [N, H].

    The two texts are embedded separately, because frozen features of a joint sequence contain what
    the texts have in common only if the model was trained on pairs (arXiv 1705.02364). Without the
    cosine, a bag of words would learn nothing about words that are rare in the training rows.
    """
    cosines = cosines[:, None]
    columns = [first, second, abs(first - second)]
    if scipy.sparse.issparse(first):
        columns += [first.multiply(second), scipy.sparse.csr_matrix(_COSINE_WEIGHT * cosines)]
        return scipy.sparse.hstack(columns).tocsr()
    return np.hstack([*columns, first * second, cosines])


def features_of(encoder: Encoder, texts: Texts, advance: Callable[[int], None]) -> Any:
    """Return the frozen features of all examples, [N, H] or [N, 4 H + 1] for pairs."""
    first = encoder.embed(texts.firsts, advance)
    if texts.seconds is None:
        return first
    second = encoder.embed(texts.seconds, advance)
    return pair_features(first, second, cosine(first, second))


def bag_of_words(texts: Texts, train: Rows) -> Any:
    """Return tf-idf features of words and word pairs, whose weights come from training rows."""
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=TOKEN)
    seconds = texts.seconds or []
    words.fit([column[row] for column in (texts.firsts, seconds) if column for row in train])
    first = words.transform(texts.firsts)
    if not seconds:
        return first
    cosines = tfidf_cosine(texts.firsts, seconds)  # also of words that no training row has
    return pair_features(first, words.transform(seconds), cosines)


def probe(features: Any, labels: npt.NDArray[Any], train: Rows, test: Rows, seed: int) -> Any:
    """Return the classes that a logistic regression on frozen features predicts for test rows.

    Cross-validation on the training rows chooses the regularization.
    """
    folds = min(_FOLDS, int(np.unique(labels[train], return_counts=True)[1].min()))
    state = derive_seed(seed, "folds") % 2**32
    is_sparse = scipy.sparse.issparse(features)
    scaler = StandardScaler(with_mean=not is_sparse, with_std=not is_sparse)
    model = make_pipeline(scaler, LogisticRegression(max_iter=1000))
    cv = StratifiedKFold(folds, shuffle=True, random_state=state)
    search = GridSearchCV(model, {"logisticregression__C": STRENGTHS}, cv=cv, error_score="raise")
    with warnings.catch_warnings():
        # With weak regularization, the solver may stop before it has converged. Such a model is
        # only used if it is the best one in the cross-validation.
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        search.fit(features[train], labels[train])
    return search.predict(features[test])


def fine_tune(
    encoder: Encoder,
    texts: Texts,
    rows: tuple[Rows, Rows],
    seed: int,
    settings: Settings,
    advance: Callable[[int], None],
) -> Any:
    """Train a copy of the encoder and a linear head, and return the classes of the test rows.

    The head reads the mean-pooled output. A pair of texts is one sequence. `advance` is told the
    examples of each batch, also of the test.
    """
    train, test = rows
    classes, ids = np.unique(np.array(texts.values), return_inverse=True)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "fine-tune"))
        model = deepcopy(encoder.model).train()
        layers = (nn.Dropout(_DROPOUT), nn.Linear(encoder.hidden_size, len(classes)))
        head = nn.Sequential(*layers).to(model.device)
        weights = [*model.parameters(), *head.parameters()]
        rate = settings.rate_for(encoder)
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=_WEIGHT_DECAY)
        epochs = settings.epochs_for(len(train))
        steps = epochs * math.ceil(len(train) / BATCH)
        schedule = quiet_transformers().get_linear_schedule_with_warmup(
            optimizer, round(_WARM_UP * steps), steps
        )
        order = np.random.default_rng(derive_seed(seed, "order"))

        def compute(batch: Rows) -> torch.Tensor:
            seconds = texts.seconds and [texts.seconds[row] for row in batch]
            inputs = encoder.tokens([texts.firsts[row] for row in batch], seconds)
            logits: torch.Tensor = head(pooled(model, inputs))
            if not logits.isfinite().all():
                problem = f"is {rate:g}, but the training diverged, because outputs are not finite"
                raise ConfigError("--learning-rate", problem, "lower --learning-rate")
            return logits

        for _ in range(epochs):
            for batch in _batches(order.permutation(train)):
                targets = torch.from_numpy(ids[batch]).to(model.device)
                loss = nn.functional.cross_entropy(compute(batch), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(weights, _MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                advance(len(batch))
        model.eval(), head.eval()
        found = []
        for batch in _batches(test):
            with torch.inference_mode():
                found.append(compute(batch).argmax(-1).cpu().numpy())
            advance(len(batch))
    return classes[np.concatenate(found)]


def _batches(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


def score_all(
    encoders: Sequence[Encoder],
    texts: Texts,
    settings: Settings,
    embedded: Callable[[int], None],
    fitted: Callable[[int], None],
) -> list[Score]:
    """Score every way with every seed, and return the scores in the order of the seeds.

    `embedded` is told the number of texts that were embedded, and `fitted` the number of examples
    that a classifier was fitted to or tested on.
    """
    labels = np.array(texts.values)
    features = {each.name: features_of(each, texts, embedded) for each in encoders}
    scores = []
    for seed in range(1, settings.seeds + 1):
        train, test = split(texts, seed)
        found: list[tuple[str, str | None, Any]] = []
        for encoder in encoders:
            fitted(0)
            if settings.epochs != 0:
                classes = fine_tune(encoder, texts, (train, test), seed, settings, fitted)
                found.append((FINE_TUNED, encoder.name, classes))
            classes = probe(features[encoder.name], labels, train, test, seed)
            found.append((PROBE, encoder.name, classes))
            fitted(len(train))
        classes = probe(bag_of_words(texts, train), labels, train, test, seed)
        found.append((BAG_OF_WORDS, None, classes))
        fitted(len(train))
        names, counts = np.unique(labels[train], return_counts=True)
        found.append((MOST_FREQUENT, None, np.full(len(test), names[counts.argmax()])))
        for way, model, classes in found:
            accuracy = float(accuracy_score(labels[test], classes))
            f1 = float(f1_score(labels[test], classes, average="macro", zero_division=0))
            scores.append(Score(way, model, seed, accuracy, f1))
    return scores


def examples_fitted(texts: Texts, settings: Settings, encoders: int) -> int:
    """Return the number of examples that `score_all` passes to `fitted` in all."""
    train, test = map(len, split(texts, 1))
    total = (encoders + 1) * train
    if settings.epochs != 0:
        total += encoders * (settings.epochs_for(train) * train + test)
    return settings.seeds * total

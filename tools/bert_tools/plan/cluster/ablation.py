"""What every technique buys: the same step with one technique exchanged for another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bert_tools.plan.cluster.constants import Constants
from bert_tools.plan.cluster.question import Answer, Question, answer
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.common.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationRow:
    """One technique's setting, all else as asked; `difference_ms` is to the step as asked.

    `reason` says why there is no step: the setting cannot serve this batch.
    """

    technique: str
    setting: str
    is_as_asked: bool
    step_ms: float | None
    difference_ms: float | None
    exposed_ms: float | None
    imbalance_tokens: float | None
    reason: str | None


def ablation(asked: Answer, index: SampleIndex, constants: Constants) -> list[AblationRow]:
    """A row for every setting of every technique."""
    rows = []
    for technique, setting, question in variants(asked.question):
        is_as_asked = question == asked.question
        try:
            other = asked if is_as_asked else answer(question, index, constants)
        except ConfigError as error:
            rows.append(_row(technique, setting, is_as_asked, asked, None, str(error)))
            continue
        rows.append(_row(technique, setting, is_as_asked, asked, other, None))
    return rows


def variants(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Technique, setting in words, and the question with it."""
    strata = question.sampler if question.sampler.startswith("strata") else "strata"
    yield "lengths", "random", replace(question, sampler="uniform", balance="none")
    yield "lengths", strata, replace(question, sampler=strata, balance="none")
    yield (
        "lengths",
        f"{strata} + presort_local",
        replace(question, sampler=strata, balance="presort_local"),
    )
    yield (
        "lengths",
        "presort_global",
        replace(question, sampler="uniform", balance="presort_global"),
    )
    yield (
        "lengths",
        "quantile + presort_global",
        replace(question, sampler="quantile", balance="presort_global"),
    )
    yield "clip", "whole", replace(question, clip="whole_before_allreduce")
    yield "clip", "bucket", replace(question, clip="bucket_before_allreduce")
    yield "clip", "after", replace(question, clip="after_allreduce")
    captured = question.software.capture
    yield "capture", "off", question if captured == "off" else replace(question, capture="off")
    yield "capture", "on", question if captured == "on" else replace(question, capture="on")
    sharding = question.software.sharding
    for each in ("none", "node", "world"):
        asked = each == sharding
        yield "optimizer shards", each, question if asked else replace(question, sharding=each)


def _row(
    technique: str,
    setting: str,
    is_as_asked: bool,
    asked: Answer,
    other: Answer | None,
    reason: str | None,
) -> AblationRow:
    return AblationRow(
        technique=technique,
        setting=setting,
        is_as_asked=is_as_asked,
        step_ms=None if other is None else other.run.step_ms,
        difference_ms=None if other is None else other.run.step_ms - asked.run.step_ms,
        exposed_ms=None if other is None else other.mean_ms("exposed_ms"),
        imbalance_tokens=None if other is None else other.imbalance_tokens,
        reason=reason,
    )

"""A suggestion as a TOML file and as text."""

import json
import math
import textwrap
from collections.abc import Iterator

from bert_tools.plan.law_text import law_in_words
from bert_tools.plan.suggest import LAW_FILTERS, Suggestion, law_of
from mlperf_bert.cli.explain import in_words as config_in_words

_WIDTH = 100


def to_toml(suggestion: Suggestion) -> str:
    """A file that `mlperf_bert config` accepts: comments that say whence, then what is set."""
    lines = []
    for paragraph in _comments(suggestion):
        lines += textwrap.wrap(
            paragraph, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False
        )
    for name, section in suggestion.sections.items():
        lines += ["", f"[{name}]"]
        # JSON's strings and numbers are TOML's as well.
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def in_words(suggestion: Suggestion) -> str:
    """The config in words, what to expect of it, and what to doubt."""
    expected, samples = suggestion.expected, suggestion.expected.samples
    config, law = suggestion.config, law_of(suggestion.accelerator)
    ranks = config.parallel.world_size
    lines = [
        f"recipe          {suggestion.recipe}: {suggestion.source}",
        config_in_words(config),
        f"samples         {_millions(samples.samples)} expected, {_millions(samples.low)} to "
        f"{_millions(samples.high)} ({samples.source})",
        f"                {expected.steps:,} steps",
        f"time            {_time(expected.time_min)} expected, {_time(expected.time_low)} to "
        f"{_time(expected.time_high)}, at {expected.seq_per_s:,.0f} sequences/s",
    ]
    if law.throughput:
        filters = ", ".join(LAW_FILTERS[suggestion.accelerator])
        lines.append(
            f"                throughput {law_in_words(law.throughput, 'sequences/s')}: "
            f"`plan law` of {filters}"
        )
    for entry in suggestion.published:
        lines.append(
            f"published       {entry.name}: {_time(entry.time_min or math.nan)} on {ranks:,}, "
            f"{_millions(entry.samples or math.nan)}, global batch {entry.global_batch_size or 0:,}"
        )
    lines += [f"warning         {each}" for each in suggestion.warnings]
    return "\n".join(lines)


def _comments(suggestion: Suggestion) -> Iterator[str]:
    config, expected = suggestion.config, suggestion.expected
    parallel = config.parallel
    yield (
        f"Not run. BERT-large on {parallel.world_size:,} {suggestion.accelerator.upper()} "
        f"({parallel.nodes:,} x {parallel.ranks_per_node}), {config.mlperf.division} division, a "
        f"global batch of {parallel.global_batch_size:,}. Made by `mlperf_bert plan suggest`, "
        f"recipe {suggestion.recipe}: {suggestion.source}."
    )
    yield (
        f"Expected: {_millions(expected.samples.samples)} ({expected.steps:,} steps), "
        f"{_time(expected.time_min)} by the throughput of published entries (docs/scaling.md)."
    )
    for warning in suggestion.warnings:
        yield f"Warning: {warning}."


def _millions(samples: float) -> str:
    return f"{samples / 1e6:,.3f} million samples"


def _time(minutes: float) -> str:
    return f"{60 * minutes:.1f} s" if minutes < 2 else f"{minutes:,.1f} min"

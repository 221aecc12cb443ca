"""The parts of a report's page that are words."""

import time
from collections.abc import Iterable, Sequence

from bert_tools.report.environment_reader import device_in_words
from bert_tools.report.facts import RunFacts
from bert_tools.report.markup import Content, Markup, element, joined
from bert_tools.report.measures import TimeSplit, time_split
from bert_tools.report.numbers import seconds
from bert_tools.report.settings import differences, environment_rows, setting_rows
from bert_tools.report.svg import run_class, share_bar
from bert_tools.report.tables import row_table

_STATE_SIGNS = {
    "target reached": ("good", "\N{CHECK MARK}"),
    "target missed": ("bad", "\N{MULTIPLICATION SIGN}"),
    "stopped": ("warn", "\N{BLACK SQUARE}"),
    "no end recorded": ("warn", "\N{HORIZONTAL ELLIPSIS}"),
}
_VERDICT_SIGNS = {
    "on track": ("good", "\N{CHECK MARK}"),
    "behind": ("warn", "!"),
    "off": ("bad", "\N{MULTIPLICATION SIGN}"),
    "cannot be judged": ("plain", "?"),
}
_PARTS = ("init", "steps", "wait", "evaluation", "rest")
_LEFT_OUT = "Start times and drawn seeds are not compared."
_PART_NAMES = ("start-up", "steps", "wait for data", "evaluation", "rest")


def section(title: str, *children: Content, about: str = "") -> Markup:
    """A titled part of the page."""
    words = element("p", about, class_="about") if about else None
    return element("section", element("h2", title), words, *children)


def badge(kind: str, sign: str, words: str) -> Markup:
    """A word whose meaning a sign and a colour repeat."""
    return element("span", element("span", sign, aria_hidden="true"), words, class_=f"badge {kind}")


def header(runs: Sequence[RunFacts]) -> Markup:
    """Each run by its name, how it ended, and what it ran on."""
    return element("div", *(_headline(number, each) for number, each in enumerate(runs)))


def _headline(number: int, facts: RunFacts) -> Markup:
    state = badge(*_STATE_SIGNS[facts.state], _state_in_words(facts))
    kind = facts.diagnosis.verdict.kind
    verdict = badge(*_VERDICT_SIGNS[kind], f"doctor: {kind}")
    origin = (device_in_words(facts.environment), facts.environment.get("utc"))
    return element(
        "div",
        element("span", class_="key"),
        element("span", facts.label, class_="name"),
        state,
        verdict,
        *(element("span", word, class_="quiet") for word in origin if word),
        class_=f"headline {run_class(number)}",
    )


def _state_in_words(facts: RunFacts) -> str:
    words: str = facts.state
    if facts.outcome is not None and facts.outcome.stopped_by:
        words = f"stopped by {facts.outcome.stopped_by}, can be resumed"
    if facts.last_written is not None:
        words = f"no end recorded: under way, or ended by a fault; last written {_utc(facts)}"
    if facts.attempts:
        words += f"; {facts.attempts + 1} attempts"
    if facts.resumes:
        words += f"; resumed at {' and '.join(f'{each:,}' for each in facts.resumes)} samples"
    return words


def _utc(facts: RunFacts) -> str:
    written = time.gmtime(min(max(facts.last_written or 0.0, 0.0), 2.0**32))
    return time.strftime("%Y-%m-%d %H:%M:%SZ", written)


def difference_section(runs: Sequence[RunFacts]) -> Markup | None:
    """What is not the same in all runs; None of a single one."""
    if len(runs) == 1:
        return None
    rows = differences(runs)
    is_all_known = all(each.run.config is not None and each.environment for each in runs)
    known = "" if is_all_known else ", as far as the files of the runs tell them"
    if not rows:
        words = f"No setting and no machine does{known}. {_LEFT_OUT}"
        return section("What differs", element("p", words))
    about = f"All others are equal{known}. {_LEFT_OUT}"
    return section("What differs", row_table(runs, rows), about=about)


def time_section(runs: Sequence[RunFacts]) -> Markup | None:
    """A bar for each run whose log is of all of it: what its time went into."""
    splits = [(number, each, time_split(each)) for number, each in enumerate(runs)]
    known = [(number, each, split) for number, each, split in splits if split is not None]
    if not known:
        return None
    legend = (
        element("li", element("span", class_=f"key part {part}"), element("span", name))
        for part, name in zip(_PARTS, _PART_NAMES, strict=True)
    )
    bars = [_time_bar(number, each, split) for number, each, split in known]
    return section(
        "Where the time went",
        element("ul", *legend, class_="legend"),
        *bars,
        about="From the beginning of start-up to the end, by the log and by the time of the steps; "
        "the rest is checkpoints, metrics and the like.",
    )


def _time_bar(number: int, facts: RunFacts, split: TimeSplit) -> Markup:
    parts = [(part, float(getattr(split, part))) for part in _PARTS]
    said = ", ".join(
        f"{name} {seconds(value)} ({100 * value / split.total:.1f} %)"
        for name, (_, value) in zip(_PART_NAMES, parts, strict=True)
        if value > 0
    )
    return element(
        "div",
        element("span", class_="key"),
        element("span", facts.label, class_="name"),
        element("b", seconds(split.total)),
        share_bar([(f"part {part}", value / split.total) for part, value in parts], said),
        element("p", said, class_="about"),
        class_=f"timebar {run_class(number)}",
    )


def verdict_section(runs: Sequence[RunFacts]) -> Markup:
    """The doctor's verdict on each run, its causes, and what made it slow."""
    return section(
        "The doctor's verdict",
        *(_verdict(number, each) for number, each in enumerate(runs)),
        about="Whether the accuracy is where published runs had it, as report --doctor says.",
    )


def _verdict(number: int, facts: RunFacts) -> Markup:
    diagnosis = facts.diagnosis
    kind = diagnosis.verdict.kind
    causes = [
        element(
            "li",
            element("b", cause.cause),
            element("div", f"seen: {cause.evidence}"),
            element("div", f"do: {cause.remedy}"),
        )
        for cause in (*diagnosis.causes, *diagnosis.slowness)
    ]
    return element(
        "div",
        element("span", class_="key"),
        element("span", facts.label, class_="name"),
        badge(*_VERDICT_SIGNS[kind], kind),
        element("p", diagnosis.verdict.why),
        element("ol", *causes) if causes else None,
        class_=f"verdict {run_class(number)}",
    )


def surroundings_sections(runs: Sequence[RunFacts]) -> Iterable[Markup]:
    """Hardware and commit; and all settings, folded."""
    environment = environment_rows(runs)
    if environment:
        yield section("Hardware, software, commit", row_table(runs, environment))
    settings = setting_rows(runs)
    if settings:
        title = f"All {len(settings)} settings"
        yield element("details", element("summary", title), row_table(runs, settings))
    for facts in runs:
        if facts.last_lines:
            lines = joined(*(element("div", line) for line in facts.last_lines))
            title = element("summary", f"Last lines of {facts.label}'s stdout.log")
            yield element("details", title, element("div", lines, class_="lines"))


def absent_section(runs: Sequence[RunFacts], quiet: Sequence[str]) -> Markup | None:
    """What is not there, and what is not drawn because it never changes."""
    words = [
        f"{facts.label}: {each}" if len(runs) > 1 else each
        for facts in runs
        for each in facts.absent
    ]
    words += [f"not drawn, {each}" for each in quiet]
    no_number = [_no_number(facts) for facts in runs]
    words += [each for each in no_number if each]
    if not words:
        return None
    return section("Not shown", element("ul", *(element("li", each) for each in words)))


def _no_number(facts: RunFacts) -> str:
    missing = [record["step"] for record in facts.run.records if record["loss"] is None]
    if not missing:
        return ""
    of = f"{len(missing):,} of {len(facts.run.records):,} records"
    return f"{facts.label}: the loss is no number in {of}, first at step {missing[0]:,}"

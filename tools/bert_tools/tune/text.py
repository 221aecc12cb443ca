"""A study in words: the table for the terminal and for table.md."""

from collections.abc import Sequence
from statistics import mean, stdev

from bert_tools.tune.objective import Objective
from bert_tools.tune.standing import DEFAULT
from bert_tools.tune.summary import ENDINGS, ArmSummary, Spread, Summary, unit_of

_NOUNS: dict[Objective, str] = {"samples": "samples", "time": "seconds"}


def table(summary: Summary) -> str:
    """Markdown that reads well as plain text: trials by arm, then fresh seeds."""
    settings = summary.settings
    target = settings.config.eval.target_accuracy
    lines = [
        f"Target accuracy {target:g}, at most {settings.most_samples:,} samples a training, "
        f"evaluated every {settings.config.eval_interval_samples:,}; "
        f"trials with seed {settings.seed}, pruning: {settings.prune}.",
        "",
        f"| arm | {' | '.join(ENDINGS)} | interrupted, repeated | samples trained | best |",
        f"|{'---|' * (len(ENDINGS) + 4)}",
        *(_arm_line(each, summary) for each in summary.arms),
    ]
    for arm in summary.arms:
        if arm.best is not None:
            values = ", ".join(f"{key} = {value}" for key, value in arm.best.settings.items())
            lines += ["", f"Best of {arm.name}, trial {arm.best.number}: {values}."]
    return "\n".join([*lines, *_spread_lines(summary)]) + "\n"


def verdict(summary: Summary, arm: str | None) -> str:
    """One line: what an arm's best gained over the config as it was given; None without a best."""
    if arm is None:
        return "no trial reached the target: widen the space, or raise --samples"
    subject = f"best {arm}"
    spread = next((each for each in summary.spreads if each.subject == subject), None)
    if spread is None or spread.gain is None:
        return f"{subject} is not compared with the default: no fresh seeds, or not the same ones"
    seeds = f"{len(spread.seeds)} fresh seeds" if len(spread.seeds) > 1 else "one fresh seed"
    bound = ""
    if any(each.at_least for each in summary.spreads if each.subject in (DEFAULT, subject)):
        bound = "; a run that missed counts as the whole budget"
    if spread.gain <= 0:
        return f"the default is not worse than {subject}: {_gain(spread)} over {seeds}{bound}"
    what = _NOUNS[summary.settings.objective]
    return f"{subject} needs fewer {what} than the default: {_gain(spread)} over {seeds}{bound}"


def _arm_line(arm: ArmSummary, summary: Summary) -> str:
    best = "none reached the target"
    if arm.best is not None and summary.settings.objective == "samples":
        best = f"{arm.best.samples or 0:,} samples"
    elif arm.best is not None:
        best = f"{arm.best.seconds or 0.0:.1f} s"
    counts = " | ".join(str(arm.counts[ending]) for ending in ENDINGS)
    return f"| {arm.name} | {counts} | {arm.interrupted} | {arm.samples_trained:,} | {best} |"


def _spread_lines(summary: Summary) -> list[str]:
    if not summary.spreads:
        return []
    unit = unit_of(summary.settings.objective)
    seeds = summary.spreads[0].seeds
    lines = [
        "",
        f"On fresh seeds {', '.join(map(str, seeds))}, {unit} to the target:",
        "",
        f"| config | reached | mean {unit} | standard deviation | each | fewer than the default |",
        "|---|---|---|---|---|---|",
    ]
    digits = 0 if summary.settings.objective == "samples" else 1
    for each in summary.spreads:
        mark = "at least " if each.at_least else ""
        numbers = ", ".join(f"{number:,.{digits}f}" for number in each.needed)
        deviation = f"{each.deviation:,.{digits}f}" if len(each.needed) > 1 else "-"
        lines.append(
            f"| {each.subject} | {each.reached} of {len(each.needed)} "
            f"| {mark}{each.mean:,.{digits}f} | {deviation} | {numbers} "
            f"| {_gain(each) if each.gain is not None else '-'} |"
        )
    return [*lines, *_between_lines(summary)]


def _between_lines(summary: Summary) -> list[str]:
    """The same by the line between two evaluations, which are coarse beside such differences."""
    known = [each for each in summary.spreads if each.between]
    if not known:
        return []
    words = [f"{each.subject} {_mean_and_deviation(each.between)}" for each in known]
    default = next((each for each in known if each.subject == DEFAULT), None)
    for number, each in enumerate(known):
        if default and each is not default and each.seeds == default.seeds:
            pairs = zip(default.between, each.between, strict=True)
            gains = [100 * (theirs - own) / mean(default.between) for theirs, own in pairs]
            spread = f", standard deviation {stdev(gains):.1f} %" if len(gains) > 1 else ""
            words[number] += f", {mean(gains):.1f} % fewer than the default{spread}"
    return ["", f"On the straight line between evaluations, samples: {'; '.join(words)}."]


def _mean_and_deviation(numbers: Sequence[float]) -> str:
    deviation = f" (standard deviation {stdev(numbers):,.0f})" if len(numbers) > 1 else ""
    return f"{mean(numbers):,.0f}{deviation}"


def _gain(spread: Spread) -> str:
    """Per cent of the default's mean, with the spread over the seeds where there are several."""
    if len(spread.seeds) == 1:
        return f"{spread.gain:.1f} %"
    return (
        f"{spread.gain:.1f} % (standard deviation {spread.gain_spread:.1f} %, "
        f"{spread.gain_least:.1f} to {spread.gain_most:.1f} %)"
    )

"""Results of a study for people: table and verdict, best configs, pictures, result.json.

Each file is replaced as a whole, so that several processes may write the same files.
"""

import hashlib
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from bert_tools.common.figures import new_figure, png
from bert_tools.tune.objective import Objective
from bert_tools.tune.settings import StudySettings, with_values
from bert_tools.tune.store import TrialRecord
from bert_tools.tune.summary import (
    DEFAULT,
    ENDINGS,
    ArmSummary,
    Spread,
    Summary,
    deviation_of,
    gains_of,
    in_words,
    unit_of,
)
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import DataError, one_line
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.config.files import config_from_tables, config_to_toml

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOUNS: dict[Objective, str] = {"samples": "samples", "time": "seconds"}
_COLOURS = ("#2f6db3", "#d9722e", "#2f7d4f", "#8a63b0", "#b8860b", "#8c564b")
_GREY = "#9a9a9a"
_MARKERS = {"reached": ("o", 6.0), "missed": ("x", 6.0)}  # stopped trainings: a small dot
_DOTS_PER_INCH = 110


def write_results(directory: Path, summary: Summary) -> None:
    """Write all files. Raises DataError if one cannot be written."""
    write_file(directory / "result.json", write_json(summary.as_json()))
    write_file(
        directory / "table.md", f"{table(summary)}\n{verdict(summary, summary.best_arm)}\n".encode()
    )
    for arm in summary.arms:
        if arm.best is None:
            continue
        text = _best_toml(summary, arm, directory)
        if len(summary.arms) > 1:
            write_file(directory / f"best_{arm.name}.toml", text.encode())
        if arm.name == summary.best_arm:
            write_file(directory / "best.toml", text.encode())
    pictures = {"history.png": _draw_history(summary)}
    if any(summary.importance.values()):
        pictures["importance.png"] = _draw_importance(summary)
    for name, figure in pictures.items():
        write_file(directory / name, png(figure, _DOTS_PER_INCH))


def _best_toml(summary: Summary, arm: ArmSummary, directory: Path) -> str:
    """The best trial's complete config, below comments on its origin.

    Seed, length of the run and checkpoints are those of the given config.
    """
    assert arm.best is not None
    settings, best = summary.settings, arm.best
    config = next(each.config for each in settings.arms if each.name == arm.name)
    tuned = config_from_tables(with_values(config, best.settings), "best")
    searched = ", ".join(best.settings) or "nothing"
    lines = [
        f"Found by mlperf_bert tune: trial {best.number} of arm {arm.name}, "
        f"{in_words(best, settings.objective)} to accuracy "
        f"{settings.target:g} with seed {best.seed}.",
        f"Begun from {settings.config_path.name} over {settings.space_name}; sha256 of the "
        f"complete config begins with {_digest_of(settings)}.",
        f"Searched: {searched}. Commit: {_commit_of(best, directory)}.",
    ]
    lines.append(f"{verdict(summary, arm.name)}.")
    comments = "".join(f"# {one_line(line)}\n" for line in lines)
    return f"{comments}\n{config_to_toml(tuned)}"


def _commit_of(trial: TrialRecord, directory: Path) -> str:
    """The commit that the training itself recorded."""
    path = directory / "trials" / trial.directory_name / "run_0" / "environment.json"
    try:
        return read_record(path, missing="is missing", remedy="").text("commit")
    except DataError:
        return "unknown"


def _digest_of(settings: StudySettings) -> str:
    """Digest of the complete config the study began from, with --set, as `config` prints it."""
    return hashlib.sha256(config_to_toml(settings.config).encode()).hexdigest()[:16]


def table(summary: Summary) -> str:
    """The table in Markdown: trials by arm, then fresh seeds."""
    settings = summary.settings
    target = settings.target
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
    """One line on the gain of an arm's best over the given config; None without a best."""
    if arm is None:
        return "no trial reached the target: widen the space, or raise --samples"
    subject = f"best {arm}"
    spread = next((each for each in summary.spreads if each.subject == subject), None)
    if spread is None or not spread.gains:
        return f"{subject} is not compared with the default: no fresh seeds, or not the same ones"
    seeds = f"{len(spread.seeds)} fresh seeds" if len(spread.seeds) > 1 else "one fresh seed"
    bound = ""
    if any(each.at_least for each in summary.spreads if each.subject in (DEFAULT, subject)):
        bound = "; a run that missed counts as the whole budget"
    if mean(spread.gains) <= 0:
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
            f"| {_gain(each) if each.gains else '-'} |"
        )
    return [*lines, *_between_lines(summary)]


def _between_lines(summary: Summary) -> list[str]:
    """The comparison interpolated between evaluations, which are coarse for such differences."""
    known = [each for each in summary.spreads if each.between]
    default = next((each for each in known if each.subject == DEFAULT), None)
    words = []
    for each in known:
        several = len(each.between) > 1
        spread = f" (standard deviation {stdev(each.between):,.0f})" if several else ""
        words.append(f"{each.subject} {mean(each.between):,.0f}{spread}")
        if default and each is not default and each.seeds == default.seeds:
            found = gains_of(default.between, each.between)
            spread = f", standard deviation {stdev(found):.1f} %" if several else ""
            words[-1] += f", {mean(found):.1f} % fewer than the default{spread}"
    if not known:
        return []
    return ["", f"On the straight line between evaluations, samples: {'; '.join(words)}."]


def _gain(spread: Spread) -> str:
    """Gain in per cent of the default's mean, with the spread over several seeds."""
    gain = f"{mean(spread.gains):.1f} %"
    if len(spread.seeds) == 1:
        return gain
    deviation = deviation_of(spread.gains)
    least, most = min(spread.gains), max(spread.gains)
    return f"{gain} (standard deviation {deviation:.1f} %, {least:.1f} to {most:.1f} %)"


def _draw_history(summary: Summary) -> "Figure":
    """Draw samples or seconds to the target by trial, the best so far, and the default's mean."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    unit = unit_of(summary.settings.objective)
    for number, arm in enumerate(summary.arms):
        shift = 0.16 * (number - (len(summary.arms) - 1) / 2)
        _draw_arm(axes, arm, _COLOURS[number % len(_COLOURS)], summary, shift)
    for spread in summary.spreads:
        if spread.subject == DEFAULT:
            label = f"default, mean of {len(spread.seeds)} fresh seeds"
            axes.axhline(spread.mean, color="black", lw=1, ls="--", label=label)
            low, high = spread.mean - spread.deviation, spread.mean + spread.deviation
            axes.axhspan(low, high, color="black", alpha=0.07, lw=0)
    if summary.settings.objective == "samples":
        label = f"budget of a training, {summary.settings.most_samples:,} samples"
        axes.axhline(summary.settings.most_samples, color=_GREY, lw=1, ls=":", label=label)
        axes.set_ylim(0, 1.12 * summary.settings.most_samples)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trials of the arm, in the order they began")
    axes.set_ylabel(f"{unit} to accuracy {summary.settings.target:g}")
    axes.set_title(
        "Every trial: circles reached the target, crosses missed it, small dots were stopped",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw_arm(axes: "Axes", arm: ArmSummary, colour: str, summary: Summary, shift: float) -> None:
    """Draw one arm; `shift` moves it aside, so that equal results of two arms stay visible."""
    ended = [each for each in arm.trials if each.status == "ended" and each.samples]
    by_time = summary.settings.objective == "time"
    best = float("inf")
    steps: list[tuple[float, float]] = []
    for place, trial in enumerate(ended, 1):
        height = trial.seconds or 0.0 if by_time else float(trial.samples or 0)
        marker, size = _MARKERS.get(trial.ended or "", (".", 4.0))
        axes.plot([place + shift], [height], marker, color=colour, ms=size, alpha=0.8)
        if trial.ended == "reached":
            best = min(best, height)
        if best < float("inf"):
            steps.append((place + shift, best))
    label = f"{arm.name}: best so far"
    axes.step([x for x, _ in steps], [y for _, y in steps], where="post", color=colour, label=label)


def _draw_importance(summary: Summary) -> "Figure":
    """Draw each setting's share in telling good trials from others, a panel per arm."""
    known = {name: shares for name, shares in summary.importance.items() if shares}
    rows = [len(shares) for shares in known.values()]
    figure = new_figure(8, 1.4 + 0.32 * sum(rows) + 0.5 * len(known))
    panels = figure.subplots(len(known), 1, squeeze=False, height_ratios=rows)[:, 0]
    numbers = {arm.name: number for number, arm in enumerate(summary.arms)}
    for axes, (name, shares) in zip(panels, known.items(), strict=True):
        counts = summary.arms[numbers[name]].counts
        ordered = sorted(shares.items(), key=lambda item: item[1])
        keys, percents = zip(*((key, 100 * share) for key, share in ordered), strict=True)
        bars = axes.barh(keys, percents, color=_COLOURS[numbers[name] % len(_COLOURS)])
        axes.bar_label(bars, [f" {percent:.0f}%" for percent in percents], fontsize=8)
        axes.set_xlim(0, 1.12 * max(*percents, 1))
        judged = counts["reached"] + counts["missed"]
        axes.set_title(f"{name}, of {judged} trials", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("importance (PED-ANOVA), per cent of all settings of the arm")
    return figure

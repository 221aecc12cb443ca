"""Results of a study: result.json, table.md, best.toml, and the picture history.png."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, get_args

from bert_tools.common.figures import new_figure, png
from bert_tools.tune.objective import Result
from bert_tools.tune.study import (
    DEFAULT,
    How,
    StudySettings,
    best_trial,
    ended_trials,
    ending_of,
    in_words,
    with_values,
)
from mlperf_bert.config.files import config_from_tables, config_to_toml
from mlperf_bert.errors import one_line
from mlperf_bert.files import write_file, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study

SUMMARY_SCHEMA_VERSION = 2
ENDINGS: tuple[How, ...] = get_args(How)
_MARKERS = {"reached": ("o", 6.0), "missed": ("x", 6.0)}  # stopped trainings: a small dot
_COLOUR, _GREY = "#2f6db3", "#9a9a9a"


def summarise(
    study: "Study", settings: StudySettings, fresh: dict[str, list[Result]]
) -> dict[str, Any]:
    """The summary for `--json` and result.json; `fresh` has results by subject.

    A run on a fresh seed that missed the target counts as the whole budget, less than it would have
    needed; `at_least` marks its subject. Gains are per cent of the default's mean.
    """
    ended = ended_trials(study)
    counts = Counter(ending_of(each).how for each in ended)
    best = best_trial(study)
    facts: dict[str, Any] = {
        "schema_version": SUMMARY_SCHEMA_VERSION,
        "objective": settings.objective,
        "unit": "samples" if settings.objective == "samples" else "s",
        "target_accuracy": settings.target,
        "most_samples": settings.most_samples,
        "eval_interval_samples": settings.config.eval_interval_samples,
        "trial_seed": settings.seed,
        "trials": {ending: counts[ending] for ending in ENDINGS},
        "samples_trained": sum(ending_of(each).samples for each in ended),
        "best": None,
        "fresh_seeds": _fresh_seeds(fresh),
    }
    if best is not None:
        ending = ending_of(best)
        facts["best"] = {
            "trial": best.number,
            "settings": best.user_attrs["settings"],
            "samples": ending.samples,
            "seconds": ending.seconds,
        }
    return facts


def write_results(
    directory: Path, study: "Study", settings: StudySettings, facts: dict[str, Any]
) -> None:
    """Write all files. Raises DataError if one cannot be written."""
    write_file(directory / "result.json", write_json(facts))
    write_file(directory / "table.md", f"{table(facts)}\n{verdict(facts)}\n".encode())
    write_file(directory / "history.png", png(_draw(study, settings, facts), 110))
    best = best_trial(study)
    if best is None:
        return
    # Seed, length of the run and checkpoints are those of the given config.
    tuned = config_from_tables(with_values(settings.config, best.user_attrs["settings"]), "best")
    lines = (
        f"Found by mlperf_bert tune: trial {best.number}, {in_words(best, settings.objective)} to "
        f"accuracy {settings.target:g} with seed {settings.seed}.",
        f"Begun from {settings.config_path.name}. Searched: "
        f"{', '.join(best.user_attrs['settings'])}.",
        f"{verdict(facts)}.",
    )
    comments = "".join(f"# {one_line(line)}\n" for line in lines)
    write_file(directory / "best.toml", f"{comments}\n{config_to_toml(tuned)}".encode())


def table(facts: dict[str, Any]) -> str:
    """The table in Markdown: trials by ending, then fresh seeds."""
    best, unit = facts["best"], facts["unit"]
    lines = [
        f"Target accuracy {facts['target_accuracy']:g}, at most {facts['most_samples']:,} samples "
        f"a training, evaluated every {facts['eval_interval_samples']:,}; trials with seed "
        f"{facts['trial_seed']}.",
        "",
        f"| {' | '.join(ENDINGS)} | samples trained |",
        f"|{'---|' * (len(ENDINGS) + 1)}",
        f"| {' | '.join(str(facts['trials'][each]) for each in ENDINGS)} "
        f"| {facts['samples_trained']:,} |",
    ]
    if best is not None:
        values = ", ".join(f"{key} = {value}" for key, value in best["settings"].items())
        needed = f"{best['samples']:,} samples, {best['seconds']:,.1f} s"
        lines += ["", f"Best: trial {best['trial']}, {needed}: {values}."]
    if facts["fresh_seeds"]:
        lines += [
            "",
            f"| on fresh seeds | reached | mean {unit} | standard deviation | each |",
            "|---|---|---|---|---|",
        ]
    digits = 0 if unit == "samples" else 1
    for each in facts["fresh_seeds"]:
        numbers = ", ".join(f"{number:,.{digits}f}" for number in each["needed"])
        mark = "at least " if each["at_least"] else ""
        spread = each["standard_deviation"]
        deviation = "-" if spread is None else f"{spread:,.{digits}f}"
        lines.append(
            f"| {each['subject']} | {each['reached']} of {len(each['needed'])} "
            f"| {mark}{each['mean']:,.{digits}f} | {deviation} | {numbers} |"
        )
    return "\n".join(lines) + "\n"


def verdict(facts: dict[str, Any]) -> str:
    """One line on the gain of the best over the given config."""
    if facts["best"] is None:
        return "no trial reached the target: widen the space, or raise --samples"
    if not facts["fresh_seeds"]:
        return "the best is not compared with the default: no fresh seeds (--repeats)"
    default, best = facts["fresh_seeds"]
    count, spread = len(best["needed"]), best["gain_spread_percent"]
    seeds = f"{count} fresh seeds" if count > 1 else "one fresh seed"
    gain = f"{best['gain_percent']:.1f} %"
    if spread is not None:
        gain += f" (standard deviation {spread:.1f} %)"
    bound = ""
    if default["at_least"] or best["at_least"]:
        bound = "; a run that missed counts as the whole budget"
    if best["gain_percent"] <= 0:
        return f"the default is not worse than the best: {gain} over {seeds}{bound}"
    what = "samples" if facts["unit"] == "samples" else "seconds"
    return f"the best needs fewer {what} than the default: {gain} over {seeds}{bound}"


def _fresh_seeds(fresh: dict[str, list[Result]]) -> list[dict[str, Any]]:
    found = []
    default = [each.needed for each in fresh.get(DEFAULT, ())]
    for subject, results in fresh.items():
        if not results:
            continue
        needed = [each.needed for each in results]
        reached = sum(each.is_reached for each in results)
        pairs = zip(default, needed, strict=True)
        gains = [100 * (theirs - own) / mean(default) for theirs, own in pairs]
        is_default = subject == DEFAULT
        found.append(
            {
                "subject": DEFAULT if is_default else "best",
                "needed": needed,
                "reached": reached,
                "at_least": reached < len(needed),
                "mean": mean(needed),
                "standard_deviation": _deviation(needed),
                "gain_percent": None if is_default else mean(gains),
                "gain_spread_percent": None if is_default else _deviation(gains),
            }
        )
    return found


def _deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of the values; None for one value."""
    return stdev(values) if len(values) > 1 else None


def _draw(study: "Study", settings: StudySettings, facts: dict[str, Any]) -> "Figure":
    """Draw samples or seconds to the target by trial, the best so far, and the default's mean."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    by_time = settings.objective == "time"
    steps: list[tuple[int, float]] = []
    for place, trial in enumerate(ended_trials(study), 1):
        ending = ending_of(trial)
        height = ending.seconds if by_time else float(ending.samples)
        marker, size = _MARKERS.get(ending.how, (".", 4.0))
        axes.plot([place], [height], marker, color=_COLOUR, ms=size, alpha=0.8)
        before = steps[-1][1] if steps else float("inf")
        best = min(before, height) if ending.how == "reached" else before
        if best < float("inf"):
            steps.append((place, best))
    axes.step(*zip(*steps or [(1, float("nan"))], strict=True), where="post", label="best so far")
    for each in facts["fresh_seeds"][:1]:
        label = f"default, mean of {len(each['needed'])} fresh seeds"
        axes.axhline(each["mean"], color="black", lw=1, ls="--", label=label)
    if not by_time:
        label = f"budget of a training, {settings.most_samples:,} samples"
        axes.axhline(settings.most_samples, color=_GREY, lw=1, ls=":", label=label)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trials, in the order they began")
    axes.set_ylabel(f"{facts['unit']} to accuracy {settings.target:g}")
    title = "Every trial: circles reached the target, crosses missed it, dots were stopped"
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure

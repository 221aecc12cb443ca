"""Fine-tune with every engine and every seed, one run after another, and compare the runs.

The records of finished runs are kept, so an interrupted comparison can be resumed. The picture
shows when each rank's pipeline stages compute during one update.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.results import new_figure, png
from bert_tools.doctor.cli import cpu_model
from bert_tools.squad.comparison import (
    RESULT,
    Run,
    check_same,
    compare_runs,
    is_comparable,
    read_run,
)
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.distributed.spawn import run_on_ranks
from mlperf_bert.errors import STOPPED, ConfigError, DataError, say
from mlperf_bert.files import file_digest, write_file, write_json
from mlperf_bert.machine import usable_cpus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUNS, RECORD, PICTURE = "runs", "result.json", "timeline.png"
CONTENTS = f"{RECORD}, {PICTURE} (of pipelines) and {RUNS}/"
_BUBBLE = "#e9e4da"
_KINDS = {
    "F": ("#2f6db3", "forward"),
    "B": ("#d9722e", "backward"),
    "W": ("#2f7d4f", "backward of weights"),
}


def at_batch(settings: SquadSettings, batch: int) -> SquadSettings:
    """Change the global batch of a run, but keep its total number of samples.

    The learning rate is scaled with the square root of the batch, which suits Adam and similar
    optimizers. Raises ConfigError if the batch does not divide the run's number of samples.
    """
    first = settings.global_batch
    updates = settings.updates
    if updates is not None:
        if updates * first % batch:
            problem = f"{batch} does not divide the {updates * first:,} samples of a run"
            remedy = "set --updates so that the number of samples is a multiple of every batch size"
            raise ConfigError("--batches", problem, remedy)
        updates = updates * first // batch
        every = settings.noise_every
        if every and updates < max(2, every):
            problem = (
                f"is {every}, so no update of the {updates} at a batch of {batch} measures noise"
            )
            raise ConfigError("--noise-every", problem, "raise --updates, or lower --noise-every")
    rate = settings.learning_rate * math.sqrt(batch / first)
    return replace(settings, global_batch=batch, updates=updates, learning_rate=rate)


def directory_of(out: Path, settings: SquadSettings) -> Path:
    """Return the directory of one run, inside the directory `out` of the comparison."""
    engine = str(settings.engine).replace(":", "_")
    return out / RUNS / f"{engine}-batch_{settings.global_batch}-seed_{settings.seed}"


def run_all(out: Path, runs: Sequence[SquadSettings]) -> tuple[list[Run], int]:
    """Start every run that is not finished, one after another, and stop after a failed run.

    Returns the records of the finished runs, and 0 or the exit status of the failed run. Raises
    DataError if a record cannot be read, or belongs to other settings or question sets.
    """
    for settings in runs:  # Check all records before the first run, which may take hours.
        if (directory_of(out, settings) / RESULT).exists():
            _check_machine(_read_as_asked(directory_of(out, settings), settings))
    found: list[Run] = []
    for number, settings in enumerate(runs, 1):
        directory = directory_of(out, settings)
        if not (directory / RESULT).exists():
            title = f"{settings.engine}, batch {settings.global_batch}, seed {settings.seed}"
            say(f"run {number} of {len(runs)}: {title}")
            words = ["squad", "train", "--record-only", "--run-dir", str(directory.absolute())]
            status = run_on_ranks(words + settings.as_words(), settings.engine.ranks)
            if status != 0:
                what = "stopped" if status == STOPPED else f"exited with status {status}"
                say(f"{title}: {what}. To continue after the last run, run the same command again")
                return found, status
        found.append(_read_as_asked(directory, settings))
        check_same(found)
    return found, 0


def _read_as_asked(directory: Path, settings: SquadSettings) -> Run:
    """Read the record of a finished run.

    Raises DataError if the run had other settings or question sets than this comparison.
    """
    run = read_run(directory)
    for key, now in settings.to_record().items():
        before = run["settings"].get(key)
        if before != now:
            problem = f"has {key} = {before!r}, but this comparison has {now!r}"
            remedy = "use another --out, or the same options as before"
            raise DataError(str(directory), problem, remedy)
    for key, path in (("train_sha256", settings.train), ("dev_sha256", settings.dev)):
        if run["data"][key] != file_digest(path, "pass a question set"):
            problem = f"used other questions than {path} contains now"
            raise DataError(str(directory), problem, "use another --out, or restore the file")
    return run


def _check_machine(run: Run) -> None:
    """Raise DataError if a run's times are those of another machine, or of other cores."""
    here: Run = {"cores": len(usable_cpus())}
    if run["device"] == "cpu":
        here["processor"] = cpu_model()
    for key, now in here.items():
        if run[key] != now:
            problem = f"ran with {key} = {run[key]!r}, but this process has {now!r}"
            raise DataError(run["engine"], problem, "use another --out, or the machine as before")


def write_comparison(out: Path, runs: Sequence[Run], initial_batch: int) -> dict[str, Any]:
    """Write the record and the picture of a comparison into `out`, and return the record."""
    comparison = compare_runs(runs, initial_batch)
    write_file(out / RECORD, write_json(comparison))
    first_seed = min(run["seed"] for run in runs)
    figure = timeline_figure([run for run in runs if run["seed"] == first_seed])
    if figure is not None:
        write_file(out / PICTURE, png(figure, 110))
    return comparison


def timeline_figure(runs: Sequence[Run]) -> "Figure | None":
    """Draw the timeline of one update for each run, with one line per rank.

    Returns None if no run recorded a timeline.
    """
    shown = [run for run in runs if run["timeline"]]
    if not shown:
        return None
    heights = [0.5 + 0.45 * run["ranks"] for run in shown]
    figure = new_figure(11, 1.2 + sum(heights))
    from matplotlib.patches import Patch

    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, shown, strict=True):
        _draw_timeline(axes, run)
    kinds = {span["kind"] for run in shown for span in run["timeline"]}
    handles = [Patch(color=_KINDS[kind][0], label=_KINDS[kind][1]) for kind in sorted(kinds)]
    handles.append(Patch(facecolor=_BUBBLE, label="bubble (the rank waits)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _draw_timeline(axes: "Axes", run: Run) -> None:
    """Draw one run's timeline: each rank's spans, above a bar for the whole update.

    Times are in milliseconds since the first span began.
    """
    begin = min(span["begin_s"] for span in run["timeline"])
    whole = 1e3 * (max(span["end_s"] for span in run["timeline"]) - begin)
    for rank in range(run["ranks"]):
        axes.broken_barh([(0, whole)], (rank - 0.4, 0.8), facecolors=_BUBBLE)
    for span in run["timeline"]:
        left, width = 1e3 * (span["begin_s"] - begin), 1e3 * (span["end_s"] - span["begin_s"])
        axes.broken_barh(
            [(left, width)],
            (span["rank"] - 0.4, 0.8),
            facecolors=_KINDS[span["kind"]][0],
            edgecolor="white",
            lw=0.5,
        )
    names = []
    for rank in range(run["ranks"]):
        stages = sorted({1 + span["stage"] for span in run["timeline"] if span["rank"] == rank})
        names.append(f"rank {rank}, stage {', '.join(map(str, stages))}")
    axes.set_ylim(run["ranks"] - 0.5, -0.5)
    axes.set_xlim(0, whole)
    axes.set_yticks(range(run["ranks"]), names, fontsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    title = f"{run['engine']}: one update, measured bubble {run['bubble_measured']:.1f}%"
    if not is_comparable(run):
        title += f" (not comparable, {run['ranks']} ranks on {run['cores']} cores)"
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)

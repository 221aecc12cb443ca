"""How often `watch` is right about the samples still to train: `measure_forecasts.py [DIR...]`.

Every run below the directories (MLPerf logs of runs that reached their target; default: those of
this repository) is forecast after each of its evaluations, for several targets that it reached, and
compared with what it then needed. The published curves of BERT-large are forecast in the same way.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from bert_tools.common.log_reader import read_foreign_log
from bert_tools.report.published import curves_for
from bert_tools.report.run import Evaluation, Task, read_run
from bert_tools.report.run_files import only_run
from bert_tools.report.watch_look import Forecast, by_curve, by_published
from mlperf_bert.common.errors import DataError

REPOSITORY = Path(__file__).parents[2]
OWN_TARGETS = (0.20, 0.22, 0.24, 0.25, 0.26, 0.265, 0.27)
PUBLISHED_TARGETS = (0.69, 0.70, 0.71, 0.715, 0.718, 0.72)
TASK = Task(16_384, "adamw", 0.72, is_reference=True)  # of the published curves, about

Curve = Sequence[Evaluation]
Judged = tuple[Forecast | str, int]  # and the samples that it then took


def own_curves(directories: Iterable[Path]) -> list[Curve]:
    """Of each run that reached its target."""
    found = []
    for path in sorted(path for folder in directories for path in folder.rglob("result_*.txt")):
        try:
            if read_foreign_log(path, str(path)).named("run_stop"):
                run = read_run(only_run(path))
                found += [run.evaluations] if run.ended == "success" else []
        except DataError as error:
            print(error, file=sys.stderr)
    return found


def judged(curves: Iterable[Curve], targets: Iterable[float]) -> list[Judged]:
    """Every forecast by a curve's own evaluations, from the fourth to the one before the target."""
    found: list[Judged] = []
    for curve in curves:
        for target in targets:
            reached = next((at for at, each in enumerate(curve) if each.accuracy >= target), 0)
            for at in range(3, reached):
                forecast = by_curve(curve[: at + 1], target)
                found.append((forecast, curve[reached].samples - curve[at].samples))
    return found


def published() -> tuple[list[Curve], list[Judged]]:
    """The curves, and what published runs say of each other at the target of 0.72."""
    curves, found = [], []
    for each in curves_for(TASK):
        curve = [Evaluation(samples, accuracy) for samples, accuracy in each.points[1:]]
        curves.append(curve)
        end = next(one.samples for one in curve if one.accuracy >= 0.72)
        for before, _ in pairwise(curve):
            forecast = by_published(before.samples, TASK)
            found.append((forecast, end - before.samples))
    return curves, found


def in_words(name: str, cases: Sequence[Judged]) -> str:
    """One line: how many were made, how many held, how wide they are."""
    made = [(each, truth) for each, truth in cases if isinstance(each, Forecast)]
    held = sum(each.low_samples <= truth <= each.high_samples for each, truth in made)
    sooner = sum(truth < each.low_samples for each, truth in made)
    widths = [each.high_samples / each.low_samples for each, _ in made if each.low_samples > 0]
    return (
        f"{name}: {len(cases)} asked, {len(made)} said, {held} held "
        f"({held / max(1, len(made)):.1%}), {sooner} reached sooner, "
        f"{len(made) - held - sooner} later; longest over shortest {median(widths):.1f} (median)"
    )


def main(directories: Sequence[Path]) -> None:
    """Print three lines."""
    own = own_curves(directories)
    curves, by_each_other = published()
    print(in_words(f"{len(own)} runs of cpu_tiny, by their own curve", judged(own, OWN_TARGETS)))
    name = f"{len(curves)} published runs of BERT-large"
    print(in_words(f"{name}, by their own curve", judged(curves, PUBLISHED_TARGETS)))
    print(in_words(f"{name}, by published runs", by_each_other))


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]] or [REPOSITORY / "results", REPOSITORY / "logs"])

"""Whether untrained position embeddings slow a second phase down: a study on one CPU.

    python study_positions.py run --out DIR [--seeds N] [--limit N]
    python study_positions.py report --out DIR

A model is trained on short sequences, then on long ones. Three arms train alike in the second
phase, on the same samples, and differ in what they start from:

- `raw`: the weights after the first phase; position rows from the short length on are as
  initialised, since no token was there;
- `tiled`: the same, but these rows repeat those of the short length;
- `long`: the control, whose first phase had long sequences: as many steps of as many tokens.

`run` writes one JSON a run, goes on where it was stopped, and leaves the prepared sets and the
weights after first phases in DIR/work. `report` prints the tables and writes DIR/positions.png.
"""

import argparse
import io
import json
import sys
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import UserError
from position_runs import (
    FIRST_PHASE_OF,
    RANGES_OF_SHORT,
    Study,
    next_run,
    result_path,
    run_and_store,
)

SHARES = (0.8, 0.9, 0.95)
HALVINGS = 4  # of the second phase, from its end: what the table of accuracies shows


@dataclass(frozen=True, slots=True)
class Curve:
    """A run over its seeds: E evaluations, R ranges of position, S seeds."""

    samples: np.ndarray  # int64 [E]
    correct: np.ndarray  # int64 [S, E, R]
    masked: np.ndarray  # int64 [R]
    row_norms: np.ndarray  # float64 [S, E, R]
    guess: float  # accuracy without context

    def accuracy(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Of the masked tokens in the ranges `start` .. `stop`, float64 [S, E]."""
        share: np.ndarray = (
            self.correct[:, :, start:stop].sum(axis=2) / self.masked[start:stop].sum()
        )
        return share

    @property
    def below(self) -> np.ndarray:
        """Accuracy below the short length, [S, E]."""
        return self.accuracy(0, RANGES_OF_SHORT)

    @property
    def above(self) -> np.ndarray:
        """Accuracy from the short length on, [S, E]."""
        return self.accuracy(RANGES_OF_SHORT)


def run(args: argparse.Namespace) -> None:
    """Do what is not done yet, `--limit` runs at most."""
    study = Study(**{field.name: getattr(args, field.name) for field in fields(Study)})
    make_directory(args.out)
    keep_settings(study, args.out)
    for number in count(1):
        following = next_run(args.out, args.seeds)
        if following is None:
            print(f"{args.out}: {args.seeds} seeds are finished")
            return
        name, seed = following
        run_and_store(study, name, seed, args.out)
        print(f"seed {seed}, {name}: finished", flush=True)
        if number == args.limit:
            return


def keep_settings(study: Study, out: Path) -> None:
    """Write what the study is, or refuse to go on with another one."""
    path = out / "study.json"
    if not path.exists():
        write_file(path, json.dumps(asdict(study)).encode())
    elif json.loads(path.read_text()) != asdict(study):
        raise UserError(str(path), "is of a study with other settings", "name a new directory")


def report(args: argparse.Namespace) -> None:
    """Print the tables of all seeds that are finished, draw the picture."""
    seeds = finished_seeds(args.out)
    if len(seeds) < 2:
        raise UserError(str(args.out), f"has {len(seeds)} finished seeds", "run two at least")
    study = Study(**json.loads((args.out / "study.json").read_text()))
    names = [*dict.fromkeys(FIRST_PHASE_OF.values()), *FIRST_PHASE_OF]
    curves = {name: read_curve(args.out, name, seeds) for name in names}
    write_file(args.out / "positions.png", draw(curves, study))
    print(in_words(curves, study))


def finished_seeds(out: Path) -> list[int]:
    """Seeds of which all arms are there."""
    seeds: list[int] = []
    for seed in count():
        if not all(result_path(out, arm, seed).exists() for arm in FIRST_PHASE_OF):
            return seeds
        seeds.append(seed)
    return seeds


def read_curve(out: Path, name: str, seeds: list[int]) -> Curve:
    """One run of all seeds."""
    results = [json.loads(result_path(out, name, seed).read_text()) for seed in seeds]
    return Curve(
        samples=np.array([each["samples"] for each in results[0]["evaluations"]]),
        correct=np.array([[each["correct"] for each in one["evaluations"]] for one in results]),
        masked=np.array(results[0]["masked"]),
        row_norms=np.array([[each["row_norms"] for each in one["evaluations"]] for one in results]),
        guess=results[0]["context_free_accuracy"],
    )


def samples_until(samples: np.ndarray, ahead: np.ndarray) -> float:
    """Samples at which `ahead` [E] is first zero or more, on straight lines; NaN where never."""
    reached = np.flatnonzero(ahead >= 0)
    if not len(reached):
        return np.nan
    after = int(reached[0])
    if after == 0:
        return float(samples[0])
    before = after - 1
    part = -ahead[before] / (ahead[after] - ahead[before])
    return float(samples[before] + part * (samples[after] - samples[before]))


def in_words(curves: dict[str, Curve], study: Study) -> str:
    """All tables, in Markdown: mean ± standard deviation over seeds."""
    first = curves["first_short"]
    lines = [
        f"{first.correct.shape[0]} seeds. Accuracy after the first phase, on its own held-out set:",
        *(
            f"{name} {_with_spread(curves[name].accuracy()[:, -1])}"
            f" (without context {curves[name].guess:.3f})"
            for name in dict.fromkeys(FIRST_PHASE_OF.values())
        ),
        f"Mean norm of position rows after it: below {study.short} "
        f"{_with_spread(curves['raw'].row_norms[:, 0, :RANGES_OF_SHORT].mean(axis=1))}, from there "
        f"on {_with_spread(curves['raw'].row_norms[:, 0, RANGES_OF_SHORT:].mean(axis=1))}",
        "",
        *_accuracies(curves, study),
        "",
        *_samples_to_recover(curves, study),
    ]
    return "\n".join(lines)


def _accuracies(curves: dict[str, Curve], study: Study) -> list[str]:
    samples = curves["raw"].samples
    wanted = [0, *(samples[-1] / 2**halvings for halvings in range(HALVINGS, -1, -1))]
    shown = np.unique([np.abs(samples - each).argmin() for each in wanted])
    numbers = " | ".join(f"{each:,}" for each in samples[shown])
    lines = [f"| arm | positions | {numbers} samples |", "|---|---|" + "---|" * len(shown)]
    for arm in FIRST_PHASE_OF:
        curve = curves[arm]
        for where, accuracy in (
            (f"below {study.short}", curve.below),
            (f"from {study.short} on", curve.above),
            ("all", curve.accuracy()),
        ):
            cells = " | ".join(_with_spread(accuracy[:, each]) for each in shown)
            lines.append(f"| {arm} | {where} | {cells} |")
    return lines


def _samples_to_recover(curves: dict[str, Curve], study: Study) -> list[str]:
    heads = [f"above is {share:g} x below" for share in SHARES]
    heads.append(f"all is as at {study.short} after the first phase")
    lines = [f"| samples until | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    before = curves["first_short"].accuracy()[:, -1:]
    found = {}
    for arm in FIRST_PHASE_OF:
        curve = curves[arm]
        ahead = [*(curve.above - share * curve.below for share in SHARES)]
        ahead.append(curve.accuracy() - before)
        found[arm] = np.array([[samples_until(curve.samples, one) for one in s] for s in ahead])
    found["raw less tiled, seed by seed"] = found["raw"] - found["tiled"]
    for name, rows in found.items():
        lines.append(f"| {name} | {' | '.join(map(_until, rows))} |")
    return lines


def _until(found: np.ndarray) -> str:
    reached = found[np.isfinite(found)]
    if len(reached) < len(found):
        return f"in {len(reached)} of {len(found)} seeds"
    return f"{reached.mean():,.0f} ± {reached.std(ddof=1):,.0f}"


def _with_spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def draw(curves: dict[str, Curve], study: Study) -> bytes:
    """A PNG of accuracy over samples, a panel for each arm: a thin line a seed, thick their mean.

    Ranges of position are as wide as the short length.
    """
    figure, panels = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    for axes, arm in zip(panels, FIRST_PHASE_OF, strict=True):
        curve = curves[arm]
        for number, start in enumerate(range(0, len(curve.masked), RANGES_OF_SHORT)):
            accuracy = curve.accuracy(start, start + RANGES_OF_SHORT)
            first = start * study.range_width
            label = f"positions {first} to {min(first + study.short, study.long) - 1}"
            axes.plot(curve.samples, accuracy.T, color=f"C{number}", linewidth=0.5, alpha=0.6)
            axes.plot(curve.samples, accuracy.mean(axis=0), color=f"C{number}", label=label)
        axes.axhline(curve.guess, color="grey", linestyle=":", label="guess without context")
        axes.set_title(arm)
        axes.set_xlabel("samples of the second phase")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("masked-LM accuracy")
    panels[0].legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train what is not finished")
    running.set_defaults(command=run)
    running.add_argument("--seeds", type=int, default=5, metavar="N", help="default 5")
    running.add_argument("--limit", type=int, metavar="N", help="stop after N runs")
    for field in fields(Study):
        option = "--" + field.name.replace("_", "-")
        running.add_argument(option, type=int, default=field.default, metavar="N")
    reporting = commands.add_parser("report", help="tables and picture")
    reporting.set_defaults(command=report)
    for command in (running, reporting):
        command.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    mpl.use("Agg")
    try:
        args.command(args)
    except UserError as error:
        print(f"study_positions: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

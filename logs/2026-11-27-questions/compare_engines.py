"""Engines fine-tuned on questions that are learnt: quality, time to it, goodput, bubbles.

    python compare_engines.py run --questions DIR --init-checkpoint DIR --out DIR  # what is missing
    python compare_engines.py table NAME    # Markdown, of records.jsonl
    python compare_engines.py picture curves|timeline FILE.png

`run` first makes short runs of every engine with several microbatch counts (COUNTS), then whole
runs of each engine with the count that was fastest, and of `ddp:2` at other global batches, seed
after seed. Each is a `squad train`. What the tables are made of is added to records.jsonl when a
run has ended; started again, the command goes on with what is missing there.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.figures import check_picture, new_figure, png
from bert_tools.common.means import mean_and_half_width
from bert_tools.common.tables import markdown
from bert_tools.squad.comparison import RESULT, read_run
from bert_tools.squad.plot import timeline_figure
from bert_tools.squad.settings import SquadSettings, parse_engine
from bert_tools.squad.table import study_in_words
from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import UserError
from mlperf_bert.common.records import write_json
from mlperf_bert.optim.noise_scale import efficiency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bert_tools.squad.compare import Job

RECORDS = Path(__file__).with_name("records.jsonl")
TIMELINES = Path(__file__).with_name("timelines")
Record = dict[str, Any]
PIPELINES = tuple(f"pipeline:2@{each}" for each in ("gpipe", "1f1b", "interleaved", "zero_bubble"))
ENGINES = ("single", "ddp:2", "fsdp:2", *PIPELINES)
COUNTS = (2, 4, 8)  # microbatches
COUNT_SEEDS, SEEDS = (1, 2), (1, 2, 3, 4, 5)
BATCH, OTHER_BATCHES, SAMPLES, SHORT = 32, (16, 64), 19_200, 50  # SHORT: updates of a short run
# Found on seed 0, which no table has: README.md. The rate goes with the root of the batch.
LEARNING_RATE = 1e-3
TARGETS = (50, 60)  # exact match, %
KEPT = (
    *("engine", "seed", "ranks", "cores", "updates", "samples", "init", "validation_loss"),
    *("exact_match", "f1", "answerable", "unanswerable", "on_the_way", "bubble", "seconds"),
    *("noise_scale", "plain_noise_scale", "cpu_seconds", "core_wait_seconds", "processor"),
)


def settings(args: argparse.Namespace, engine: str, seed: int, **more: Any) -> SquadSettings:
    """Of a run at `global_batch`, with what all runs share."""
    batch = more.setdefault("global_batch", BATCH)
    return SquadSettings(
        engine=parse_engine(engine),
        seed=seed,
        train=args.questions / "train.json",
        dev=args.questions / "dev.json",
        init_checkpoint=args.init_checkpoint,
        device="cpu",
        learning_rate=LEARNING_RATE * (batch / BATCH) ** 0.5,
        max_length=96,
        stride=48,
        max_question_length=24,
        **more,
    )


def job(args: argparse.Namespace, part: str, engine: str, seed: int, **more: Any) -> "Job":
    """A run and its directory, whose name is also the record's."""
    from bert_tools.squad.compare import Job  # torch, which tables do without

    found = settings(args, engine, seed, **more)
    name = f"{part}-{engine}-b{found.global_batch}-m{found.microbatches}-seed{seed}"
    return Job(found, args.out / name.replace(":", "_").replace("@", "-"))


def short_jobs(args: argparse.Namespace) -> Iterator["Job"]:
    """Every engine with every count, seed by seed, so that slow spells hit all."""
    for seed in COUNT_SEEDS:
        for engine, count in itertools.product(ENGINES, COUNTS):
            yield job(args, "counts", engine, seed, microbatches=count, updates=SHORT)


def whole_jobs(args: argparse.Namespace, best: dict[str, int]) -> Iterator["Job"]:
    """Every engine at BATCH, and ddp:2 at the other batches, with as many samples."""
    arms = [(engine, BATCH) for engine in ENGINES] + [("ddp:2", each) for each in OTHER_BATCHES]
    for seed in SEEDS:
        for engine, batch in arms:
            often = {"noise_every": 800 // batch, "evaluate_every": 1600 // batch}
            more = {"global_batch": batch, "updates": SAMPLES // batch, **often}
            yield job(args, "whole", engine, seed, microbatches=best[engine], **more)


def best_counts(records: Sequence[Record]) -> dict[str, int]:
    """Of each engine the microbatch count with the most samples/s, in the mean of the seeds."""
    rates: dict[str, dict[int, list[float]]] = {}
    for each in records:
        if each["part"] == "counts":
            of_engine = rates.setdefault(each["label"], {})
            of_engine.setdefault(each["microbatches"], []).append(each["samples_per_s"])
    return {
        engine: max(counts, key=lambda count: statistics.fmean(counts[count]))
        for engine, counts in rates.items()
    }


def run(args: argparse.Namespace) -> int:
    """Run what records.jsonl lacks; the status of a run that failed, else 0."""
    status = _run_jobs(list(short_jobs(args)))
    return status or _run_jobs(list(whole_jobs(args, best_counts(read_records()))))


def _run_jobs(jobs: Sequence["Job"]) -> int:
    from bert_tools.squad.compare import run_jobs

    done = {each["name"] for each in read_records()}
    missing = [each for each in jobs if each.directory.name not in done]
    for place, each in enumerate(missing, start=1):
        print(f"{place} of {len(missing)}: {each.directory.name}", flush=True)
        _, status = run_jobs([each])
        if status:
            return status
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_kept(each)) + "\n")
        _keep_timeline(each)
    return 0


def _keep_timeline(job: "Job") -> None:
    """The first seed's clocked update of each schedule, for a picture."""
    name = job.directory.name
    if job.settings.engine.schedule and (job.settings.seed, name[:5]) == (SEEDS[0], "whole"):
        found = json.loads((job.directory / RESULT).read_bytes())
        long = ("losses", "grad_norms", "step_seconds", "noise", "on_the_way")
        make_directory(TIMELINES / name)
        write_file(TIMELINES / name / RESULT, write_json(found | {key: [] for key in long}))


def _kept(job: "Job") -> Record:
    """What the tables need of a run. `loss_difference`: to `single` of the same seed and batch."""
    found = json.loads((job.directory / RESULT).read_bytes())
    engine = job.settings.engine
    name = job.directory.name
    difference = None
    theirs = [*job.directory.parent.glob(f"whole-single-b{BATCH}-*-seed{job.settings.seed}")]
    if name.startswith("whole") and job.settings.global_batch == BATCH and len(theirs) == 1:
        losses = json.loads((theirs[0] / RESULT).read_bytes())["losses"]
        pairs = zip(found["losses"], losses, strict=True)
        difference = max(abs(one - other) for one, other in pairs)
    return {
        "name": name,
        "part": name.partition("-")[0],
        "label": f"{engine}@{engine.schedule}" if engine.schedule else str(engine),
        "global_batch": job.settings.global_batch,
        "microbatches": job.settings.microbatches,
        "samples_per_s": found["samples_per_s"]["train"],
        "first_losses": found["losses"][:5],
        "loss_difference": difference,
        **{key: found[key] for key in KEPT},
    }


def read_records() -> list[Record]:
    """All records, in the order of their runs."""
    text = RECORDS.read_text("utf-8") if RECORDS.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def samples_to(record: Record, target: float) -> float | None:
    """Samples until the line between two evaluations first reaches the target; None if never."""
    batch = record["global_batch"]
    curve = [(each["update"] * batch, each["exact_match"]) for each in record["on_the_way"]]
    curve.append((record["samples"], record["exact_match"]))
    if curve[0][1] >= target:
        return float(curve[0][0])
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= target:
            return float(before + (target - low) / (high - low) * (after - before))
    return None


def counts_table(records: Sequence[Record]) -> list[str]:
    """Samples/s of every engine and microbatch count."""
    short = [each for each in records if each["part"] == "counts"]
    rows = []
    for engine in ENGINES:
        cells = []
        for count in COUNTS:
            rates = [
                each["samples_per_s"]
                for each in short
                if (each["label"], each["microbatches"]) == (engine, count)
            ]
            shown = " ".join(f"{rate:.0f}" for rate in rates) or "-"
            cells.append(f"**{shown}**" if best_counts(records).get(engine) == count else shown)
        rows.append([f"`{engine}`", *cells])
    return markdown(["samples/s of both seeds", *(f"{each} microbatches" for each in COUNTS)], rows)


def _arms(records: Sequence[Record]) -> dict[tuple[str, int], list[Record]]:
    found: dict[tuple[str, int], list[Record]] = {}
    for each in records:
        if each["part"] == "whole":
            found.setdefault((each["label"], each["global_batch"]), []).append(each)
    return found


def _mean(values: Sequence[float | None], form: str) -> str:
    """Mean and half of its 95 % interval over the seeds that have a value."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, half = mean_and_half_width(known)
    shown = format(mean, form) + (f" ± {format(half, form)}" if half else "")
    return shown if len(known) == len(values) else f"{shown} ({len(known)} of {len(values)})"


def quality_table(records: Sequence[Record]) -> list[str]:
    """What each engine's model answers, and what it took to get there."""
    head = ["engine", "seeds", "exact match, %", "answerable", "unanswerable", "F1, %"]
    head += [f"samples to {each} %" for each in TARGETS]
    head += [f"seconds to {each} %" for each in TARGETS]
    head += ["any update's loss against `single`"]
    rows = []
    for (engine, batch), group in _arms(records).items():
        if batch != BATCH:
            continue
        differences = [each["loss_difference"] for each in group if each["loss_difference"]]
        reached = {each: [samples_to(run, each) for run in group] for each in TARGETS}
        cells = [f"`{engine}`", str(len(group)), _mean([e["exact_match"] for e in group], ".1f")]
        cells += [
            _mean([each[kind]["exact_match"] for each in group], ".1f")
            for kind in ("answerable", "unanswerable")
        ]
        cells += [_mean([each["f1"] for each in group], ".1f")]
        cells += [_mean(reached[each], ",.0f") for each in TARGETS]
        cells += [_mean(_seconds(group, reached[each]), ".1f") for each in TARGETS]
        rows.append([*cells, f"{max(differences):.1g}" if differences else "-"])
    return markdown(head, rows)


def _seconds(group: Sequence[Record], samples: Sequence[float | None]) -> list[float | None]:
    """Training alone, at the pace of each run's plain updates."""
    return [
        None if count is None else count / each["samples_per_s"]
        for each, count in zip(group, samples, strict=True)
    ]


def rates_table(records: Sequence[Record]) -> list[str]:
    """Speed, and where it goes: the same updates, so that only time differs."""
    head = ["engine", "microbatches", "samples/s", "over `single`, same seed", "bubble, %"]
    head += ["by formula, %", "CPU ms a sample", "waited for a core, %"]
    arms = _arms(records)
    single = {each["seed"]: each["samples_per_s"] for each in arms["single", BATCH]}
    rows = []
    for (engine, batch), group in arms.items():
        if batch != BATCH:
            continue
        bubbles = [each["bubble"] or {} for each in group]
        ratios = [each["samples_per_s"] / single[each["seed"]] for each in group]
        formula = bubbles[0].get("formula")
        waits = [
            100 * sum(each["core_wait_seconds"]) / (each["seconds"]["train"] * each["ranks"])
            for each in group
        ]
        rows.append(
            [
                f"`{engine}`",
                str(group[0]["microbatches"]),
                _mean([each["samples_per_s"] for each in group], ".0f"),
                "-" if engine == "single" else _mean(ratios, ".2f"),
                _mean([_percent(each.get("measured")) for each in bubbles], ".1f"),
                "-" if formula is None else f"{100 * formula:.1f}",
                _mean([1e3 * sum(e["cpu_seconds"]) / e["samples"] for e in group], ".2f"),
                _mean(waits, ".0f"),
            ]
        )
    return markdown(head, rows)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def batches_table(records: Sequence[Record]) -> list[str]:
    """`ddp:2` at three batches: what the noise scale says a sample is worth, and what it was."""
    head = [
        "global batch",
        "exact match, %",
        "samples/s",
        "noise scale, plain",
        "as Adam scales it",
    ]
    head += [f"a sample's worth against batch {BATCH}: plain", "as Adam scales it"]
    head += [f"measured, to {each} %" for each in TARGETS] + ["goodput by the plain one"]
    arms = {batch: group for (name, batch), group in _arms(records).items() if name == "ddp:2"}
    noise = {
        key: [each[key] for each in arms[BATCH]] for key in ("plain_noise_scale", "noise_scale")
    }
    base = {
        target: {each["seed"]: samples_to(each, target) for each in arms[BATCH]}
        for target in TARGETS
    }
    rows = []
    for batch, group in sorted(arms.items()):
        worth = {
            key: [efficiency(phi, BATCH, batch) for phi in values if phi is not None]
            for key, values in noise.items()
        }
        measured = [
            _mean(
                [_ratio(base[target][each["seed"]], samples_to(each, target)) for each in group],
                ".2f",
            )
            for target in TARGETS
        ]
        goodput = statistics.fmean(worth["plain_noise_scale"]) * statistics.fmean(
            each["samples_per_s"] for each in group
        )
        rows.append(
            [
                str(batch),
                _mean([each["exact_match"] for each in group], ".1f"),
                _mean([each["samples_per_s"] for each in group], ".0f"),
                *(_mean([e[key] for e in group], ".0f") for key in noise),
                *(_mean(values, ".2f") for values in worth.values()),
                *measured,
                f"{goodput:.0f}",
            ]
        )
    return markdown(head, rows)


def _ratio(base: float | None, own: float | None) -> float | None:
    return None if base is None or own is None else base / own


def curves(records: Sequence[Record]) -> "Figure":
    """Exact match over samples and over seconds of training: a line for each run."""
    figure = new_figure(11, 4)
    panels = figure.subplots(1, 2, sharey=True)
    for number, ((engine, batch), group) in enumerate(_arms(records).items()):
        if batch != BATCH:
            continue
        for place, each in enumerate(group):
            samples = [
                0,
                *(point["update"] * batch for point in each["on_the_way"]),
                each["samples"],
            ]
            match = [
                None,
                *(point["exact_match"] for point in each["on_the_way"]),
                each["exact_match"],
            ]
            seconds = [count / each["samples_per_s"] for count in samples]
            for axes, across in zip(panels, (samples, seconds), strict=True):
                label = engine if place == 0 else None
                axes.plot(across, match, color=f"C{number}", lw=0.9, alpha=0.8, label=label)
    for axes, title in zip(panels, ("samples", "seconds of training"), strict=True):
        axes.set_xlabel(title)
        axes.axhline(_floor(records[-1]), color="grey", lw=0.8, ls=":", label="no answer at all")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("exact match on 800 held-out questions, %")
    panels[1].legend(fontsize=7, loc="lower right")
    return figure


def timeline() -> "Figure":
    """One update of each schedule, rank by rank."""
    found = timeline_figure([read_run(path) for path in sorted(TIMELINES.iterdir())])
    assert found is not None
    return found


def _floor(record: Record) -> float:
    """Exact match, in percent, of no answer to any question."""
    without, answerable = (record[key]["questions"] for key in ("unanswerable", "answerable"))
    return float(100 * without / (without + answerable))


def published_table(_records: Sequence[Record]) -> list[str]:
    """The study that is often cited, with its differences to its baseline."""
    lines = study_in_words()
    first = next(place for place, line in enumerate(lines) if line.startswith("|"))
    return lines[first : lines.index("", first)]


TABLES = {
    "counts": counts_table,
    "quality": quality_table,
    "rates": rates_table,
    "batches": batches_table,
    "published": published_table,
}


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="do the runs that are missing")
    for name, text in (
        ("questions", "with train.json and dev.json"),
        ("init-checkpoint", "weights to begin from"),
        ("out", "directories of the runs"),
    ):
        command.add_argument(f"--{name}", type=Path, required=True, metavar="DIR", help=text)
    commands.add_parser("table", help="Markdown").add_argument("name", choices=TABLES)
    command = commands.add_parser("picture", help="a PNG")
    command.add_argument("name", choices=("curves", "timeline"))
    command.add_argument("path", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    try:
        if args.command == "run":
            sys.exit(run(args))
        if args.command == "picture":
            path = check_picture(args.path)
            figure = timeline() if args.name == "timeline" else curves(read_records())
            write_file(path, png(figure, 110))
        else:
            print("\n".join(TABLES[args.name](read_records())))
    except UserError as error:
        print(f"compare_engines: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

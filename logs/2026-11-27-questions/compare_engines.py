"""Engines fine-tuned on questions that are learnt: quality, time to it, goodput, bubbles.

    python compare_engines.py run --questions DIR --init-checkpoint DIR --out DIR  # what is missing
    python compare_engines.py table NAME    # Markdown, of records.jsonl
    python compare_engines.py picture curves|timeline FILE.png

`run` first makes short runs of every engine with several microbatch counts (COUNTS), then whole
runs of each engine with the count that was fastest, and of `ddp:2` at other global batches, seed
after seed; at last longer ones of `single`. Each is a `squad train`. What the tables are made of is
added to records.jsonl when a run has ended; started again, the command goes on with what is missing
there.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.figures import check_picture, new_figure, png
from bert_tools.common.means import mean_and_half_width
from bert_tools.common.tables import markdown
from bert_tools.squad.comparison import RESULT, Value, read_run
from bert_tools.squad.plot import timeline_figure
from bert_tools.squad.settings import SquadSettings, parse_engine
from bert_tools.squad.table import study_in_words, with_interval
from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import UserError
from mlperf_bert.common.records import write_json
from mlperf_bert.optim.noise_scale import efficiency, goodput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bert_tools.squad.compare import Job

RECORDS = Path(__file__).with_name("records.jsonl")
TIMELINES = Path(__file__).with_name("timelines")
Record = dict[str, Any]
PIPELINES = tuple(f"pipeline:2@{each}" for each in ("gpipe", "1f1b", "interleaved", "zero_bubble"))
ENGINES = ("single", "ddp:2", "fsdp:2", *PIPELINES)
COUNTS = (1, 2, 4, 8)  # microbatches; two ranks need two
COUNT_SEEDS, SEEDS = (1, 2), (2, 3, 4, 5, 6)
BATCH, OTHER_BATCHES, SAMPLES, LONG = 32, (16, 64), 19_200, 32_000  # LONG: samples, too
SHORT = 50  # updates of a short run
# Found on seed 1, which whole runs do not use. It goes with the root of the batch.
LEARNING_RATE = 1e-3
TARGETS = (40, 50)  # exact match, %, that every seed comes to
ANSWERS = ("seeds", "exact match, %", "answerable", "unanswerable", "F1, %")
KEPT = (
    *("engine", "seed", "ranks", "cores", "updates", "samples", "init", "validation_loss"),
    *("exact_match", "f1", "answerable", "unanswerable", "on_the_way", "bubble", "seconds"),
    *("plain_noise_scale", "cpu_seconds", "core_wait_seconds", "processor"),
    "model",
)


def settings(args: argparse.Namespace, engine: str, seed: int, **more: Any) -> SquadSettings:
    """Settings of a run at `global_batch`, with all that runs share."""
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
            if count > 1 or engine == "single":
                yield job(args, "counts", engine, seed, microbatches=count, updates=SHORT)


def whole_jobs(args: argparse.Namespace, best: dict[str, int]) -> Iterator["Job"]:
    """Every engine at BATCH, and ddp:2 at the other batches, with as many samples."""
    arms = [(engine, BATCH) for engine in ENGINES] + [("ddp:2", each) for each in OTHER_BATCHES]
    for seed in SEEDS:
        for engine, batch in arms:
            more = {"global_batch": batch, "updates": SAMPLES // batch}
            more |= {"evaluate_every": 1600 // batch}
            if best[engine] > 1:  # the noise is measured on two halves
                more |= {"noise_every": 800 // batch}
            yield job(args, "whole", engine, seed, microbatches=best[engine], **more)


def long_jobs(args: argparse.Namespace) -> Iterator["Job"]:
    """One engine with more samples: what the questions can be answered to."""
    for seed in SEEDS:
        more = {"updates": LONG // BATCH, "evaluate_every": 3200 // BATCH}
        yield job(args, "long", "single", seed, microbatches=1, **more)


def best_counts(records: Sequence[Record]) -> dict[str, int]:
    """The microbatch count of each engine with the most samples/s, in the mean of the seeds."""
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
    status = status or _run_jobs(list(whole_jobs(args, best_counts(read_records()))))
    return status or _run_jobs(list(long_jobs(args)))


def _run_jobs(jobs: Sequence["Job"]) -> int:
    from bert_tools.squad.compare import run_jobs

    done = {each["name"] for each in read_records()}
    missing = [each for each in jobs if each.directory.name not in done]
    for place, each in enumerate(missing, start=1):
        print(f"{place} of {len(missing)}: {each.directory.name}", flush=True)
        _, status = run_jobs([each])
        if status:
            return status
        _keep_timeline(each)
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_kept(each)) + "\n")
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
    """A run's line of records.jsonl. `loss_difference`: to `single` of the same seed and batch."""
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
    """Samples/s of every engine and microbatch count, of both seeds."""
    best = best_counts(records)
    rows = []
    for engine in ENGINES:
        cells = []
        for count in COUNTS:
            shown = " ".join(
                f"{each['samples_per_s']:.0f}" for each in _short(records, engine, count)
            )
            cells.append(f"**{shown}**" if best.get(engine) == count else shown or "-")
        rows.append([f"`{engine}`", *cells])
    return markdown(["engine", *(f"{each} microbatches" for each in COUNTS)], rows)


def _short(records: Sequence[Record], engine: str, count: int) -> list[Record]:
    """The short runs of an engine with so many microbatches; they did nothing but train."""
    wanted = ("counts", engine, count)
    return [e for e in records if (e["part"], e["label"], e["microbatches"]) == wanted]


def _arms(records: Sequence[Record]) -> dict[tuple[str, int], list[Record]]:
    """The whole runs by engine and batch."""
    found: dict[tuple[str, int], list[Record]] = {}
    for each in records:
        if each["part"] == "whole":
            found.setdefault((each["label"], each["global_batch"]), []).append(each)
    return found


def _engines(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The whole runs at BATCH by engine."""
    return {engine: group for (engine, batch), group in _arms(records).items() if batch == BATCH}


def _mean(values: Iterable[float | None]) -> str:
    """Mean and half of its 95 % interval over the seeds that have a value."""
    given = list(values)
    known = [value for value in given if value is not None]
    if not known:
        return "-"
    shown = with_interval(Value(*mean_and_half_width(known), len(known)))
    return shown if len(known) == len(given) else f"{shown} ({len(known)} of {len(given)})"


def quality_table(records: Sequence[Record]) -> list[str]:
    """The answers of each engine's models, and the samples and seconds to a share of right ones."""
    head = ["engine", *ANSWERS, "exact match less `single`'s, same seed"]
    head += [f"samples to {each} %" for each in TARGETS]
    head += [f"seconds to {each} %" for each in TARGETS]
    head += ["loss against `single`: first five updates, any"]
    rows = []
    for engine, group in _engines(records).items():
        cells = [f"`{engine}`", *_answers(group)]
        more = [run["exact_match"] - _single(run, records)["exact_match"] for run in group]
        cells += ["-" if engine == "single" else _mean(more)]
        cells += [_mean(samples_to(run, each) for run in group) for each in TARGETS]
        cells += [_mean(seconds_to(run, each) for run in group) for each in TARGETS]
        first = max(_first_difference(run, records) for run in group)
        most = max(run["loss_difference"] for run in group)
        rows.append([*cells, "-" if engine == "single" else f"{first:.1g}, {most:.1g}"])
    return markdown(head, rows)


def long_table(records: Sequence[Record]) -> list[str]:
    """The longer runs of `single`: what the questions can be answered to."""
    group = [each for each in records if each["part"] == "long"]
    aims = (*TARGETS, 60)
    head = ["samples", *ANSWERS, "least exact match", *(f"samples to {each} %" for each in aims)]
    least = min(each["exact_match"] for each in group)
    cells = [f"{LONG:,}", *_answers(group), f"{least:.1f}"]
    return markdown(head, [[*cells, *(_mean(samples_to(e, each) for e in group) for each in aims)]])


def _answers(group: Sequence[Record]) -> list[str]:
    """The cells of ANSWERS."""
    cells = [str(len(group)), _mean(each["exact_match"] for each in group)]
    for kind in ("answerable", "unanswerable"):
        cells.append(_mean(each[kind]["exact_match"] for each in group))
    return [*cells, _mean(each["f1"] for each in group)]


def _first_difference(run: Record, records: Sequence[Record]) -> float:
    """The largest of the first five updates' losses to those of `single` with the same seed."""
    pairs = zip(run["first_losses"], _single(run, records)["first_losses"], strict=True)
    return float(max(abs(one - other) for one, other in pairs))


def _single(run: Record, records: Sequence[Record]) -> Record:
    """The whole run of `single` with the seed of another run."""
    (found,) = [each for each in _engines(records)["single"] if each["seed"] == run["seed"]]
    return found


def seconds_to(record: Record, target: float) -> float | None:
    """Seconds of training alone to a target, at the pace of the run's plain updates."""
    samples = samples_to(record, target)
    return None if samples is None else float(samples / record["samples_per_s"])


def rates_table(records: Sequence[Record]) -> list[str]:
    """Speed, and where it goes: the same updates, so that only time differs."""
    head = ["engine", "microbatches", "samples/s", "over `single`, same seed", "bubble, %"]
    head += ["by formula, %", "CPU ms a sample", "waited for a core, %"]
    arms = _engines(records)
    single = {each["seed"]: each["samples_per_s"] for each in arms["single"]}
    rows = []
    for engine, group in arms.items():
        count = group[0]["microbatches"]
        bubbles = [each["bubble"] or {} for each in group]
        # The whole runs also evaluated and measured.
        short = _short(records, engine, count)
        cells = [f"`{engine}`", str(count), _mean(each["samples_per_s"] for each in group)]
        ratios = [each["samples_per_s"] / single[each["seed"]] for each in group]
        cells += ["-" if engine == "single" else _mean(ratios)]
        cells += [_mean(_percent(each.get("measured")) for each in bubbles)]
        cells += [_mean([_percent(bubbles[0].get("formula"))])]
        cells += [_mean(1e3 * sum(each["cpu_seconds"]) / each["samples"] for each in short)]
        rows.append([*cells, _mean(map(_waited, short))])
    return markdown(head, rows)


def _waited(record: Record) -> float:
    """Share of the ranks' time in which they waited for a core, in percent."""
    whole = record["seconds"]["train"] * record["ranks"]
    return float(100 * sum(record["core_wait_seconds"]) / whole)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def batches_table(records: Sequence[Record]) -> list[str]:
    """`ddp:2` at three batches: what the noise scale says a sample is worth, and what it was."""
    # The second was measured until this study, with which it went (docs/decisions/0024).
    kinds = {"plain_noise_scale": "plain", "noise_scale": "as Adam scales it"}
    head = [
        "global batch",
        "exact match, %",
        "samples/s",
        *(f"phi, {each}" for each in kinds.values()),
    ]
    head += [f"a sample's worth by phi, {each}" for each in kinds.values()]
    head += [f"measured, to {each} %" for each in TARGETS] + [
        "goodput by plain phi",
        f"seconds to {TARGETS[-1]} %",
    ]
    arms = {batch: group for (name, batch), group in _arms(records).items() if name == "ddp:2"}
    base = {each["seed"]: each for each in arms[BATCH]}
    rows = []
    for batch, group in sorted(arms.items()):
        cells = [str(batch), _mean(each["exact_match"] for each in group)]
        cells += [_mean(each["samples_per_s"] for each in group)]
        cells += [_mean(each.get(kind) for each in group) for kind in kinds]
        for kind in kinds:  # phi of the middle batch, as a run would know it
            phis = [each[kind] for each in base.values() if each.get(kind) is not None]
            cells += [_mean(efficiency(phi, BATCH, batch) for phi in phis)]
        for target in TARGETS:
            cells += [_mean(_worth(base[each["seed"]], each, target) for each in group)]
        rates = [(each["samples_per_s"], base[each["seed"]]["plain_noise_scale"]) for each in group]
        cells += [_mean(goodput(rate, phi, BATCH, batch) for rate, phi in rates if phi is not None)]
        rows.append([*cells, _mean(seconds_to(each, TARGETS[-1]) for each in group)])
    return markdown(head, rows)


def _worth(base: Record, own: Record, target: float) -> float | None:
    """Samples that `base` took to a target over those that `own` took."""
    theirs, mine = samples_to(base, target), samples_to(own, target)
    return None if theirs is None or mine is None else theirs / mine


def curves(records: Sequence[Record]) -> "Figure":
    """Exact match of one engine over samples, and of all over seconds of training, run by run."""
    figure = new_figure(11, 4)
    panels = figure.subplots(1, 2, sharey=True)
    for number, (engine, group) in enumerate(_engines(records).items()):
        for place, each in enumerate(group):
            updates = [*(point["update"] for point in each["on_the_way"]), each["updates"]]
            match = [*(point["exact_match"] for point in each["on_the_way"]), each["exact_match"]]
            samples = [update * each["global_batch"] for update in updates]
            style = {"color": f"C{number}", "lw": 0.9, "alpha": 0.8}
            if engine == "single":  # the others' lie on it
                panels[0].plot(samples, match, **style)
            seconds = [count / each["samples_per_s"] for count in samples]
            panels[1].plot(seconds, match, **style, label=engine if place == 0 else None)
    for axes, title in zip(panels, ("samples (any engine)", "seconds of training"), strict=True):
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


def published_tables() -> list[list[str]]:
    """The study that is often cited, with its differences to its baseline; what that implies."""
    grouped = itertools.groupby(study_in_words(), lambda line: line.startswith("|"))
    return [list(lines) for is_table, lines in grouped if is_table]


TABLES: dict[str, Callable[[Sequence[Record]], list[str]]] = {
    "counts": counts_table,
    "quality": quality_table,
    "long": long_table,
    "rates": rates_table,
    "batches": batches_table,
    "published": lambda _: published_tables()[0],
    "published-figures": lambda _: published_tables()[1],
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

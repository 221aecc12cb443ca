"""Records of fine-tuning runs, their comparison as one JSON record, and the table made of it.

No torch. Intervals are Student's, 95 %, over seeds; ratios to the first engine are taken seed by
seed, because runs of one seed have the same data, order and weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.means import mean_and_half_width
from bert_tools.common.tables import markdown
from bert_tools.squad.bubble import Span
from bert_tools.squad.noise_scale import efficiency
from mlperf_bert.errors import ConfigError, DataError, one_line

RESULT = "squad_result.json"
SCHEMA_VERSION = 2  # of runs and of comparisons
MIB = 2**20
MARK = "†"
_NOTHING = "-"
_REMEDY = "give the directory of a run that has ended, as `squad train` of this version wrote it"
# Settings that may differ: the batch, those that follow from it, and what is measured.
_MAY_DIFFER = ("global_batch", "updates", "learning_rate", "noise_every")
_PLACES = 4  # significant digits
_ROUNDING = 1e-9  # share of a mean; less is zero up to rounding
_DATA = ("train_windows", "train_questions", "dev_questions")

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A column: `read` from a run's record; None: computed from other columns."""

    key: str
    title: str
    read: Callable[[Mapping[str, Any]], float | None] | None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _of_bubble(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda run: None if run["bubble"] is None else _percent(run["bubble"][key])


def _cpu_ms(run: Mapping[str, Any]) -> float:
    return 1e3 * float(sum(run["cpu_seconds"])) / int(run["samples"])


def _core_wait(run: Mapping[str, Any]) -> float | None:
    """Time that the ranks' threads waited for a core in training, in percent of the ranks'."""
    waits = run["core_wait_seconds"]
    if None in waits:
        return None
    return 100 * float(sum(waits)) / float(run["seconds"]["train"] * run["ranks"])


MEASURES = (
    Measure("samples_per_s", "samples/s", lambda run: float(run["samples_per_s"]["train"])),
    Measure("noise_scale", "noise scale, samples", lambda run: run["plain_noise_scale"]),
    Measure("efficiency", "stat. efficiency", None),
    Measure("goodput", "goodput, samples/s", None),
    Measure("validation_loss", "validation loss", lambda run: float(run["validation_loss"])),
    Measure("exact_match", "exact match, %", lambda run: float(run["exact_match"])),
    Measure("f1", "F1, %", lambda run: float(run["f1"])),
    Measure("bubble_measured", "bubble, %", _of_bubble("measured")),
    Measure("bubble_formula", "by formula, %", _of_bubble("formula")),
    Measure("cpu_ms", "CPU ms a sample", _cpu_ms),
    Measure("core_wait", "waited for a core, %", _core_wait),
    Measure(
        "memory_mib",
        "memory, MiB a rank",
        lambda run: max(run["peak_memory_bytes"], default=0) / MIB,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run. `values` are those of MEASURES in its record; None is unknown.

    `settings` are those that it was given, `same` holds what runs must share to be compared.
    """

    engine: str
    ranks: int
    seed: int
    device: str
    cores: int
    settings: dict[str, Any]
    same: dict[str, Any]
    global_batch: int
    losses: tuple[float | None, ...]
    values: Values
    timeline: tuple[Span, ...]

    @property
    def is_comparable(self) -> bool:
        """True if its times mean anything: on a CPU no more ranks than cores."""
        return self.device != "cpu" or self.ranks <= self.cores


def read_run(directory: Path) -> RunRecord:
    """The record in a run's directory. Raises DataError if it is missing or invalid."""
    path = directory / RESULT
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {found['schema_version']}, not {SCHEMA_VERSION}")
        return RunRecord(
            **{name: found[name] for name in ("engine", "ranks", "seed", "device", "cores")},
            settings=found["settings"],
            same=_same(found),
            global_batch=int(found["settings"]["global_batch"]),
            losses=tuple(found["losses"]),
            values={each.key: each.read(found) for each in MEASURES if each.read is not None},
            timeline=tuple(Span(**span) for span in found["timeline"]),
        )
    except FileNotFoundError:
        raise DataError(str(path), "is missing: the run has not ended", _REMEDY) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = one_line(f"is no record of a run ({type(error).__name__}: {error})")
        raise DataError(str(path), problem, _REMEDY) from None


def _same(run: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that must not differ: all settings but the batch and those that follow from it."""
    names = ("device", "processor", "cores", "precision", "samples", "init")
    found = {name: run[name] for name in names}
    for name in ("model", "data", "settings"):
        found |= {
            f"{name}.{key}": value
            for key, value in run[name].items()
            if name != "settings" or key not in _MAY_DIFFER
        }
    return found


_Group = dict[int, RunRecord]  # runs of one engine at one batch, by seed


def compare_runs(runs: Sequence[RunRecord], initial_batch: int) -> dict[str, Any]:
    """The comparison of runs as plain values for JSON; engines in the order of their first runs.

    `initial_batch` is M0 of the statistical efficiency, in samples. A mean is an object of `mean`,
    `half_width` (of its interval, null for one seed) and `count` (of seeds), null if unknown.

    Raises ConfigError if there are no runs; DataError if they do not share data, model, weights,
    machine, precision and samples, or an engine has a seed twice.
    """
    if not runs:
        raise ConfigError("--engines", "no run has ended", "let one end")
    _check_same(runs)
    groups: dict[tuple[str, int], _Group] = {}
    for run in runs:
        group = groups.setdefault((run.engine, run.global_batch), {})
        if run.seed in group:
            problem = f"has two runs with seed {run.seed}"
            raise DataError(run.engine, problem, "compare runs of one comparison only")
        group[run.seed] = run
    first = next(iter(groups.values()))
    first_of_batch: dict[int, _Group] = {}
    for (_, batch), group in groups.items():
        first_of_batch.setdefault(batch, group)
    return {
        "schema_version": SCHEMA_VERSION,
        "engines": [
            _engine(group, first, first_of_batch[batch], initial_batch)
            for (_, batch), group in groups.items()
        ],
        "units": {measure.key: measure.title for measure in MEASURES},
        "interval": "half of a 95 % interval by Student's t over seeds",
        "initial_batch": initial_batch,
        "same_in_all_runs": runs[0].same,
    }


def _check_same(runs: Sequence[RunRecord]) -> None:
    """Raise DataError if runs to compare differ in what they must share."""
    for run in runs[1:]:
        for key in sorted(run.same.keys() | runs[0].same.keys()):
            first, other = runs[0].same.get(key), run.same.get(key)
            if first != other:
                problem = f"{key} is {other!r} with seed {run.seed}, {first!r} of {runs[0].engine}"
                raise DataError(run.engine, problem, "compare runs of one comparison only")


def _engine(
    group: _Group, first: _Group, first_of_batch: _Group, initial_batch: int
) -> dict[str, Any]:
    """An engine at one global batch: means over seeds, and its rate over the first engine's.

    `loss_difference` is the largest absolute one in any update of any seed, to the first engine of
    the same batch; None if there is nothing to compare with.
    """
    run = next(iter(group.values()))
    own = {seed: _measured(each, initial_batch) for seed, each in group.items()}
    comparable = all(each.is_comparable for each in [*group.values(), *first.values()])
    seeds = sorted(group.keys() & first.keys()) if comparable and group is not first else ()
    ratios = [_ratio(group[seed], first[seed]) for seed in seeds]
    return {
        "engine": run.engine,
        "ranks": run.ranks,
        "global_batch": run.global_batch,
        "seeds": sorted(group),
        "comparable": run.is_comparable,
        "values": {each.key: _mean(own[seed][each.key] for seed in group) for each in MEASURES},
        "over_first": _mean(ratios),
        "loss_difference": _loss_difference(group, first_of_batch),
    }


def _measured(run: RunRecord, initial_batch: int) -> Values:
    """The values of MEASURES: those read, and those computed from them."""
    noise, rate, worth = run.values["noise_scale"], run.values["samples_per_s"], None
    if run.global_batch == initial_batch:
        worth = 1.0  # whatever the noise, known or not
    elif noise is not None:
        worth = efficiency(noise, initial_batch, run.global_batch)
    goodput = None if worth is None or rate is None else rate * worth
    return run.values | {"efficiency": worth, "goodput": goodput}


def _ratio(own: RunRecord, first: RunRecord) -> float | None:
    rate, base = own.values["samples_per_s"], first.values["samples_per_s"]
    return rate / base if rate is not None and base else None


def _loss_difference(group: _Group, first: _Group) -> float | None:
    if group is first:
        return None
    found = [
        abs(own - other)
        for seed in group.keys() & first.keys()
        for own, other in zip(group[seed].losses, first[seed].losses, strict=False)
        if own is not None and other is not None
    ]
    return max(found, default=None)


def _mean(values: Iterable[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, half_width = mean_and_half_width(known)
    return {"mean": mean, "half_width": half_width, "count": len(known)}


def in_words(comparison: Mapping[str, Any]) -> str:
    """The table and its notes, for the terminal and for table.md.

    `comparison` is the record of `compare_runs`.
    """
    engines, titles = comparison["engines"], list(comparison["units"].values())
    first = engines[0]["engine"]
    header = ["engine", titles[0], f"over {first}", *titles[1:], "any update's loss, at most"]
    several = len({each["global_batch"] for each in engines}) > 1
    rows = []
    for each in engines:
        rate, *others = (with_interval(value) for value in each["values"].values())
        difference = each["loss_difference"]
        loss = _NOTHING if difference is None else f"{difference:.1e}" if difference else "0"
        over_first = with_interval(each["over_first"])
        rows.append([_label(each, several), rate, over_first, *others, loss])
    return "\n".join([*markdown(header, rows), "", *_notes(comparison)])


def _label(engine: Mapping[str, Any], several_batches: bool) -> str:
    batch = f", batch {engine['global_batch']}" if several_batches else ""
    return f"{engine['engine']}{batch}" + ("" if engine["comparable"] else f" {MARK}")


def with_interval(value: Mapping[str, Any] | None) -> str:
    """A mean such as `12.34 ± 0.41`; alone if it has no interval beyond rounding."""
    if value is None:
        return _NOTHING
    mean, half = float(value["mean"]), value["half_width"]
    if not half or half < _ROUNDING * abs(mean):
        return _number(mean)
    places = 1 - math.floor(math.log10(half))  # two digits of half the interval
    if places > _PLACES + 1:
        return f"{_number(mean)} ± {_number(half)}"
    return f"{mean:,.{max(0, places)}f} ± {half:,.{max(0, places)}f}"


def _number(value: float) -> str:
    """A number with four significant digits, or all before the point; small ones as 1.2e-05."""
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    text = f"{value:,.{max(0, _PLACES - whole)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _notes(comparison: Mapping[str, Any]) -> Iterator[str]:
    same, engines = comparison["same_in_all_runs"], comparison["engines"]
    windows, questions, to_evaluate = (f"{same[f'data.{name}']:,}" for name in _DATA)
    seeds = sorted({seed for each in engines for seed in each["seeds"]})
    yield one_line(
        f"{same['model.layers']} layers, hidden {same['model.hidden']}; {windows} windows of "
        f"{questions} questions to train on, {to_evaluate} questions to evaluate; "
        f"{same['samples']:,} samples, {same['precision']}, seeds {', '.join(map(str, seeds))}; "
        f"{same['device']}, {same['cores']} cores, {same['processor']}."
    )
    most = max(len(each["seeds"]) for each in engines)
    yield "±: half of a 95 % interval over the seeds." if most > 1 else "One seed: no intervals."
    for each in engines:
        if len(each["seeds"]) < most:
            name = _label(each, several_batches=True)
            yield f"{name}: {len(each['seeds'])} of {most} seeds, as the others have not ended."
    if not all(each["comparable"] for each in engines):
        yield (
            f"{MARK} More ranks than cores: its times and rates are not comparable, its losses and "
            "scores are."
        )
    initial = comparison["initial_batch"]
    yield (
        f"Statistical efficiency: (phi + M0) / (phi + M) of a batch of M, M0 = {initial} samples, "
        "phi the noise scale; goodput: samples/s times it."
    )
    if {each["global_batch"] for each in engines} == {initial}:
        yield (
            "All engines make the same updates of M = M0 samples, so it is 1 for each, whatever "
            "the noise: how the work is spread over ranks changes throughput alone."
        )

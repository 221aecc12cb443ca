"""Read the records of fine-tuning runs, compare them in one JSON record, and format it as a table.

This module does not import torch. Confidence intervals are 95% intervals by Student's t over seeds.
The ratio to the first engine is computed separately for each seed, because runs with the same seed
have the same data, order and initial weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.common.results import markdown, mean_and_half_width
from bert_tools.squad.measures import efficiency
from mlperf_bert.errors import ConfigError, DataError, one_line
from mlperf_bert.files import check_version, read_json, reading

RESULT = "squad_result.json"
SCHEMA_VERSION = 3  # for runs and for comparisons
MARK = "†"
UNITS = {
    "samples_per_s": "samples/s",
    "noise_scale": "noise scale, samples",
    "efficiency": "stat. efficiency",
    "goodput": "goodput, samples/s",
    "validation_loss": "validation loss",
    "exact_match": "exact match, %",
    "f1": "F1, %",
    "bubble_measured": "bubble, %",
    "memory_mib": "memory, MiB per rank",
}
_NOTHING = "-"
_REMEDY = "pass the directory of a finished run of this version's `squad train`"
_SAME = ("device", "processor", "cores", "samples", "init")
# Settings that may differ are the batch, those that depend on it, and what is measured.
_MAY_DIFFER = ("global_batch", "updates", "learning_rate", "noise_every")
_ROUNDING = 1e-9  # a half width below this fraction of the mean is rounding error

Run = dict[str, Any]  # the record of a run
_Group = dict[int, Run]  # runs of one engine with one batch, by seed


def read_run(directory: Path) -> Run:
    """Read the record in a run's directory.

    Raises DataError if the record is missing or has another version.
    """
    path = directory / RESULT
    run = read_json(path, missing="is missing, because the run is not finished", remedy=_REMEDY)
    with reading(path, _REMEDY):
        check_version(run, SCHEMA_VERSION, key="schema_version")
    return run


def is_comparable(run: Run) -> bool:
    """Return whether the times of a run can be compared with those of other runs.

    On a CPU, this requires at least one core per rank.
    """
    return bool(run["device"] != "cpu" or run["ranks"] <= run["cores"])


def compare_runs(runs: Sequence[Run], initial_batch: int) -> dict[str, Any]:
    """Compare runs, and return the record of the comparison as plain values for JSON.

    Engines are in the order of their first runs. `initial_batch` is M0 of the statistical
    efficiency, in samples. The record gives a mean as an object with `mean`, `half_width` (of its
    confidence interval, null for a single seed) and `count` (number of seeds), or as null if the
    value of any seed is unknown.

    Raises:
        ConfigError: there are no runs.
        DataError: the runs differ in data, model, weights, machine, precision or samples, or an
            engine has a seed twice.
    """
    if not runs:
        raise ConfigError("--engines", "no run is finished", "finish at least one run first")
    check_same(runs)
    groups: dict[tuple[str, int], _Group] = {}
    for run in runs:
        group = groups.setdefault((run["engine"], run["settings"]["global_batch"]), {})
        if run["seed"] in group:
            problem = f"has two runs with seed {run['seed']}"
            raise DataError(run["engine"], problem, "pass one run per engine, batch and seed")
        group[run["seed"]] = run
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
        "units": UNITS,
        "interval": "half of a 95% interval by Student's t over seeds",
        "initial_batch": initial_batch,
        "same_in_all_runs": _same(runs[0]),
    }


def check_same(runs: Sequence[Run]) -> None:
    """Raise DataError if runs differ in a value that must be the same for a comparison."""
    wanted = _same(runs[0])
    for run in runs[1:]:
        for key, value in _same(run).items():
            if value != wanted.get(key):
                problem = (
                    f"{key} is {value!r} with seed {run['seed']}, but {wanted.get(key)!r} for "
                    f"{runs[0]['engine']}"
                )
                raise DataError(run["engine"], problem, "pass another directory as --out")


def _same(run: Run) -> dict[str, Any]:
    """Return the values of a run that must be the same in all runs of a comparison.

    The values in _MAY_DIFFER are left out.
    """
    found = {name: run[name] for name in _SAME}
    for part in ("model", "data", "settings"):
        found |= {f"{part}.{key}": run[part][key] for key in run[part] if key not in _MAY_DIFFER}
    return found


def _engine(
    group: _Group, first: _Group, first_of_batch: _Group, initial_batch: int
) -> dict[str, Any]:
    """Return an engine's means over seeds at one batch, and its rate relative to the first engine.

    In the result, `loss_difference` is the largest absolute difference between the losses of this
    engine and those of the first engine with the same batch, update and seed. It is None if there
    is no such run to compare with.
    """
    run = next(iter(group.values()))
    own = [_values(each, initial_batch) for each in group.values()]
    comparable = all(is_comparable(each) for each in [*group.values(), *first.values()])
    seeds = sorted(group.keys() & first.keys()) if comparable and group is not first else ()
    ratios = [group[seed]["samples_per_s"] / first[seed]["samples_per_s"] for seed in seeds]
    differences = [
        abs(loss - other)
        for seed in group.keys() & first_of_batch.keys()
        for loss, other in zip(group[seed]["losses"], first_of_batch[seed]["losses"], strict=True)
    ]
    return {
        "engine": run["engine"],
        "ranks": run["ranks"],
        "global_batch": run["settings"]["global_batch"],
        "seeds": sorted(group),
        "comparable": is_comparable(run),
        "values": {key: _mean(each[key] for each in own) for key in UNITS},
        "over_first": _mean(ratios),
        "loss_difference": None if group is first_of_batch else max(differences, default=None),
    }


def _values(run: Run, initial_batch: int) -> dict[str, float | None]:
    """Return the values of one run that UNITS lists, or None for each unknown value.

    Efficiency and goodput are computed from the run's record. The record contains the other values.
    """
    batch, noise, worth = run["settings"]["global_batch"], run["noise_scale"], None
    if batch == initial_batch:
        worth = 1.0  # by definition, even if the noise is unknown
    elif noise is not None:
        worth = efficiency(noise, initial_batch, batch)
    goodput = None if worth is None else run["samples_per_s"] * worth
    return {key: run.get(key) for key in UNITS} | {"efficiency": worth, "goodput": goodput}


def _mean(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return the mean of the values, as the object that `compare_runs` describes.

    Returns None unless all values are known, so that all means of a row are over the same seeds.
    """
    found = list(values)
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return None
    mean, half_width = mean_and_half_width(known)
    return {"mean": mean, "half_width": half_width, "count": len(known)}


def in_words(comparison: Mapping[str, Any]) -> str:
    """Format the record of `compare_runs` as a Markdown table with notes below it."""
    engines, titles = comparison["engines"], list(comparison["units"].values())
    first = engines[0]["engine"]
    header = ["engine", titles[0], f"relative to {first}", *titles[1:], "max loss difference"]
    several = len({each["global_batch"] for each in engines}) > 1
    rows = []
    for each in engines:
        name = each["engine"] + (f", batch {each['global_batch']}" if several else "")
        name += "" if each["comparable"] else f" {MARK}"
        rate, *others = (with_interval(value) for value in each["values"].values())
        difference = each["loss_difference"]
        loss = _NOTHING if difference is None else f"{difference:.2g}"
        rows.append([name, rate, with_interval(each["over_first"]), *others, loss])
    return "\n".join([*markdown(header, rows), "", *_notes(comparison)])


def with_interval(value: Mapping[str, Any] | None) -> str:
    """Format a mean and the half-width of its confidence interval, such as `12.34 ± 0.41`.

    The half-width is omitted if it is only a rounding error.
    """
    if value is None:
        return _NOTHING
    mean, half = float(value["mean"]), value["half_width"]
    shown = f"{mean:,.0f}" if abs(mean) >= 1000 else f"{mean:.4g}"
    return shown if not half or half < _ROUNDING * abs(mean) else f"{shown} ± {half:.2g}"


def _notes(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Yield the notes below the table, which explain the comparison and its columns."""
    same, engines = comparison["same_in_all_runs"], comparison["engines"]
    seeds = sorted({seed for each in engines for seed in each["seeds"]})
    yield one_line(
        f"Model: {same['model.layers']} layers, hidden size {same['model.hidden']}. "
        f"Training: {same['samples']:,} samples in {same['settings.precision']} from "
        f"{same['data.train_windows']:,} windows of {same['data.train_questions']:,} questions, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}. "
        f"Evaluation: {same['data.dev_questions']:,} questions. "
        f"Machine: {same['device']}, {same['cores']} cores, {same['processor']}."
    )
    most = max(len(each["seeds"]) for each in engines)
    for each in engines:
        if len(each["seeds"]) < most:
            yield f"{each['engine']} ran with {len(each['seeds'])} of {most} seeds."
    if most > 1:
        yield "± is half of the 95% interval over the seeds."
    else:
        yield "There are no intervals, because there is only one seed."
    if not all(each["comparable"] for each in engines):
        yield (
            f"{MARK} marks engines with more ranks than cores. Their losses and scores are "
            "comparable, but their times and rates are not."
        )
    initial = comparison["initial_batch"]
    yield (
        f"Statistical efficiency is (phi + M0) / (phi + M) for a batch of M samples, where phi is "
        f"the noise scale and M0 = {initial} samples. Goodput is samples/s times this efficiency."
    )
    if {each["global_batch"] for each in engines} == {initial}:
        yield (
            "All engines make the same updates of M = M0 samples, so the efficiency of each is 1. "
            "How the work is spread over ranks changes only the throughput."
        )

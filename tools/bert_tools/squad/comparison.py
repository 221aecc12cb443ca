"""Records of fine-tuning runs, their comparison as one JSON record, and the table made of it.

No torch. Intervals are Student's, 95 %, over seeds; ratios to the first engine are taken seed by
seed, because runs of one seed have the same data, order and weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.common.results import markdown, mean_and_half_width
from bert_tools.squad.measures import efficiency
from mlperf_bert.errors import ConfigError, DataError, one_line
from mlperf_bert.files import check_version, read_json, reading

RESULT = "squad_result.json"
SCHEMA_VERSION = 3  # of runs and of comparisons
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
    "memory_mib": "memory, MiB a rank",
}
_NOTHING = "-"
_REMEDY = "give the directory of a run that has ended, as `squad train` of this version wrote it"
_SAME = ("device", "processor", "cores", "samples", "init")
# Settings that may differ: the batch, those that follow from it, and what is measured.
_MAY_DIFFER = ("global_batch", "updates", "learning_rate", "noise_every")
_ROUNDING = 1e-9  # share of a mean; less is zero up to rounding

Run = dict[str, Any]  # the record of a run
_Group = dict[int, Run]  # runs of one engine at one batch, by seed


def read_run(directory: Path) -> Run:
    """The record in a run's directory. Raises DataError if it is missing or of another version."""
    path = directory / RESULT
    run = read_json(path, missing="is missing: the run has not ended", remedy=_REMEDY)
    with reading(path, _REMEDY):
        check_version(run, SCHEMA_VERSION, key="schema_version")
    return run


def is_comparable(run: Run) -> bool:
    """True if its times mean anything: on a CPU no more ranks than cores."""
    return bool(run["device"] != "cpu" or run["ranks"] <= run["cores"])


def compare_runs(runs: Sequence[Run], initial_batch: int) -> dict[str, Any]:
    """The comparison of runs as plain values for JSON; engines in the order of their first runs.

    `initial_batch` is M0 of the statistical efficiency, in samples. A mean is an object of `mean`,
    `half_width` (of its interval, null for one seed) and `count` (of seeds), null if unknown.

    Raises ConfigError if there are no runs; DataError if they do not share data, model, weights,
    machine, precision and samples, or an engine has a seed twice.
    """
    if not runs:
        raise ConfigError("--engines", "no run has ended", "let one end")
    check_same(runs)
    groups: dict[tuple[str, int], _Group] = {}
    for run in runs:
        group = groups.setdefault((run["engine"], run["settings"]["global_batch"]), {})
        if run["seed"] in group:
            problem = f"has two runs with seed {run['seed']}"
            raise DataError(run["engine"], problem, "compare runs of one comparison only")
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
        "interval": "half of a 95 % interval by Student's t over seeds",
        "initial_batch": initial_batch,
        "same_in_all_runs": _same(runs[0]),
    }


def check_same(runs: Sequence[Run]) -> None:
    """Raise DataError if runs to compare differ in what they must share."""
    wanted = _same(runs[0])
    for run in runs[1:]:
        for key, value in _same(run).items():
            if value != wanted.get(key):
                problem = f"{key} is {value!r} with seed {run['seed']}"
                problem += f", {wanted.get(key)!r} of {runs[0]['engine']}"
                raise DataError(run["engine"], problem, "compare runs of one comparison only")


def _same(run: Run) -> dict[str, Any]:
    """Facts that must not differ: all settings but the batch and those that follow from it."""
    found = {name: run[name] for name in _SAME}
    for part in ("model", "data", "settings"):
        found |= {f"{part}.{key}": run[part][key] for key in run[part] if key not in _MAY_DIFFER}
    return found


def _engine(
    group: _Group, first: _Group, first_of_batch: _Group, initial_batch: int
) -> dict[str, Any]:
    """An engine at one global batch: means over seeds, and its rate over the first engine's.

    `loss_difference` is the largest absolute one in any update of any seed, to the first engine of
    the same batch; None if there is nothing to compare with.
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
    """The values of UNITS: those of the record, and those computed from them."""
    batch, noise, worth = run["settings"]["global_batch"], run["noise_scale"], None
    if batch == initial_batch:
        worth = 1.0  # whatever the noise, known or not
    elif noise is not None:
        worth = efficiency(noise, initial_batch, batch)
    goodput = None if worth is None else run["samples_per_s"] * worth
    return {key: run.get(key) for key in UNITS} | {"efficiency": worth, "goodput": goodput}


def _mean(values: Iterable[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, half_width = mean_and_half_width(known)
    return {"mean": mean, "half_width": half_width, "count": len(known)}


def in_words(comparison: Mapping[str, Any]) -> str:
    """The table and its notes. `comparison` is the record of `compare_runs`."""
    engines, titles = comparison["engines"], list(comparison["units"].values())
    first = engines[0]["engine"]
    header = ["engine", titles[0], f"over {first}", *titles[1:], "any update's loss, at most"]
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
    """A mean such as `12.34 ± 0.41`; alone if it has no interval beyond rounding."""
    if value is None:
        return _NOTHING
    mean, half = float(value["mean"]), value["half_width"]
    shown = f"{mean:,.0f}" if abs(mean) >= 1000 else f"{mean:.4g}"
    return shown if not half or half < _ROUNDING * abs(mean) else f"{shown} ± {half:.2g}"


def _notes(comparison: Mapping[str, Any]) -> Iterator[str]:
    same, engines = comparison["same_in_all_runs"], comparison["engines"]
    seeds = sorted({seed for each in engines for seed in each["seeds"]})
    yield one_line(
        f"{same['model.layers']} layers, hidden {same['model.hidden']}; "
        f"{same['data.train_windows']:,} windows of {same['data.train_questions']:,} questions to "
        f"train on, {same['data.dev_questions']:,} questions to evaluate; {same['samples']:,} "
        f"samples, {same['settings.precision']}, seeds {', '.join(map(str, seeds))}; "
        f"{same['device']}, {same['cores']} cores, {same['processor']}."
    )
    most = max(len(each["seeds"]) for each in engines)
    for each in engines:
        if len(each["seeds"]) < most:
            yield f"{each['engine']}: {len(each['seeds'])} of {most} seeds."
    if most > 1:
        yield "±: half of a 95 % interval over the seeds."
    else:
        yield "One seed: no intervals."
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

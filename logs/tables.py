"""Tables of the documents, each from the data of its log: `python logs/tables.py NAME`.

`make docs-tables` puts them where they are shown. Figures are those of the data, rounded; words
and the choice of rows are this file's.
"""

import csv
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bert_tools.common.log_reader import RunLog, read_log
from bert_tools.common.results import mean_and_half_width, olympic_mean
from bert_tools.plan.law import local_exponents

LOGS = Path(__file__).parent
Rows = list[list[str]]  # the first is the head


def text(name: str) -> str:
    """A file below logs/."""
    return (LOGS / name).read_text(encoding="utf-8")


def lines(name: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in text(name).splitlines()]


def shown_in(name: str, number: int) -> Rows:
    """Table `number`, from 0, of a Markdown file that a study wrote; the second row aligns it."""
    tables = re.findall(r"(?:^\|.*\n)+", text(name), re.MULTILINE)
    rows = re.sub("-{3,}", "---", tables[number]).splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def memory() -> Rows:
    """BERT-large on one rank: GiB that are saved, needed at most, and what fits."""
    head = ["", "sequences", "tokens", "saved", "peak", "needs", "80 GB (79.0 GiB)"]
    rows, last = [head], ""
    for line in text("2026-11-22-memory/large.txt").splitlines()[1:]:
        precision, batch, tokens, _, saved, _, peak, _, _, needs, at_80, at_141 = line.split()
        if int(batch) <= int(at_80):
            fits = f"fits; at most {at_80}"
        else:
            fits = "refused" + ("; fits in 141 GB" if int(batch) <= int(at_141) else "")
        shown = "" if precision == last else precision
        rows.append([shown, batch, f"{int(tokens):,}", saved, peak, needs, fits])
        last = precision
    return rows


def published_samples() -> Rows:
    """Samples to target of BERT-large, by batch, that closed submissions with LAMB published."""
    points = LOGS.parent / "tools" / "bert_tools" / "plan" / "samples_points.csv"
    rows = csv.DictReader(line for line in points.read_text().splitlines() if line[0] != "#")
    return [
        ["global batch", "samples to target, millions", "source"],
        *(
            [
                f"{int(row['global_batch_size']):,}",
                f"{int(row['samples']) / 1e6:.2f}",
                row["source"],
            ]
            for row in rows
            if row["recipe"] == "closed_lamb"
        ),
    ]


def optimizer() -> Rows:
    """Updates while a loop over the tensors does one."""
    found = {}
    for rule, name, ratio, low, middle, high in re.findall(
        r"^(lamb|adamw) +(.+?) {2,}[\d.]+ +([\d.]+) +([\d.]+), ([\d.]+), ([\d.]+) ",
        text("2026-11-21-optimizer/optimizer.txt"),
        re.MULTILINE,
    ):
        found[rule, name] = ratio, f"({low}, {middle}, {high})"
    rows = [["update", "LAMB", "AdamW"], ["ours, on flat buffers"]]
    rows[1] += ["**{}** {}".format(*found[rule, "flat buffers"]) for rule in ("lamb", "adamw")]
    for name in ("torch.optim.AdamW(fused=True)", "torch.optim.AdamW(foreach=True)"):
        rows.append([f"`{name}`", "", " ".join(found["adamw", name])])
    return rows


def overlap() -> Rows:
    """What each clip policy leaves of the communication in sight, against `none`."""
    small, large = json.loads(text("2026-11-21-overlap/overlap.json"))["cases"]
    cells: dict[str, list[str]] = {}
    for case in (small, large):
        by_mode = {each["mode"]: each for each in case["exposures"]}
        none = by_mode["none"]
        for mode in (each["mode"] for each in small["exposures"]):
            each = by_mode.get(mode)
            row = cells.setdefault(mode, [])
            if each and case is small:
                row.append(f"{each['step_ms'] / each['alone_ms']:.2f}")
            ratios = each and [each[key] / none[key] for key in ("exposed_ms", "paired_ms")]
            row.append("{:.2f} ({:.2f})".format(*ratios) if ratios else "")
    names = {"none, no hook": "`none`, without a hook", "none": "`none`, by torch's hook"}
    head = ["clip policy", "step / the same with nothing sent", "exposed / that of `none`"]
    head.append("vocabulary 30,522 (no bar)")
    return [head, *([names.get(mode, f"`{mode}`"), *row] for mode, row in cells.items())]


def preparation() -> Rows:
    """Making examples, plain and compiled."""
    found = text("2026-11-21-proof/prepare.txt")
    rates = re.findall(r"^ *(\w+): +([\d,]+) examples/s;.* peak (\d+) MB", found, re.MULTILINE)
    whole, alone = re.findall(r"([\d.]+) x", found)
    (_, plain, plain_mb), (_, compiled, compiled_mb) = rates
    return [
        ["example making", "whole", "making alone", "peak memory"],
        ["plain Python (`tests/plain_examples.py`)", f"{plain} examples/s", "", f"{plain_mb} MB"],
        [
            "compiled",
            f"{compiled} examples/s, **{whole} times**",
            f"{alone} times",
            f"{compiled_mb} MB",
        ],
    ]


SIZES = {
    "1024 x 16": "128x8x16",
    "1368 x 12": "171x8x12",
    "64 x 48": "8x8x48",
    "64 x 16": "8x8x16",
    "8 x 56": "1x8x56",
}
BALANCED = {  # sampler, policy, deal
    "`uniform`, `none`": ("uniform", "none", None),
    "published counts, `exchange_local`, snake": ("published", "exchange_local", "snake"),
    "`uniform`, `exchange_global`, snake": ("uniform", "exchange_global", "snake"),
    "`uniform`, `presort_global`": ("uniform", "presort_global", None),
    "**`quantile`, `presort_global`**": ("quantile", "presort_global", None),
}


def planned(size: str, sampler: str, policy: str, deal: str | None) -> dict[str, Any]:
    """A row of `plan balance` with equal counts. Published are 4/2/2/4 of 12 and 6/3/2/5."""
    if sampler == "published":
        sampler = "strata_4_2_2_4" if size.endswith(" x 12") else "strata_6_3_2_5"
    wanted = (sampler, policy, deal, "equal")
    keys = ("sampler", "policy", "deal", "counts_per_rank")
    rows = json.loads(text(f"2026-11-21-presort/balance_{SIZES[size]}.json"))["rows"]
    return next(row for row in rows if tuple(row[key] for key in keys) == wanted)


def balance() -> Rows:
    """Mean imbalance in tokens."""
    rows = [["", *SIZES]]
    for name, wanted in BALANCED.items():
        rows.append([name, *(f"{planned(s, *wanted)['imbalance_tokens']:.4f}" for s in SIZES)])
    return rows


def capacity() -> Rows:
    """What one capacity for all draws wastes, `quantile` with `presort_global`."""
    rows = [["", *SIZES]]
    for name, key in (("tokens", "capacity_waste"), ("masked positions", "capacity_waste_masked")):
        found = [planned(size, "quantile", "presort_global", None)[key] for size in SIZES]
        rows.append([name, *(f"{100 * waste:.2f} %" for waste in found)])
    return rows


def _number(shown: str) -> float:
    return float(shown.replace(",", ""))


def loaders() -> Rows:
    """Batches a second of each loader; in brackets how many times as fast ours is."""
    pattern = r"^(\w+) +(warm|cold) +(\d+) +([\d,]+) "
    found = re.findall(pattern, text("2026-11-21-presort/loader.txt"), re.MULTILINE)
    rows: dict[tuple[str, str], list[str]] = {}
    for _, cache, batch, rate in found:
        row = rows.setdefault((cache, batch), [])
        ratio = _number(row[0]) / _number(rate) if row else 1.0
        row.append(f"{rate} ({ratio:.{0 if ratio >= 10 else 1}f})" if row else rate)
    head = ["", "ours", "dali", "DataLoader, 1 worker", "2 workers"]
    place = {"warm": "in memory", "cold": "cold file"}
    order = sorted(rows, key=lambda key: key[0] == "cold")
    return [head, *([f"{key[1]} sequences, {place[key[0]]}", *rows[key]] for key in order)]


def readers() -> Rows:
    """Share of a step that training waits for reader processes."""
    found = re.findall(r"^(\w+) .*= +([\d.]+)%", text("2026-11-21-presort/readers.txt"), re.M)
    shares: dict[str, list[str]] = {}
    for policy, share in found:
        shares.setdefault(policy, [f"`{policy}`"]).append(f"{share} %")
    return [["policy", "waiting, as read", "waiting, slowed"], *shares.values()]


def sensitivity(head: str, rows: Iterable[tuple[str, str]]) -> Rows:
    """The largest deviations of the golden traces among the cases that a pattern names."""
    found = re.findall(r"^(.*): loss (\S+), gradient norm (\S+)$", text(SENSITIVITY), re.MULTILINE)
    table = [[head, "loss", "gradient norm, relative"]]
    for name, pattern in rows:
        cases = [pair for case, *pair in found if re.search(pattern, case)]
        largest = (max(map(float, column)) for column in zip(*cases, strict=True))
        table.append([name, *(f"{value:.1e}".replace("e-0", "e-") for value in largest)])
    return table


SENSITIVITY = "2026-11-21-proof/sensitivity.txt"
ORDERS = (
    ("2 or 4 ranks for 1", r"[24] rank"),
    ("2 threads for 1", "2 threads"),
    ("torch's kernels for AVX2, or for no vector unit", "torch's kernels"),
    ("matrix products limited to AVX2, or to SSE4", "products limited"),
    ("padded reference attention for the grouped one", "reference attention"),
)
CHANGES = (
    ("AdamW beta 2 0.999 to 0.9991", "beta_2"),
    ("AdamW epsilon 1e-6 to 1.1e-6", "adamw, .*epsilon"),
    ("AdamW weight decay 0.01 to 0.011", "adamw, .*weight_decay"),
    ("LAMB epsilon 1e-6 to 1.1e-6", "lamb, .*epsilon"),
    ("LAMB weight decay 0.01 to 0.011", "lamb, .*weight_decay"),
    ("clipping at 1.01 for 1 (AdamW)", "clip.max_norm"),
    ("learning rate 0.1 % higher (AdamW)", "learning_rate"),
)


def communication() -> Rows:
    """16-bit sums: gradients that each rank divided before."""
    head, _, *rows = shown_in("2026-11-21-communication-precision/table.md", 0)
    head[3:] = ["16 ranks", "64", "256", "1,024"]
    return [head, *([*row[:2], row[2].split(",")[0], *row[3:]] for row in rows if "," in row[2])]


def tuned() -> Rows:
    """Samples to the target on fresh seeds."""
    names = {"best adamw": "best AdamW", "best lamb": "best LAMB"}
    study = json.loads(text("2026-11-22-tune/result.json"))
    by_seed = study["fresh_seeds"]
    seeds = ", ".join(map(str, by_seed[0]["seeds"]))
    head = ["config", f"samples to the target on seeds {seeds}", "mean", "fewer than the default"]
    rows = [[*head, "on the line between evaluations", "over the default's, by seed (95 %)"]]
    default = by_seed[0]["between"]
    for row in by_seed:
        each = ", ".join(f"{needed:,.0f}" for needed in row["needed"])
        line = f"{fmean(row['between']):,.0f}"
        fewer = "" if row["gain_percent"] is None else f"{row['gain_percent']:.1f} %"
        logs = [math.log(new / old) for old, new in zip(default, row["between"], strict=True)]
        mean, half = mean_and_half_width(logs)
        low, middle, high = (math.exp(mean + sign * (half or 0)) for sign in (-1, 0, 1))
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})" if any(logs) else ""
        name = names.get(row["subject"], row["subject"])
        rows.append([name, each, f"{row['mean']:,.0f}", fewer, line, ratio])
    return rows


FORMATS = {
    "tfrecord": "TFRecord",
    "tfrecord.gz": "TFRecord, gzip",
    "fixed.hdf5": "HDF5, fixed length",
    "fixed_gzip.hdf5": "HDF5, fixed length, gzip chunks",
    "ragged.hdf5": "HDF5, variable length",
    "packed.hdf5": "HDF5, packed",
}


def imports() -> Rows:
    """Reading examples that others made, format by format."""
    head = ["format", "file, MB", "examples a second", "a second of processor time"]
    rows = [[*head, "peak resident, MB (before)"]]
    for key, found in json.loads(text("2026-11-22-import/bench_import.json")).items():
        if isinstance(found, dict):
            rates = (found["examples"] / found[t] for t in ("seconds", "processor_seconds"))
            peak, before = (found[key] / 1e6 for key in ("peak_bytes", "start_peak_bytes"))
            row = [FORMATS.get(key, key), f"{found['file_bytes'] / 1e6:.1f}"]
            rows.append([*row, *(f"{rate:,.0f}" for rate in rates), f"{peak:.0f} ({before:.0f})"])
    return rows


def fuzzed(log: str, seconds: str, head: str) -> Rows:
    """What fuzzers of readers printed."""
    rows = [["parser", "inputs", "accepted", head, "growth, MiB"]]
    for row in lines(log):
        counts = [f"{row['inputs']:,}", f"{row['accepted']:,}"]
        rest = [f"{row[seconds]:.0f}", f"{row['growth_mib']:.0f}"]
        rows.append([f"`{row['parser']}`", *counts, *rest])
    return rows


def engines() -> Rows:
    """Largest differences of fine-tuning's engines to one rank."""
    kinds = {"fp64": "float64", "fp32": "float32", "dropout": "float64, dropout 0.1"}
    rows = [["engine", "precision", "updates", "loss", "gradient norm"]]
    for row in json.loads(text("2026-11-22-squad-engines/engines.json"))["equality"]:
        found = (row[f"largest_{name}_difference"] for name in ("loss", "grad_norm"))
        kind = [f"`{row['engine']}`", kinds[row["kind"]], str(row["updates"])]
        rows.append([*kind, *(f"{value:.1e}" for value in found)])
    return rows


def bubbles() -> Rows:
    """Bubbles of pipelines whose stages sleep."""
    names, rates = ["schedule", "stages", "microbatches"], ["measured", "formula"]
    rows = [[*names, *rates]]
    for row in json.loads(text("2026-11-22-squad-engines/engines.json"))["bubbles"]:
        rows.append([*(str(row[n]) for n in names), *(f"{row[n]:.3f}" for n in rates)])
    return rows


MOST_SLOPES = 4  # between more sizes they are noise


def laws() -> Rows:
    """The laws that were fitted, with what each was fitted to."""
    bend = "exponent between neighbouring sizes"
    rows = [["name", "filters", "law, minutes", "exponent (95 %)", bend]]
    for path in sorted((LOGS / "2026-11-22-scaling-law").glob("*.json")):
        law = json.loads(path.read_text())
        fitted = f"{law['coefficient_minutes']:#.4g} p^{law['exponent']:.3f}"
        interval = f"{law['exponent_low']:.2f} to {law['exponent_high']:.2f}"
        times = [(entry["accelerators"], entry["time_min"]) for entry in law["entries"]]
        slopes = local_exponents(times)
        bent = ", ".join(f"{slope:.2f}" for slope in slopes) if len(slopes) <= MOST_SLOPES else ""
        rows.append([f"`{path.stem}`", ", ".join(law["filters"]), fitted, interval, bent])
    return rows


def ten_runs() -> Rows:
    """Seed, samples, accuracy and time of each of the ten results."""
    rows = [["run", "seed", "samples to target", "accuracy", "minutes"]]
    for path in sorted((LOGS.parent / "results" / "cpu_2core_pytorch" / "bert").glob("*.txt")):
        log = read_log(path, path.name)
        evaluated = log.named("eval_accuracy")[-1]
        row = [path.stem.rpartition("_")[2], f"{log.last_number('seed')}"]
        row += [f"{evaluated.metadata['epoch_num']:,}", f"{evaluated.value:.4f}"]
        rows.append([*row, f"{seconds(log) / 60:.3f}"])
    return rows


def seconds(log: RunLog) -> float:
    """The time to train of an MLPerf log."""
    start, stop = (log.named(key)[-1].time_ms for key in ("run_start", "run_stop"))
    return (stop - start) / 1000


def records(track: str) -> Rows:
    """The records of a track, each from its ten MLPerf logs."""
    rows = [
        ["date", "processor", "median", "olympic mean", "all", "accuracy", "what changed", "log"]
    ]
    for record in tomllib.loads(text("records.toml"))["record"]:
        if record["track"] == track:
            paths = LOGS.parent.glob(f"{record['logs']}/result_*.txt")
            runs = [read_log(path, path.name) for path in paths]
            assert len({run.last_number("seed") for run in runs}) == len(runs) == 10
            accuracies = [run.named("eval_accuracy")[-1].value for run in runs]
            assert min(accuracies) >= record["target"]
            for run in runs:
                assert run.named("run_stop")[-1].metadata["status"] == "success"
                assert run.last_number("quality_target") == record["target"]
            times = sorted(map(seconds, runs))
            rows.append(
                [
                    str(record["date"]),
                    record["processor"],
                    f"**{median(times):.1f} s**",
                    f"{olympic_mean(times) / 60:.3f} min",
                    f"{times[0]:.1f} to {times[-1]:.1f} s",
                    f"at least {min(accuracies):.4f}",
                    record["changed"],
                    f"[log](../{record['log']})",
                ]
            )
    return rows


def noise() -> Rows:
    """The noise scales of five runs, in sequences, as their metrics have them."""
    rows = [["directory", "after steps", "`noise_scale`", "`noise_scale_plain`"]]
    steps = {"batch_32": (50, 300, 550, 1000), "batch_128": (150,)}
    for name in ("batch_32", "batch_128", "one_forward", "two_forwards"):
        found = {
            row["step"]: row for row in lines(f"2026-11-22-goodput/{name}/run_0/metrics.jsonl")
        }
        shown = [found[step] for step in steps.get(name, found)]
        columns = ((f"{row[key]:,.0f}" for row in shown) for key in NOISE)
        after = ", ".join(f"{row['step']:,}" for row in shown)
        rows.append([f"`{name}`", after, *(", ".join(column) for column in columns)])
    return rows


SYSTEMS = LOGS.parent / "systems"


def system(family: str) -> Rows:
    """The values of one node and of one GPU of a family, next to the pages that support them."""
    sources = tomllib.loads((SYSTEMS / "sources.toml").read_text(encoding="utf-8"))
    names = [f"{family}_n1_pytorch", f"{family}_n1x1_pytorch"]
    names = [name for name in names if (SYSTEMS / f"{name}.json").exists()]
    files = [json.loads((SYSTEMS / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    rows = [["field", *(f"`{name}`" for name in names), "source"]]
    for field in files[0]:
        pages = sources[family].get(field, [])
        links = ", ".join(f"[{page}]({sources['pages'][page]})" for page in pages)
        rows.append([f"`{field}`", *(file[field] for file in files), links])
    return rows


SMALL_BATCHES = {  # the ways of the table: sampler, policy, counts
    "published counts, `presort_local`": ("stratified_6_3_2_5", "presort_local", "equal"),
    "published counts, `presort_global`": ("stratified_6_3_2_5", "presort_global", "equal"),
    "`quantile`, `presort_local`": ("quantile", "presort_local", "equal"),
    "`quantile`, `presort_global`": ("quantile", "presort_global", "equal"),
    "`quantile`, `presort_global`, unequal counts": ("quantile", "presort_global", "unequal"),
}


def small_batches() -> Rows:
    """The imbalance of 1,024 ranks with few sequences each, by sampler and policy."""
    batches = (16, 8, 4, 2)
    rows = [["sequences per rank", *map(str, batches)]]
    for name, way in SMALL_BATCHES.items():
        cells = []
        for batch in batches:
            path = LOGS / f"2026-11-29-small-batches/balance_{batch}.json"
            found = [
                f"{row['imbalance_tokens']:.4f}"
                for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
                if (row["sampler"], row["policy"], row["counts_per_rank"]) == way
            ]
            cells += found or ["-"]
        rows.append([name, *cells])
    return rows


NOISE = ("noise_scale", "noise_scale_plain")
TABLES: dict[str, Callable[[], Rows]] = {
    "balance": balance,
    "bubbles": bubbles,
    "capacity": capacity,
    "clip": lambda: shown_in("2026-11-21-clip-policies/table.md", 0),
    "clip-buckets": lambda: shown_in("2026-11-21-clip-policies/table.md", 1),
    "clip-fresh": lambda: [
        row
        for row in shown_in("2026-11-21-clip-policies/table.md", 2)
        if row[0] in ("optimizer", "---", "all")
    ],
    "clip-over-none": lambda: [
        row
        for row in shown_in("2026-11-21-clip-policies/table.md", 3)
        if row[0] in ("optimizer", "---") or "16 buckets" in row[2]
    ],
    "clip-shares": lambda: [
        *shown_in("2026-11-21-clip-policies/third/table.md", 0),
        *(
            [*row[:2], f"{row[2]}, by size", *row[3:]]
            for row in shown_in("2026-11-21-clip-policies/table.md", 2)
            if row[0] == "all" and "16 buckets" in row[2]
        ),
    ],
    "communication": communication,
    "engines": engines,
    "fp8": lambda: shown_in("2026-11-21-fp8/table.md", 0),
    "fuzz": lambda: fuzzed("2026-11-22-fuzz/fuzz.jsonl", "seconds", "seconds"),
    "half": lambda: shown_in("2026-11-28-half-the-house/table.md", 0),
    "imports": imports,
    "laws": laws,
    "loaders": loaders,
    "memory": memory,
    "noise": noise,
    "optimizer": optimizer,
    "overlap": overlap,
    "plateau": lambda: shown_in("2026-11-21-positions/table.md", 1),
    "positions": lambda: shown_in("2026-11-21-positions/table.md", 0),
    "preparation": preparation,
    "published-samples": published_samples,
    "readers": readers,
    "sensitivity-changes": lambda: sensitivity("a change that must be noticed", CHANGES),
    "sensitivity-orders": lambda: sensitivity("other order of sums", ORDERS),
    "small-batches": small_batches,
    "suite": lambda: shown_in("2026-11-29-suite/table.md", 0),
    "suite-times": lambda: shown_in("2026-11-29-suite/table.md", 1),
    "records-2-cpu-cores": lambda: records("2 CPU cores"),
    "ten-runs": ten_runs,
    "system-dgxa100": lambda: system("dgxa100"),
    "system-h100": lambda: system("h100"),
    "system-h200": lambda: system("h200"),
    "tensorflow": lambda: fuzzed(
        "2026-11-22-tensorflow/fuzz.jsonl", "processor_seconds", "processor seconds"
    ),
    "tuned": tuned,
}


def markdown(rows: Rows) -> str:
    """The rows as a table."""
    if not set("".join(rows[1])) <= set(":-"):
        rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    aligned = [f"|{'|'.join(row)}|" if row is rows[1] else f"| {' | '.join(row)} |" for row in rows]
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(aligned))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TABLES:
        sys.exit(f"tables.py: error: name one table of {', '.join(TABLES)}")
    print(markdown(TABLES[sys.argv[1]]()))

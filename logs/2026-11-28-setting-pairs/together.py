"""Measures combinations of settings, and prints the tables of this log.

`together.py pairs|sharded|crashes RECORDS` measures; it takes minutes and writes a line of JSON for
each run or pair of runs. `together.py table array|pairs|sharded|crashes` prints a table of the
committed records.
"""

import json
import math
import re
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

LOG = Path(__file__).parent
sys.path[:0] = [str(LOG.parents[1] / "tests"), str(LOG.parents[1] / "tests" / "distributed")]

BLOCKS: dict[str, dict[str, Any]] = {
    "reference": {},
    "fused (interpreted)": {"model.kernels": "fused"},
    "FP8": {"model.precision": "fp8"},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BERT": {},
    "ModernBERT": {"model.architecture": "modern", "model.objective": "mlm"},
}
OPTIMIZERS = ("adamw", "lamb", "muon")
BUCKETS = {"one parameter each": 0.0001, "20 KB": 0.02}
LEFT_OUT = ("fused (interpreted)", "20 KB")
POLICIES = ("none", "exchange_global", "exchange_local")
REPETITIONS = 2


def measure_pairs(records: Path) -> None:
    """Train all rows of both covering arrays."""
    import setting_rows

    setting_rows.main(records)


def cases() -> list[tuple[str, str, str, str]]:
    """Blocks, model, optimizer and bucket; the interpreter is too slow for fused blocks in both."""
    every = product(BLOCKS, ARCHITECTURES, OPTIMIZERS, BUCKETS)
    return [case for case in every if (case[0], case[3]) != LEFT_OUT]


def settings_of(blocks: str, model: str) -> dict[str, Any]:
    """The settings of these blocks and this model, plain ones too."""
    plain = {"model.kernels": "auto", "model.precision": "fp32", "model.architecture": "bert"}
    return plain | BLOCKS[blocks] | ARCHITECTURES[model]


def measure_sharded(records: Path) -> None:
    """Train with a sharded optimizer and with a whole one, by every kind of blocks."""
    from setting_pairs import choices
    from setting_rows import make_sets, run_pairs

    plain = {name: values[0] for name, values in choices().items()}
    pairs = []
    for blocks, architecture, optimizer, bucket in cases():
        row = plain | BLOCKS[blocks] | ARCHITECTURES[architecture]
        row |= {"optim.name": optimizer, "parallel.bucket_cap_mb": BUCKETS[bucket]}
        how = "parallel.data_parallel"
        pairs.append((row | {how: "shard_world"}, row | {how: "flat"}))
    with tempfile.TemporaryDirectory() as name:
        sets = Path(name) / "sets"
        sets.mkdir()
        found = run_pairs(pairs, make_sets(sets), Path(name))
    records.write_text("".join(f"{json.dumps(each)}\n" for each in found))


def measure_crashes(records: Path) -> None:
    """Crash one rank of two in each place under each policy."""
    from crashing_rank import PLACES, crash_a_run
    from support import TINY_CONFIG, make_synthetic_data

    found = []
    with tempfile.TemporaryDirectory() as name:
        config, data = Path(name) / "tiny.toml", make_synthetic_data(Path(name))
        config.write_text(TINY_CONFIG)
        for number, (policy, place, _) in enumerate(product(POLICIES, PLACES, range(REPETITIONS))):
            crash = crash_a_run(config, data, Path(name) / f"run-{number}", policy, place)
            lines = re.findall(r"^mlperf_bert: error: (.*)$", crash.printed, re.MULTILINE)
            found.append(
                {
                    **{"policy": policy, "place": place, "statuses": crash.statuses},
                    **{"seconds": crash.seconds, "first_line": lines[0]},
                }
            )
    records.write_text("".join(f"{json.dumps(each)}\n" for each in found))


def read(name: str) -> list[dict[str, Any]]:
    """The committed records of this name."""
    return [json.loads(line) for line in (LOG / f"{name}.jsonl").read_text().splitlines()]


def shown(difference: float) -> str:
    """A relative difference of losses."""
    return f"{difference:.1e}" if math.isfinite(difference) else "not a number"


def table_pairs() -> list[list[str]]:
    """Results of the rows of both covering arrays, by how strictly they are compared."""
    _, *records = read("pairs")
    exact = [
        each
        for each in records
        if each["row"]["model.precision"] == "fp32"
        and each["row"]["parallel.allreduce_dtype"] in ("as_gradients", "fp32")
    ]
    rounded = [each for each in records if each not in exact]
    rows = [["rows", "number", "failed", "differ from what they are compared with", "largest"]]
    for name, of in (("fp32", exact), ("fewer bits", rounded)):
        failed = [each for each in of if each["problems"]]
        differing = [each for each in of if each["differs_in"]]
        largest = max(each["difference"] for each in of if not each["problems"])
        rows.append([name, *(str(len(each)) for each in (of, failed, differing)), shown(largest)])
    return rows


def table_array() -> list[list[str]]:
    """The size of the covering arrays."""
    head, *_ = read("pairs")
    return [
        ["array", "rows", "pairs that meet"],
        ["all settings", str(head["rows"][0]), f"{head['pairs'][0]:,}"],
        ["those that round to no fewer bits", str(head["rows"][1]), f"{head['pairs'][1]:,}"],
    ]


def table_sharded() -> list[list[str]]:
    """Largest difference between a sharded and a whole optimizer, before and after."""
    rows = [["blocks", "model", "bucket", "before", "after"]]
    before, after = read("sharded_before"), read("sharded")
    for blocks, model, bucket in product(BLOCKS, ARCHITECTURES, BUCKETS):
        wanted = {"parallel.bucket_cap_mb": BUCKETS[bucket]}
        wanted |= settings_of(blocks, model)
        cells = []
        for records in (before, after):
            of = [
                each["difference"]
                for each in records
                if all(each["row"][name] == value for name, value in wanted.items())
            ]
            cells.append(f"{shown(max(of))} ({len(of)})" if of else "not run")
        if (blocks, bucket) != LEFT_OUT:
            rows.append([blocks, model, bucket, *cells])
    return rows


def table_crashes() -> list[list[str]]:
    """Seconds from an error to the end of the last rank."""
    before, after = read("crashes_before"), read("crashes")
    rows = [["error in", *(f"`{policy}`" for policy in POLICIES)]]
    for place in dict.fromkeys(each["place"] for each in after):
        cells = []
        for policy in POLICIES:
            of = [
                [
                    each["seconds"]
                    for each in when
                    if (each["place"], each["policy"]) == (place, policy)
                ]
                for when in (before, after)
            ]
            cells.append(" -> ".join(f"{max(seconds):.1f}" for seconds in of))
        rows.append([place, *cells])
    return rows


TABLES = {
    "array": table_array,
    "pairs": table_pairs,
    "sharded": table_sharded,
    "crashes": table_crashes,
}
MEASURES = {"pairs": measure_pairs, "sharded": measure_sharded, "crashes": measure_crashes}


def main() -> None:
    """Do what the arguments say."""
    if sys.argv[1] == "table":
        rows = TABLES[sys.argv[2]]()
        rows.insert(1, ["---"] * len(rows[0]))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return
    MEASURES[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()

"""Parsers of runs' files: logs, metrics, outcome, a directory, result trees, published tables.

Every page of `report` is checked as a browser would read it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fuzz_mutations import mutate_bytes, mutate_json, mutate_lines, mutate_toml
from fuzz_world import Parser, files

from bert_tools.common.log_reader import TOKEN, read_foreign_log, read_log
from bert_tools.package.plausibility import check_course
from bert_tools.package.run_facts import read_facts as read_log_facts
from bert_tools.plan.entries import COLUMNS, Entry, Skipped, read_table
from bert_tools.plan.law import in_words
from bert_tools.plan.log_tree import read_tree
from bert_tools.plan.scaling_law import fit_law, marginal_cost
from bert_tools.report.charts import charts_of
from bert_tools.report.doctor import diagnose
from bert_tools.report.facts import read_facts
from bert_tools.report.measures import as_json, lines_of
from bert_tools.report.page import report_page
from bert_tools.report.run import read_run
from bert_tools.report.run_files import find_runs, only_run, read_metrics
from bert_tools.report.watch_frame import frame, status_line
from bert_tools.report.watch_look import Watcher
from log_trees import write_system
from mlperf_bert.common.errors import DataError
from mlperf_bert.run.outcome import RunOutcome, read_outcome
from report_pages import checked
from submissions import write_log
from support import TINY_CONFIG

LOG = "result_0.txt"
METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
CONFIG = "config.toml"
RUN = "run_0"
STDOUT = "stdout.log"
ENVIRONMENT = "environment.json"
EARLIER = "interrupted/result_0_0.txt"
RESULT = "results/acme/bert/result_1.txt"
DESCRIPTION = "systems/acme.json"
SAID = (
    "sampler uniform, balance none",
    "step 3/20  100 samples/s  2,000 tokens/s  loss 9.2000",
    "evaluation at 48 samples: accuracy 0.2500, on [MASK] inputs 0.2400 (0.5 s)",
    "rank 1 on n1 is slow: 0.200 s for its own work of a step, 2.00 times the median of 0.100 s",
)

OTHER = Entry(
    system="other",
    accelerators=1024,
    time_min=0.5,
    samples=3e6,
    seq_per_s=1e5,
)
TABLE = (
    "# a comment",
    ",".join(COLUMNS),
    "2.1,Acme,small,closed,Example A1,8,20.0,0,448,2.5,,2083,260.4,10",
    '2.1,Acme,"large, too",closed,Example A1,64,4.0,1,3072,2.8,,11667,182.3,10',
    "3.0,Other,lost,open,Example B1,1024,,,,,,,,",
)


def make_log(directory: Path) -> None:
    """A whole log; of the 400 records of tensor names, some are kept."""
    path = directory / LOG
    write_log(path, "open", 7, 12.5)
    lines = path.read_text("ascii").split("\n")
    names = [line for line in lines if "weights_initialization" in line][3:]
    path.write_text("\n".join(line for line in lines if line not in names))


def make_metrics(directory: Path) -> None:
    records = [
        {
            "step": step,
            "samples": 16 * step,
            "loss": 9.5 - step / 10,
            "mlm_accuracy": 0.25 if step % 3 == 0 else None,
            "learning_rate": 1e-3,
            "skipped_steps": 0,
            "grad_norm": 1.5,
            "samples_per_s": 100.0,
            "step_ms": 160.0,
            "wait_ms": 0.1,
            "slowest_over_median": 1.1,
            "noise_scale_plain": 80.0,
        }
        for step in range(1, 8)
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in records)
    (directory / METRICS).write_text(text, encoding="ascii")


def make_outcome(directory: Path) -> None:
    outcome = RunOutcome(
        status="success", steps=7, samples=112, seconds=3.5, mlm_accuracy=0.25, stopped_by=None
    )
    (directory / OUTCOME).write_bytes(outcome.to_json())


def make_run(directory: Path) -> None:
    run = directory / RUN
    run.mkdir()
    (run / CONFIG).write_text(TINY_CONFIG, encoding="utf-8")
    make_metrics(run)
    make_outcome(run)
    make_log(directory)


def parse_run(path: Path) -> object:
    """As `report doctor`, to the lines that it prints."""
    diagnosis = diagnose(read_run(only_run(path), needs_config=True))
    assert all(line.isprintable() for line in diagnosis.lines())
    json.dumps(diagnosis.as_json())
    return diagnosis


def make_watched_run(directory: Path) -> None:
    make_run(directory)
    text = "".join(f"12:00:00 {line}\n" for line in SAID)
    (directory / RUN / STDOUT).write_text(text, encoding="ascii")


def parse_watched_run(directory: Path) -> object:
    """As `watch`, to the frames that it draws; it goes on where a file is wrong, and says so."""
    look = Watcher(directory).whole_look()
    for width, height in ((80, 24), (30, 9)):
        lines = frame(look, width, height, "unicode", "")
        assert len(lines) <= height
        assert all(line.plain.isprintable() and line.cell_len <= width for line in lines)
    assert status_line(look).isprintable()
    json.dumps(look.as_json(), allow_nan=False)
    problems = [alert.text for alert in look.alerts if alert.kind == "file"]
    if problems:
        raise DataError("watch", problems[0], "it is shown as an alert")
    return look


def parse_foreign_log(directory: Path) -> object:
    """The records alone, then all that `report doctor` makes of them."""
    read_foreign_log(directory / LOG, LOG)
    return parse_run(directory / LOG)


def make_whole_run(directory: Path) -> None:
    make_run(directory)
    run = directory / RUN
    facts = {
        "schema_version": 1,
        "utc": "2026-01-01T00:00:00Z",
        "commit": "0123456789abcdef",
        "packages": {"torch": "2.13.0", "numpy": None},
        "device": "cpu",
        "world_size": 2,
        "seed": 7,
    }
    (run / ENVIRONMENT).write_text(json.dumps(facts), encoding="ascii")
    (run / STDOUT).write_text("12:00:00 step 1/7\n12:00:01 target reached\n", encoding="ascii")
    log = (directory / LOG).read_text("ascii").split("\n")
    kept = [line for line in log if "weights_initialization" not in line]
    (directory / LOG).write_text("\n".join(kept), encoding="ascii")
    (run / "interrupted").mkdir()
    (run / EARLIER).write_text("\n".join(kept[:12]) + "\n", encoding="ascii")


def parse_report(directory: Path) -> object:
    """As `mlperf_bert report page`, beside another run: page, JSON and lines."""
    runs = [read_facts(files) for files in find_runs([directory, directory / LOG])]
    charts, quiet = charts_of(runs)
    page = checked(report_page(runs, charts, quiet))
    assert len(page.values) == len(charts)
    json.dumps(as_json(runs), allow_nan=False)
    assert all(line.isprintable() for line in lines_of(runs))
    return runs


def make_tree(directory: Path) -> None:
    """Three runs, whose number of accelerators only the description says."""
    write_system(directory, "acme", minutes=[10.0, 11.0, 12.0], samples=2_500_000)


def parse_tree(directory: Path) -> object:
    """Parse a tree; its first skipped file, named and not raised, is raised as our error."""
    entries, skipped = read_tree(directory)
    law = _law([*entries, OTHER], skipped)
    for each in skipped:
        raise DataError(each.name, each.problem, "mend it")
    return law


def parse_table(directory: Path) -> object:
    return _law(read_table(directory / "table.csv"), ())


def _law(entries: list[Entry], skipped: Sequence[Skipped]) -> str:
    usable = [entry for entry in entries if entry.time_min and entry.accelerators]
    sizes = {entry.accelerators for entry in usable if entry.accelerators} | {64}
    law = fit_law(usable)
    costs = [marginal_cost(law.time, size) for size in sorted(sizes)]
    text = "\n".join(in_words("fuzzed", law, costs, skipped, ()))
    json.dumps([asdict(law), *map(asdict, costs)], allow_nan=False)
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)
    return text


RECORDS = {LOG: mutate_lines(TOKEN)}
RUN_FILES = {
    f"{RUN}/{CONFIG}": mutate_toml,
    f"{RUN}/{METRICS}": mutate_lines(""),
    f"{RUN}/{OUTCOME}": mutate_json,
}
SAID_TOO = {**RUN_FILES, f"{RUN}/{STDOUT}": mutate_bytes}
WHOLE_RUN = {
    **SAID_TOO,
    f"{RUN}/{ENVIRONMENT}": mutate_json,
    f"{RUN}/{EARLIER}": mutate_lines(TOKEN),
}
RUN_PARSERS: Mapping[str, Parser] = {
    "mlperf_log": Parser(
        make=make_log,
        targets=RECORDS,
        parse=lambda directory: list(check_course(read_log_facts(read_log(directory / LOG, LOG)))),
    ),
    "foreign_log": Parser(make=make_log, targets=RECORDS, parse=parse_foreign_log),
    "outcome": Parser(
        make=make_outcome,
        targets={OUTCOME: mutate_json},
        parse=lambda directory: read_outcome(directory / OUTCOME),
    ),
    "metrics": Parser(
        make=make_metrics,
        targets={METRICS: mutate_lines("")},
        parse=lambda directory: read_metrics(directory / METRICS),
    ),
    "run_directory": Parser(
        make=make_run,
        targets=RUN_FILES | RECORDS,
        optional=(f"{RUN}/{OUTCOME}", LOG),
        parse=parse_run,
    ),
    "watched_run": Parser(
        make=make_watched_run, targets=SAID_TOO, optional=(*SAID_TOO,), parse=parse_watched_run
    ),
    "report": Parser(
        make=make_whole_run,
        targets=WHOLE_RUN | RECORDS,
        optional=(*WHOLE_RUN,),
        parse=parse_report,
    ),
    "log_tree": Parser(
        make=make_tree,
        targets={RESULT: mutate_lines(TOKEN), DESCRIPTION: mutate_json},
        optional=(RESULT,),
        parse=parse_tree,
    ),
    "published_table": Parser(
        make=files({"table.csv": "\n".join(TABLE) + "\n"}),
        targets={"table.csv": mutate_bytes},
        parse=parse_table,
    ),
}

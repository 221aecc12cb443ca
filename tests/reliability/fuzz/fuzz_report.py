"""The run directory as `report` shows it; every page is checked as a browser would read it."""

import json
from pathlib import Path

from fuzz_mutations import mutate_bytes, mutate_json, mutate_lines, mutate_toml
from fuzz_parser import Parser
from fuzz_run_files import CONFIG, LOG, METRICS, OUTCOME, RUN, make_run

from bert_tools.common.log_reader import TOKEN
from bert_tools.report.charts import charts_of
from bert_tools.report.facts import read_facts
from bert_tools.report.measures import as_json, lines_of
from bert_tools.report.page import report_page
from bert_tools.report.run_files import find_runs
from report_pages import checked

ENVIRONMENT = "environment.json"
STDOUT = "stdout.log"
EARLIER = "interrupted/result_0_0.txt"


def make_whole_run(directory: Path) -> None:
    """A run that went on once, with all its files."""
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
    """As `mlperf_bert report`, beside another run: page, JSON and lines."""
    runs = [read_facts(files) for files in find_runs([directory, directory / LOG])]
    charts, quiet = charts_of(runs)
    page = checked(report_page(runs, charts, quiet))
    assert len(page.values) == len(charts)
    json.dumps(as_json(runs), allow_nan=False)
    assert all(line.isprintable() for line in lines_of(runs))
    return runs


REPORT_PARSERS = {
    "report": Parser(
        make=make_whole_run,
        targets={
            f"{RUN}/{CONFIG}": mutate_toml,
            f"{RUN}/{METRICS}": mutate_lines(""),
            f"{RUN}/{OUTCOME}": mutate_json,
            f"{RUN}/{ENVIRONMENT}": mutate_json,
            f"{RUN}/{STDOUT}": mutate_bytes,
            f"{RUN}/{EARLIER}": mutate_lines(TOKEN),
            LOG: mutate_lines(TOKEN),
        },
        optional=tuple(
            f"{RUN}/{name}" for name in (CONFIG, METRICS, OUTCOME, ENVIRONMENT, STDOUT, EARLIER)
        ),
        parse=parse_report,
    ),
}

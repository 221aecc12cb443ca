"""MLPerf results as worlds to fuzz: a tree of logs with its description, and a published table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fuzz_mutations import mutate_bytes, mutate_json, mutate_lines
from fuzz_parser import Parser

from bert_tools.common.log_reader import TOKEN
from bert_tools.plan.entries import COLUMNS, Entry, Skipped, read_table
from bert_tools.plan.law import in_words
from bert_tools.plan.log_tree import read_tree
from bert_tools.plan.scaling_law import fit_law, marginal_cost
from log_trees import write_system
from mlperf_bert.common.errors import DataError

LOG = "results/acme/bert/result_1.txt"
DESCRIPTION = "systems/acme.json"
OTHER = Entry(
    system="other",
    accelerators=1024,
    time_min=0.5,
    samples=3e6,
    seq_per_s=1e5,
)


def make_tree(directory: Path) -> None:
    """Three runs, whose number of accelerators only the description says."""
    write_system(directory, "acme", minutes=[10.0, 11.0, 12.0], samples=2_500_000)


def make_table(directory: Path) -> None:
    """Three entries of two sizes."""
    lines = (
        "# a comment",
        ",".join(COLUMNS),
        "2.1,Acme,small,closed,Example A1,8,20.0,0,448,2.5,,2083,260.4,10",
        '2.1,Acme,"large, too",closed,Example A1,64,4.0,1,3072,2.8,,11667,182.3,10',
        "3.0,Other,lost,open,Example B1,1024,,,,,,,,",
    )
    (directory / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def parse_tree(directory: Path) -> object:
    """What is skipped is named, not raised: the first such is, as one of our own errors."""
    entries, skipped = read_tree(directory)
    law = _law([*entries, OTHER], skipped)
    for each in skipped:
        raise DataError(each.name, each.problem, "mend it")
    return law


def parse_table(directory: Path) -> object:
    """The entries, to the text that is printed of them."""
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


RESULTS_PARSERS: Mapping[str, Parser] = {
    "log_tree": Parser(
        make=make_tree,
        targets={LOG: mutate_lines(TOKEN), DESCRIPTION: mutate_json},
        optional=(LOG,),
        parse=parse_tree,
    ),
    "published_table": Parser(
        make=make_table, targets={"table.csv": mutate_bytes}, parse=parse_table
    ),
}

"""`mlperf_bert plan law`: fits, intervals and costs; filters, tables of users, and what it says."""

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_tools.plan.entries import COLUMNS, Entry
from bert_tools.plan.law import in_words
from bert_tools.plan.scaling_law import CEREBRAS, fit_law, marginal_cost
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import ConfigError
from plan_cases import Asked
from support import REPOSITORY, TOOLS

Told = Callable[..., str]
Row = Mapping[str, str]

HEADER = ",".join(COLUMNS)
ROWS = (
    "2.1,Acme,small,closed,Example A1,8,20.0,0,448,2.5,,2083,260.4,10",
    "2.1,Acme,large,closed,Example A1,64,4.0,1,3072,2.8,,11667,182.3,10",
    "3.0,Other,larger,open,Example B1,512,1.0,0,4096,3.0,,50000,97.7,10",
    "3.0,Other,lost,open,Example B1,1024,,,,,,,,",
    "10.0,Other,unknown,closed,N/A,,5.0,0,448,2.5,,8333,,10",
)
A100 = ("submitter=NVIDIA", "division=closed", "accelerator~A100")
H100 = ("submitter~NVIDIA", "round>=3.0", "round<=3.1", "accelerator~H100")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("\n".join(["# a comment", HEADER, *ROWS, ""]))
    return path


@pytest.fixture
def fitted(asked: Asked) -> Callable[..., Any]:
    """The facts of the law of a table under conditions."""

    def of(path: object, *conditions: str) -> Any:
        return asked("law", path, *(f"--filter '{each}'" for each in conditions))

    return of


def test_filters(fitted: Asked, table: Path) -> None:
    for conditions, systems in (
        ((), ["small", "large", "larger"]),
        (("round=2.1",), ["small", "large"]),
        (("submitter=ACME", "accelerator~example"), ["small", "large"]),
        (("accelerators>=64",), ["large", "larger"]),
        (("accelerators < 100",), ["small", "large"]),
        (("division!=open", "failed_runs>=0"), ["small", "large"]),
        (("round<=3.0",), ["small", "large", "larger"]),  # as numbers: 10.0 is not among them
        (("global_batch_size<=4096", "system~l"), ["small", "large", "larger"]),
        (("samples>2600000",), ["large", "larger"]),
        (("time_min!=4",), ["small", "larger"]),
    ):
        answer = fitted(table, *conditions)
        assert [each["system"] for each in answer["entries"]] == systems


def test_what_has_no_time_or_size_is_named(told: Told, table: Path) -> None:
    text = told("law", table, "--at 100000 --out law.png")
    assert "left out: 3.0 Other lost: no time in its source" in text
    assert "left out: 10.0 Other unknown: no number of accelerators in its source" in text
    assert "100,000" in text and text.endswith("picture: law.png\n")
    assert Path("law.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_that_is_none_is_refused(told: Told, table: Path) -> None:
    for contents, message in (
        ("", "holds no entry"),
        (HEADER, "holds no entry"),
        ("a,b\n1,2\n", "line 1: is 'a,b', not the column names"),
        (f"{HEADER}\n{ROWS[0]},9\n", "line 2: has 15 cells, not 14"),
        (f'{HEADER}\n"{ROWS[0]}\n', "line 2: is no line of a CSV file"),
        (f"{HEADER}\n{ROWS[0].replace('small', '')}\n", "line 2: names no system"),
        (f"{HEADER}\n{ROWS[0].replace('small', 's' * 300)}\n", "a cell of 300 characters"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', 'nan')}\n", "time_min is 'nan'"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', '-1')}\n", "time_min is '-1'"),
        (f"{HEADER}\n{ROWS[0].replace('20.0', '1e400')}\n", "time_min is '1e400'"),
        (f"{HEADER}\n{ROWS[0].replace(',8,', ',8.5,')}\n", "accelerators is '8.5'"),
    ):
        table.write_text(contents)
        assert message in told("law own.csv", status=2)


def test_a_table_as_spreadsheets_save_it(fitted: Asked, table: Path) -> None:
    """With UTF-8's mark before the first line, and Windows' line ends."""
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert len(fitted(table)["entries"]) == 3


def test_a_mix_of_divisions_is_said(told: Told, table: Path) -> None:
    words = f"law {table}"
    assert "1 of 3 entries: the open division" in told(words)
    assert "open division" not in told(words, "--filter division=closed")


def test_two_entries_move_the_exponent_of_the_whole_shipped_table(fitted: Asked) -> None:
    """As the README of logs/2026-11-22-scaling-law says; they took 157 M samples each."""
    answers = [fitted(""), fitted("", "samples<100000000")]
    assert len(answers[0]["entries"]) - len(answers[1]["entries"]) == 2
    assert [round(each["exponent"], 3) for each in answers] == [-0.682, -0.752]


def test_names_that_no_terminal_should_show_are_written_out(
    capsys: pytest.CaptureFixture[str], table: Path
) -> None:
    """Bytes that are no UTF-8, and an escape."""
    name = "x\udcff\x1b[31m"
    assert main(["plan", "law", str(table.rename(f"{name}.csv")), "--out", f"{name}.png"]) == 0
    assert (
        main(["plan", "suggest", "--nodes", "1", "--gpus-per-node", "8", "--out", f"{name}.toml"])
        == 0
    )
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert r"picture: x\udcff\x1b[31m.png" in lines and r"config: x\udcff\x1b[31m.toml" in lines


def test_the_shipped_table_says_where_it_is_from() -> None:
    text = (TOOLS / "plan" / "published_results.csv").read_text("ascii")
    comment = [line for line in text.split("\n") if line.startswith("#")]
    assert any("github.com/mlcommons" in line for line in comment)
    assert text.count("\n") == len(comment) + 1 + 348


def is_nvidia_a100(row: Row) -> bool:
    is_closed = row["submitter"] == "NVIDIA" and row["division"] == "closed"
    return is_closed and "A100" in row["accelerator"]


def is_h100(row: Row) -> bool:
    is_nvidia = row["submitter"] in ("NVIDIA", "NVIDIA_CoreWeave") and "H100" in row["accelerator"]
    return is_nvidia and row["round"] in ("3.0", "3.1")


def shipped() -> list[dict[str, str]]:
    """The shipped table, read without our reader."""
    lines = (TOOLS / "plan" / "published_results.csv").read_text("ascii").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def slope(rows: list[dict[str, str]], column: str) -> tuple[float, float]:
    """Exponent and coefficient by numpy's own fit."""
    x = np.log([float(row["accelerators"]) for row in rows])
    y = np.log([float(row[column]) for row in rows])
    exponent, intercept = np.polyfit(x, y, 1)
    return float(exponent), math.exp(intercept)


# (conditions, rows, the same by hand, coefficient in minutes, exponents of time, throughput and
# samples): those that this project quotes.
QUOTED: list[tuple[tuple[str, ...], int, Callable[[Row], bool], float, tuple[float, ...]]] = [
    (
        *(("round=2.1", *A100), 4, lambda row: row["round"] == "2.1" and is_nvidia_a100(row)),
        *(59.7, (-0.701, 0.805, 0.103)),
    ),
    (
        *(("round=2.0", *A100), 4, lambda row: row["round"] == "2.0" and is_nvidia_a100(row)),
        *(71.2, (-0.722,)),
    ),
    (H100, 8, is_h100, 15.8, (-0.613, 0.714, 0.101)),
]


def test_the_quoted_laws_of_the_shipped_table(fitted: Asked) -> None:
    names = ("exponent", "throughput_exponent", "samples_exponent")
    for conditions, count, is_one, minutes, exponents in QUOTED:
        answer = fitted("published", *conditions)
        rows = [row for row in shipped() if is_one(row) and row["time_min"]]
        assert len(answer["entries"]) == len(rows) == count
        assert answer["coefficient_minutes"] == pytest.approx(minutes, rel=0.01)
        for name, exponent in zip(names, exponents, strict=False):
            assert answer[name] == pytest.approx(exponent, rel=0.01)
        by_numpy = slope(rows, "time_min")
        assert (answer["exponent"], answer["coefficient_minutes"]) == pytest.approx(by_numpy)
        for name, column in zip(names[1:], ("seq_per_s", "samples_million"), strict=True):
            assert answer[name] == pytest.approx(slope(rows, column)[0])


def test_the_entries_of_v07_that_have_logs_stand_beside_cerebras_law(
    fitted: Asked, told: Told
) -> None:
    answer = fitted("published", "round=0.7", *A100)
    rows = [row for row in shipped() if row["round"] == "0.7" and is_nvidia_a100(row)]
    logged = [row for row in rows if row["time_min"]]
    assert (len(rows), len(logged)) == (5, 3)  # of two there are no logs in public
    assert answer["exponent"] == pytest.approx(slope(logged, "time_min")[0])
    assert answer["reference"] == pytest.approx(
        {"name": "Cerebras' note on MLPerf v0.7, A100"}
        | {"exponent": -0.7392, "coefficient_minutes": 228.3}
    )
    assert [each["accelerators"] for each in answer["left_out"]] == [1024, 2048]
    text = told("law --filter round=0.7 --filter", A100[2])
    assert "beside 228.3 minutes * p^-0.7392" in text and "neither means much" in text
    assert "left out: 0.7 NVIDIA dgxa100_n256" in text


def test_cerebras_law_is_the_line_through_all_five_entries_of_v07() -> None:
    """Three times by the logs, 0.81 by MLCommons' table; 1.48 is what both its numbers ask for."""
    minutes = {8: 49.01, 16: 30.63, 256: 3.36, 1024: 1.48, 2048: 0.81}
    law = fit_law([entry(size, time) for size, time in minutes.items()]).time
    assert law.coefficient == pytest.approx(CEREBRAS.coefficient, abs=0.05)
    assert law.exponent == pytest.approx(CEREBRAS.exponent, abs=5e-5)


def entry(accelerators: int, minutes: float, samples: float | None = None) -> Entry:
    rate = None if samples is None else samples / (60 * minutes)
    return Entry(
        system=f"s{accelerators}",
        accelerators=accelerators,
        time_min=minutes,
        samples=samples,
        seq_per_s=rate,
    )


def test_an_exact_law_comes_back_with_its_split() -> None:
    sizes = (8, 16, 64, 512)
    law = fit_law([entry(p, 200 * p**-0.6, 1e6 * p**0.25) for p in sizes])
    assert law.throughput is not None and law.samples is not None
    assert (law.time.coefficient, law.time.exponent) == pytest.approx((200, -0.6))
    assert law.samples.exponent == pytest.approx(0.25)
    assert law.throughput.exponent == pytest.approx(0.85)  # 0.25 + 0.6
    assert law.split_remainder == pytest.approx(0, abs=1e-12)
    assert (law.time.low, law.time.high) == pytest.approx((-0.6, -0.6))
    assert law.time.half_width == pytest.approx(0, abs=1e-9)
    assert [law.residual(each) for each in law.entries] == pytest.approx([1, 1, 1, 1])


def scattered() -> list[Entry]:
    generator = np.random.default_rng(5)
    sizes = [8 * 2 ** (number % 8) for number in range(40)]
    return [entry(p, 100 * p**-0.7 * math.exp(generator.normal(0, 0.2))) for p in sizes]


def standard_error(entries: list[Entry]) -> float:
    """The standard error of the exponent, by hand."""
    x = np.log([float(each.accelerators or 0) for each in entries])
    y = np.log([each.time_min or 0 for each in entries])
    off = np.sum((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2) / (len(entries) - 2)
    return math.sqrt(off / np.sum((x - x.mean()) ** 2))


def test_intervals_go_with_the_scatter() -> None:
    law = fit_law(scattered()).time
    assert law.low is not None and law.high is not None
    assert law.low < law.exponent < law.high
    assert law.high - law.low == pytest.approx(2 * 1.96 * standard_error(scattered()), rel=0.25)
    # Quantiles of printed tables, for 2, 38, 40 and 60 degrees of freedom.
    even = [entry(8 * 2 ** (n % 8), 10 * (1 + n % 3)) for n in range(62)]
    for entries, quantile in (
        *((scattered()[:4], 4.302653), (scattered(), 2.0244)),
        *((even[:42], 2.0211), (even, 2.0003)),
    ):
        half_width = fit_law(entries).time.half_width
        assert half_width == pytest.approx(quantile * standard_error(entries), rel=5e-4)


def test_the_seed_decides_the_bootstrap() -> None:
    entries = scattered()
    assert fit_law(entries, 3) == fit_law(entries, 3)
    assert fit_law(entries, 3).time.low != fit_law(entries, 4).time.low


@pytest.mark.parametrize("more", [[], [entry(1002, 6)]])
def test_sizes_that_hardly_differ_are_refused(more: list[Entry]) -> None:
    """log(5/3) over log(1001/1000) is 511; at one accelerator that is 1000^511 times as much."""
    with pytest.raises(ConfigError, match=r"1,000 to 1,00. accelerators is so steep .*; give ent"):
        fit_law([entry(1000, 5), entry(1001, 3), *more])


def test_resampled_lines_that_no_number_holds_leave_no_bound() -> None:
    """That of 1,001 and 1,000 alone is as steep as above; the whole is not."""
    law = fit_law([entry(1000, 5), entry(1001, 3), entry(8, 100)]).time
    assert math.isfinite(law.coefficient)
    assert (law.coefficient_low, law.coefficient_high).count(None) >= 1
    assert law.low is not None and law.low < -400 < -1 < law.exponent


def test_a_time_that_no_number_holds_is_refused() -> None:
    law = fit_law([entry(8, 1000), entry(9, 0.1)]).time
    assert math.isfinite(marginal_cost(law, 8).accelerator_minutes)
    with pytest.raises(ConfigError, match="on 1,000,000,000 accelerators is beyond numbers"):
        marginal_cost(law, 10**9)


def test_two_entries_leave_no_interval() -> None:
    law = fit_law([entry(8, 10, 2e6), entry(64, 2)])
    assert law.time.exponent == pytest.approx(math.log(0.2) / math.log(8))
    assert (law.time.low, law.time.high, law.time.half_width) == (None, None, None)
    # Of which one says its samples: there is no split.
    assert (law.throughput, law.samples, law.split_remainder) == (None, None, None)


def test_too_few_entries_are_refused() -> None:
    for entries, message in (
        ([], "no entry is left"),
        ([entry(8, 10)], "one entry alone, 's8'"),
        ([entry(8, 10), entry(8, 11)], "all 2 entries have 8 accelerators"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit_law(entries)


def test_marginal_cost_is_the_slope_of_the_cost_and_halving_halves() -> None:
    law = fit_law([entry(8, 20), entry(64, 5)]).time
    cost = marginal_cost(law, 32)
    by_difference = (33 * law.at(33) - 31 * law.at(31)) / 2
    assert cost.per_added == pytest.approx(by_difference, rel=1e-3)
    assert cost.accelerator_minutes == pytest.approx(32 * law.at(32))
    assert cost.for_half_time is not None and cost.half_time_costs is not None
    assert law.at(cost.for_half_time) == pytest.approx(law.at(32) / 2)
    dearer = cost.for_half_time * law.at(cost.for_half_time) - cost.accelerator_minutes
    assert cost.half_time_costs == pytest.approx(dearer)


@pytest.mark.parametrize("minutes", [10.0, 10.1, 9.99])
def test_half_the_time_is_out_of_reach_where_more_accelerators_hardly_help(minutes: float) -> None:
    cost = marginal_cost(fit_law([entry(8, 10), entry(1024, minutes)]).time, 8)
    assert (cost.for_half_time, cost.half_time_costs) == (None, None)
    assert cost.per_added == pytest.approx(10, rel=0.01)  # each costs all of the run's time


def test_a_split_of_some_of_the_entries_says_so() -> None:
    """The time's line is through four entries, of which the samples of two are known."""
    entries = [entry(8, 10, 2e6), entry(64, 2, 3e6), entry(128, 0.5), entry(256, 0.3)]
    law = fit_law(entries)
    assert law.samples is not None and law.throughput is not None
    assert (law.time.count, law.samples.count, law.throughput.count) == (4, 2, 2)
    text = "\n".join(in_words("some", law, [], (), ()))
    assert "of entries that say it (throughput 2, samples 2 of 4): +0.195" in text
    assert "= +0.195" in "\n".join(
        in_words("all", fit_law(entries[:2]), [], (), ())
    )  # log(1.5) / log(8)


def test_the_records_lead_and_the_energy_are_those_of_the_table() -> None:
    text = (TOOLS / "plan" / "published_results.csv").read_text("ascii").splitlines()
    entries: dict[tuple[str, str, int], Row] = {
        (row["round"], row["submitter"], int(row["accelerators"])): row
        for row in csv.DictReader(line for line in text if not line.startswith("#"))
        if "A100" in row["accelerator"] and row["time_min"]
    }
    page = (REPOSITORY / "logs" / "2026-11-22-scaling-law" / "README.md").read_text("utf-8")
    for of_round, other, lead in (
        ("1.1", "NVIDIA", 1.33),
        ("1.1", "Azure", 1.57),
        ("2.0", "NVIDIA", 1.13),
    ):
        theirs, ours = (entries[of_round, name, 1024]["time_min"] for name in (other, "Samsung"))
        assert float(theirs) / float(ours) == pytest.approx(lead, abs=0.005)
        assert f"- **{lead}**, v{of_round}: {other}'s {theirs} minutes over {ours}." in page
    for of_round, gpus, kwh in (("0.7", 8, 5.3), ("2.1", 8, 1.8), ("2.1", 1024, 5.8)):
        minutes = float(entries[of_round, "NVIDIA", gpus]["time_min"])
        assert gpus / 8 * 6.5 * minutes / 60 == pytest.approx(kwh, abs=0.05)
        assert f"{kwh} kWh" in page

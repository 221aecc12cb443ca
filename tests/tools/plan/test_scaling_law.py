"""The fits that are quoted come out of the shipped table; lines, intervals and costs are right."""

import csv
import json
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from bert_tools.plan.entries import Entry
from bert_tools.plan.law import in_words
from bert_tools.plan.scaling_law import CEREBRAS, fit_law, marginal_cost
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import ConfigError
from support import TOOLS

Row = Mapping[str, str]

A100 = ("submitter=NVIDIA", "division=closed", "accelerator~A100")
H100 = ("submitter~NVIDIA", "round>=3.0", "round<=3.1", "accelerator~H100")


def is_nvidia_a100(row: Row) -> bool:
    is_nvidia = row["submitter"] == "NVIDIA" and row["division"] == "closed"
    return is_nvidia and "A100" in row["accelerator"]


def is_h100(row: Row) -> bool:
    return (
        row["submitter"] in ("NVIDIA", "NVIDIA_CoreWeave")
        and "H100" in row["accelerator"]
        and row["round"] in ("3.0", "3.1")
    )


def table() -> list[dict[str, str]]:
    """The shipped table, read without our reader."""
    lines = (TOOLS / "plan" / "published_results.csv").read_text("ascii").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def slope(rows: list[dict[str, str]], column: str) -> tuple[float, float]:
    """Exponent and coefficient by numpy's own fit."""
    x = np.log([float(row["accelerators"]) for row in rows])
    y = np.log([float(row[column]) for row in rows])
    exponent, intercept = np.polyfit(x, y, 1)
    return float(exponent), math.exp(intercept)


def asked(capsys: pytest.CaptureFixture[str], *conditions: str) -> dict[str, object]:
    words = [word for each in conditions for word in ("--filter", each)]
    assert main(["plan", "law", "published", *words, "--json", "--no-plot"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def is_of_v21(row: Row) -> bool:
    return row["round"] == "2.1" and is_nvidia_a100(row)


def is_of_v20(row: Row) -> bool:
    return row["round"] == "2.0" and is_nvidia_a100(row)


# (conditions, rows, the same by hand, coefficient in minutes, exponents of time, throughput and
# samples): those that this project quotes.
QUOTED = [
    (("round=2.1", *A100), 4, is_of_v21, 59.7, -0.701, 0.805, 0.103),
    (("round=2.0", *A100), 4, is_of_v20, 71.2, -0.722, None, None),
    (H100, 8, is_h100, 15.8, -0.613, 0.714, 0.101),
]


@pytest.mark.parametrize(
    ("conditions", "count", "is_one", "minutes", "exponent", "throughput", "samples"), QUOTED
)
def test_the_quoted_laws_of_the_shipped_table(
    capsys: pytest.CaptureFixture[str],
    conditions: tuple[str, ...],
    count: int,
    is_one: Callable[[Row], bool],
    minutes: float,
    exponent: float,
    throughput: float | None,
    samples: float | None,
) -> None:
    answer = asked(capsys, *conditions)
    rows = [row for row in table() if is_one(row) and row["time_min"]]
    entries = answer["entries"]
    assert isinstance(entries, list) and len(entries) == len(rows) == count
    assert answer["coefficient_minutes"] == pytest.approx(minutes, rel=0.01)
    assert answer["exponent"] == pytest.approx(exponent, rel=0.01)
    if throughput is not None:
        assert answer["throughput_exponent"] == pytest.approx(throughput, rel=0.01)
        assert answer["samples_exponent"] == pytest.approx(samples, rel=0.01)
    by_numpy = slope(rows, "time_min")
    assert (answer["exponent"], answer["coefficient_minutes"]) == pytest.approx(by_numpy)
    assert answer["throughput_exponent"] == pytest.approx(slope(rows, "seq_per_s")[0])
    assert answer["samples_exponent"] == pytest.approx(slope(rows, "samples_million")[0])


def test_the_entries_of_v07_that_have_logs_stand_beside_cerebras_law(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = asked(capsys, "round=0.7", *A100)
    rows = [row for row in table() if row["round"] == "0.7" and is_nvidia_a100(row)]
    logged = [row for row in rows if row["time_min"]]
    assert (len(rows), len(logged)) == (5, 3)  # of two there are no logs in public
    assert answer["exponent"] == pytest.approx(slope(logged, "time_min")[0])
    assert answer["reference"] == pytest.approx(
        {"name": "Cerebras' note on MLPerf v0.7, A100"}
        | {"exponent": -0.7392, "coefficient_minutes": 228.3}
    )
    left_out = answer["left_out"]
    assert isinstance(left_out, list)
    assert [each["accelerators"] for each in left_out] == [1024, 2048]
    assert main(["plan", "law", "--filter", "round=0.7", "--filter", A100[2], "--no-plot"]) == 0
    text = capsys.readouterr().out
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


def test_intervals_go_with_the_scatter() -> None:
    entries = scattered()
    law = fit_law(entries).time
    x = np.log([float(each.accelerators or 0) for each in entries])
    y = np.log([each.time_min or 0 for each in entries])
    _, covariance = np.polyfit(x, y, 1, cov=True)
    error = math.sqrt(covariance[0, 0])
    assert law.half_width == pytest.approx(1.96 * error, rel=0.05)  # 2.02 at 38 degrees
    assert law.low is not None and law.high is not None
    assert law.high - law.low == pytest.approx(2 * 1.96 * error, rel=0.25)
    assert law.low < law.exponent < law.high
    four = fit_law(entries[:4]).time
    x, y = x[:4], y[:4]
    residuals = y - np.polyval(np.polyfit(x, y, 1), x)
    by_hand = 4.302653 * math.sqrt(np.sum(residuals**2) / 2 / np.sum((x - x.mean()) ** 2))
    assert four.half_width == pytest.approx(by_hand)


def test_the_seed_decides_the_bootstrap() -> None:
    entries = scattered()
    assert fit_law(entries, 3) == fit_law(entries, 3)
    assert fit_law(entries, 3).time.low != fit_law(entries, 4).time.low


def test_students_interval_beyond_the_table() -> None:
    """Quantiles of printed tables: 2.0211 for 40 degrees of freedom, 2.0003 for 60."""
    for count, quantile in ((42, 2.0211), (62, 2.0003)):
        entries = [entry(8 * 2 ** (n % 8), 10 * (1 + n % 3)) for n in range(count)]
        x = np.log([float(each.accelerators or 0) for each in entries])
        y = np.log([each.time_min or 0 for each in entries])
        residuals = y - np.polyval(np.polyfit(x, y, 1), x)
        error = math.sqrt(np.sum(residuals**2) / (count - 2) / np.sum((x - x.mean()) ** 2))
        assert fit_law(entries).time.half_width == pytest.approx(quantile * error, rel=5e-4)


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
    law = fit_law([entry(8, 10), entry(64, 2)]).time
    assert law.exponent == pytest.approx(math.log(0.2) / math.log(8))
    assert (law.low, law.high, law.half_width) == (None, None, None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no entry is left"),
        ([entry(8, 10)], "one entry alone, 's8'"),
        ([entry(8, 10), entry(8, 11)], "all 2 entries have 8 accelerators"),
    ],
)
def test_too_few_entries_are_refused(entries: list[Entry], message: str) -> None:
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


def test_without_samples_there_is_no_split() -> None:
    law = fit_law([entry(8, 10, 2e6), entry(64, 2)])
    assert (law.throughput, law.samples, law.split_remainder) == (None, None, None)

"""`mlperf_bert plan balance`: what it measures, prints and writes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bert_tools.common.figures import new_figure
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.__main__ import main
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.balance import Balance, CostModel, StepPlanner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.length_histogram import LengthHistogram
from mlperf_bert.data.sampler import UniformSampler, make_sampler
from mlperf_bert.data.token_packets import gathered_bytes

PNG = b"\x89PNG\r\n"
SIZES = ("--nodes", "2", "--gpus-per-node", "4", "--local-batch-size", "6")
POLICIES = {
    ("none", None, "equal"),
    ("exchange_global", "one_direction", "equal"),
    ("exchange_global", "snake", "equal"),
    ("exchange_local", "one_direction", "equal"),
    ("exchange_local", "snake", "equal"),
    ("presort_local", "snake", "equal"),
    ("presort_global", None, "equal"),
}
UNEQUAL = ("presort_global", None, "unequal")


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    words = ["plan", "balance", *map(str, arguments), "--draws", "3", "--json"]
    if "--out" not in words:
        words.append("--no-plot")
    assert main(words) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    return result


def rows_by_policy(result: dict[str, Any], sampler: str) -> dict[tuple[str, str | None, str], Any]:
    return {
        (row["policy"], row["deal"], row["counts_per_rank"]): row
        for row in result["rows"]
        if row["sampler"] == sampler
    }


def test_every_sampler_meets_every_policy(
    capsys: pytest.CaptureFixture[str], histogram: Path
) -> None:
    result = answer(capsys, *SIZES, "--histogram", histogram)
    served = ["uniform", "quantile", "strata", "strata_6_3_2_5", "strata_4_2_2_4"]
    assert Counter(row["sampler"] for row in result["rows"]) == dict.fromkeys(served, len(POLICIES))
    for sampler in served:
        rows = rows_by_policy(result, sampler)
        assert set(rows) == POLICIES
        assert {row["quantiles"] for row in rows.values()} == (
            {48} if sampler == "quantile" else {None}
        )
        for row in rows.values():
            assert (row["world_size"], row["local_batch_size"]) == (8, 6)
            assert row["imbalance_tokens"] >= 1 and row["imbalance_cost"] >= 1
            assert row["capacity_waste"] >= row["capacity_waste_ladder"] >= 0
            assert (row["exchanged_bytes_per_rank"] > 0) == row["policy"].startswith("exchange")


def test_small_batches_may_be_uneven_and_leave_samplers_out(
    capsys: pytest.CaptureFixture[str], histogram: Path
) -> None:
    sizes = ("--nodes", 1, "--gpus-per-node", 2, "--local-batch-size", 2)
    result = answer(capsys, *sizes, "--histogram", histogram)
    assert set(rows_by_policy(result, "uniform")) == POLICIES | {UNEQUAL}
    left_out = {each["sampler"]: each["reason"] for each in result["left_out"]}
    assert "need a multiple of 16" in left_out["strata_6_3_2_5"]
    assert "need a multiple of 12" in left_out["strata_4_2_2_4"]
    assert not set(left_out) & {row["sampler"] for row in result["rows"]}


def test_a_presort_equals_its_exchange_without_the_bytes(
    capsys: pytest.CaptureFixture[str], histogram: Path
) -> None:
    rows = rows_by_policy(answer(capsys, *SIZES, "--histogram", histogram), "uniform")
    exchange = rows["exchange_local", "snake", "equal"]
    presort = rows["presort_local", "snake", "equal"]
    for key in ("imbalance_tokens", "imbalance_cost", "idle_fraction", "capacity_waste_masked"):
        assert presort[key] == exchange[key]
    assert presort["exchanged_bytes_per_rank"] == presort["padded_bytes_per_rank"] == 0
    far, near = rows["exchange_global", "snake", "equal"], exchange
    assert far["exchanged_bytes_per_rank"] > near["exchanged_bytes_per_rank"]


def test_published_packets_have_their_published_size(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--nodes", 1, "--gpus-per-node", 8, "--local-batch-size", 16)
    rows = rows_by_policy(answer(capsys, *sizes), "uniform")
    assert rows["exchange_local", "snake", "equal"]["padded_bytes_per_rank"] == 524_544


def test_a_single_rank_exchanges_nothing(
    capsys: pytest.CaptureFixture[str], histogram: Path
) -> None:
    sizes = ("--nodes", 2, "--gpus-per-node", 1, "--local-batch-size", 6)
    rows = rows_by_policy(answer(capsys, *sizes, "--histogram", histogram), "uniform")
    for key in ("exchanged_bytes_per_rank", "padded_bytes_per_rank"):
        assert rows["exchange_local", "snake", "equal"][key] == 0
        assert rows["exchange_global", "snake", "equal"][key] > 0


def test_capacities_hold_the_steps_asked_for(
    capsys: pytest.CaptureFixture[str], synthetic_data: Path
) -> None:
    asked = (*SIZES, "--data", synthetic_data, "--seed", 4)
    index = LengthIndex.open(synthetic_data / "train")

    def largest(steps: tuple[int, ...]) -> dict[str, Any]:
        planner = StepPlanner(
            UniformSampler(index.manifest.num_samples, 48, 4),
            index.lengths,
            index.masked_counts,
            world_size=8,
            balance=Balance(policy="presort_global"),
        )
        plans = [planner.plan(step) for step in steps]
        return {
            "capacity_tokens": max(plan.num_tokens.max() for plan in plans),
            "capacity_sequences": 6,
            "capacity_masked": max(plan.num_masked.max() for plan in plans),
        }

    policy = ("presort_global", None, "equal")
    exact = rows_by_policy(answer(capsys, *asked), "uniform")[policy]
    assert {**largest((1, 2, 3)), "capacity_basis": "exact"}.items() <= exact.items()
    result = answer(capsys, *asked, "--steps", 101)
    assert result["steps"] == 101
    bound = rows_by_policy(result, "uniform")[policy]
    assert bound["capacity_basis"] == "bound" and bound["capacity_sequences"] == 6
    spread = largest((1, 51, 101))  # a bound leaves room beyond the draws
    for name in ("capacity_tokens", "capacity_masked"):
        assert bound[name] > spread[name]


def test_a_bound_is_no_more_than_the_sequences_can_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--nodes", 1, "--gpus-per-node", 2, "--local-batch-size", 1)
    rows = rows_by_policy(answer(capsys, *sizes, "--steps", 10**6), "uniform")
    row = rows["none", None, "equal"]
    capacity = [row[f"capacity_{name}"] for name in ("tokens", "sequences", "masked", "basis")]
    assert capacity == [512, 1, 76, "bound"]


def test_measures_of_a_prepared_set_are_those_of_its_plans(
    capsys: pytest.CaptureFixture[str], synthetic_data: Path
) -> None:
    model = ("--balance-model", "cost", "--cost-a", 2, "--cost-b", 0.5)
    result = answer(capsys, *SIZES, "--data", synthetic_data, "--seed", 4, *model)
    index = LengthIndex.open(synthetic_data / "train")
    assert result["samples"] == index.manifest.num_samples
    planner = StepPlanner(
        make_sampler(
            "uniform",
            order_by_length=index.order_by_length,
            length_histogram=index.manifest.length_histogram,
            global_batch_size=48,
            seed=4,
        ),
        index.lengths,
        index.masked_counts,
        world_size=8,
        balance=Balance(policy="presort_global"),
        balance_model="cost",
        cost=CostModel(linear=2.0, quadratic=0.5),
    )
    plans = [planner.plan(step) for step in (1, 2, 3)]
    row = rows_by_policy(result, "uniform")["presort_global", None, "equal"]
    tokens = np.array([plan.num_tokens for plan in plans])
    masked = np.array([plan.num_masked for plan in plans])
    costs = np.array([plan.imbalance_cost for plan in plans])
    imbalances = tokens.max(axis=(1, 2)) / tokens.mean(axis=(1, 2))
    expected = {
        "balance_model": "cost",
        "imbalance_tokens": imbalances.mean(),
        "imbalance_tokens_error": imbalances.std(ddof=1) / 3**0.5,
        "imbalance_cost": costs.mean(),
        "idle_fraction": 1 - (1 / costs).mean(),
        "capacity_waste": tokens.max() / tokens.mean() - 1,
        "capacity_waste_masked": masked.max() / masked.mean() - 1,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_the_cost_model_is_bert_large_by_default(
    capsys: pytest.CaptureFixture[str], histogram: Path
) -> None:
    cost = answer(capsys, *SIZES, "--histogram", histogram, "--cost-a", 3)["cost"]
    assert cost == {"linear": 3.0, "quadratic": 3 * ModelSection().attention_share}


def test_masked_positions_follow_the_published_rounding() -> None:
    histogram = LengthHistogram(lengths=np.array([1, 10, 30, 511]), counts=np.array([1, 2, 1, 1]))
    # 0.15 * 10 is 1.5, which goes to the even 2; 0.15 * 30 is 4.5, which goes to 4.
    for most, masked in ((255, [1, 2, 2, 4, 77]), (76, [1, 2, 2, 4, 76]), (3, [1, 2, 2, 3, 3])):
        index = SampleIndex.of_histogram(histogram, "test", most)
        assert index.masked_counts.tolist() == masked
        assert index.lengths.tolist() == [1, 10, 10, 30, 511]


def test_an_exchange_sends_the_packets_of_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "one.csv").write_text("length,count\n20,1000\n")
    rows = rows_by_policy(answer(capsys, *SIZES, "--histogram", tmp_path / "one.csv"), "uniform")
    packet = gathered_bytes(np.full((2, 1, 6), 20), np.full((2, 1, 6), 3), "<u2")
    for policy, group in (("exchange_local", 4), ("exchange_global", 8)):
        row = rows[policy, "snake", "equal"]
        assert row["exchanged_bytes_per_rank"] == (group - 1) * packet


def test_the_picture_goes_where_it_should(
    capsys: pytest.CaptureFixture[str], histogram: Path, tmp_path: Path
) -> None:
    named = answer(capsys, *SIZES, "--histogram", histogram, "--out", tmp_path / "own.png")
    assert named["picture"] == str(tmp_path / "own.png")
    assert (tmp_path / "own.png").read_bytes().startswith(PNG)
    none = answer(capsys, *SIZES, "--histogram", histogram)
    assert none["picture"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["own.png"]


def test_rows_are_kept_where_the_picture_fails(
    capsys: pytest.CaptureFixture[str],
    histogram: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = tmp_path / "gone"
    words = ["plan", "balance", *SIZES, "--histogram", str(histogram), "--draws", "2"]
    words += ["--out", str(gone / "own.png")]

    def lose_the_directory(*_: object) -> Figure:
        gone.rmdir()
        return new_figure(1, 1)

    monkeypatch.setattr("bert_tools.plan.balance._draw", lose_the_directory)
    gone.mkdir()
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out.count("\nuniform ") == len(POLICIES)
    assert "own.png: No such file" in output.err and output.err.count("\n") == 1
    gone.mkdir()
    assert main([*words, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 5 * len(POLICIES)


def test_the_table_has_a_line_a_row(capsys: pytest.CaptureFixture[str], histogram: Path) -> None:
    words = ["plan", "balance", *SIZES, "--histogram", str(histogram), "--draws", "2", "--no-plot"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("sampler"))
    table = lines[lines.index(head) + 1 : lines.index("", lines.index(head))]
    assert len(table) == 5 * len(POLICIES)
    column = head.index("policy")
    assert {line[column:].split("  ")[0] for line in table} == {
        f"{policy} {deal}" if deal else policy for policy, deal, _ in POLICIES
    }
    assert any(line.startswith("imbalance: ") for line in lines)
    assert "quantile: 48 quantiles" in lines
    assert any("in a run of 2 steps (all drawn)" in line for line in lines)

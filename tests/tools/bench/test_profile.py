"""`bench profile`: what spans add up to, and that a step's table and picture come out."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bert_tools.bench import cli
from bert_tools.bench.profile import MOST_ROWS, tables
from bert_tools.bench.profile_plot import OTHER, kind_of
from bert_tools.bench.spans import Span, gaps, largest, record_spans

PNG = b"\x89PNG"


def span(name: str, start: float, end: float, lane: int = 0) -> Span:
    return Span(name=name, start_us=start, end_us=end, self_us=end - start, lane=lane)


# Two lanes: nothing runs in 3 .. 5 and 9 .. 10.
SPANS = [
    span("gemm", 0, 2),
    span("add", 1, 3, lane=1),
    span("gemm", 5, 8),
    span("add", 6, 7),
    span("copy", 8, 9, lane=1),
    span("add", 10, 11),
]


def test_gaps_are_where_no_lane_is_busy() -> None:
    found = gaps(SPANS)
    assert (found.total_us, found.count, found.longest_us, found.span_us) == (3, 2, 2, 11)
    assert found.share == pytest.approx(3 / 11)
    assert gaps(SPANS[:1]).total_us == 0


def test_largest_names_come_first() -> None:
    assert [(row.name, row.calls, row.self_us) for row in largest(SPANS, 2)] == [
        ("gemm", 2, 5),
        ("add", 3, 4),
    ]


def test_tables_are_of_one_step() -> None:
    table = tables(SPANS, num_steps=2)
    assert table["calls"] == len(SPANS) / 2
    assert table["step_ms"] == pytest.approx(11 / 2 / 1e3)
    assert table["gap_ms"] == pytest.approx(3 / 2 / 1e3)
    assert sum(row["share"] for row in table["rows"]) == pytest.approx(1)
    assert sum(kind["share"] for kind in table["kinds"].values()) == pytest.approx(1)
    assert next(iter(table["kinds"])) == "matrix product"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix product"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix product"),
        ("aten::_flash_attention_backward", "attention"),
        ("aten::native_layer_norm", "normalisation"),
        ("_adamw", "update"),
        ("_moments_and_squares", "update"),
        ("_sum_squares", "update"),
        ("_apply", "update"),
        ("_cast_to_fp8", "elementwise"),
        ("_gelu_fp8", "elementwise"),
        ("_keep_bits", "elementwise"),
        ("_transpose", "copy"),
        ("aten::nll_loss_forward", "loss"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("aten::view", OTHER),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_recorded_operators_leave_out_what_they_call() -> None:
    x = torch.ones(64, 64, requires_grad=True)

    def run() -> None:
        (x @ x).sum().backward()  # type: ignore[no-untyped-call]

    spans = record_spans(run, torch.device("cpu"))
    outer = [one for one in spans if one.name == "aten::matmul"]
    inner = [one for one in spans if one.name == "aten::mm"]
    assert len(outer) == 1
    assert len(inner) == 3  # forward, and a gradient of each factor
    assert outer[0].self_us < outer[0].end_us - outer[0].start_us
    assert [one.start_us for one in spans] == sorted(one.start_us for one in spans)


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    arguments = ["profile", "--layers", "2", "--hidden", "32", "--heads", "2", "--vocab", "101"]
    arguments += ["--max-length", "32", "--batch", "2", "--threads", "1", "--device", "cpu"]
    arguments += ["--steps", "2", "--plot", str(tmp_path / "step.png")]
    assert cli.run(parser.parse_args([*arguments, "--json"])) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    assert result["unit_of_work"] == "operator"
    assert len(result["rows"]) == MOST_ROWS
    shares = [row["share"] for row in result["rows"]]
    assert shares == sorted(shares, reverse=True)
    products = [row for row in result["rows"] if row["name"] in ("aten::mm", "aten::addmm")]
    assert all(row["calls"] == int(row["calls"]) for row in products)
    assert 0 <= result["gap_share"] < 1
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)
    assert cli.run(parser.parse_args(arguments)) == 0
    words = capsys.readouterr().out
    assert "by kind:" in words
    assert "matrix product" in words  # which rows are printed depends on their times

"""`mlperf_bert plan cluster`, and docs/concepts/cluster_model.md, whose numbers are its."""

import json

import pytest

from bert_tools.plan.cluster.forecast import HELD_OUT
from bert_tools.plan.cluster.machine import constant_rows
from support import REPOSITORY, load_study

LOG = REPOSITORY / "logs" / "2026-11-22-cluster-model"
TABLES = json.loads((LOG / "tables.json").read_text("utf-8"))
PAGE, STORY = (
    (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("concepts/cluster_model", "concepts/scaling")
)
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# Table -> numbers from it in sentences of the page, and in the story of scaling.
SHOWN = {
    "errors": ("17 of 19", ""),
    "ablation": ("7.1 ms, 2.5 ms", ""),
    "techniques": ("+22.7 ms, +15.4 ms, +24.9 ms", ""),
    "predictions": ("67.3 ms, 14.3 s, 22.3 s", ""),
    "sweep": ("31.9 ms, 38.2 ms, 11.7 s, 5.6 s, 11.9 s, 12.9 s", "12.9 s"),
}
NAMES = {1: "dgxa100_1x8x56x1", 16: "dgxa100_16x8x24x1", 128: "dgxa100_128x8x4x1"}


@pytest.mark.parametrize("nodes", NAMES)
def test_one_question_has_one_answer(nodes, asked):
    suggested = asked(f"suggest --nodes {nodes} --gpus-per-node 8")
    found = asked("cluster --config", NAMES[nodes])
    seconds, steps = found["forecast"]["seconds"], found["run"]["steps"]
    assert suggested["steps"] == steps
    filters = "--filter round=2.1 --filter submitter=NVIDIA --filter accelerator~A100"
    law = asked("law --filter division=closed", filters)
    minutes = law["coefficient_minutes"] * (8 * nodes) ** law["exponent"]
    batch = f"{suggested['global_batch_size']:,}"
    (size,) = (row for row in TABLES["sizes"] if row[0] == str(nodes))
    low, high = found["forecast"]["low"], found["forecast"]["high"]
    assert size[1] == batch and size[3] == f"{steps:,}"
    assert size[4] == f"{seconds:,.1f} ({low:,.1f} to {high:,.1f})"
    assert size[5] == f"{60 * minutes:,.1f}"
    assert "| " + " | ".join(size) + " |" in STORY


def test_constants_are_what_the_model_takes_today():
    for row, shown in zip(constant_rows(), TABLES["constants"][1:], strict=True):
        assert shown[:3] == [f"`{row.name}`", f"{row.value:.4g}", f"{row.low:g} to {row.high:g}"]


def test_errors_beside_a_forecast_are_those_of_the_tables():
    _, whole, step, looked_up, *_ = load_study(LOG.name, "cluster_tables").errors(TABLES["errors"])
    assert (step[:2], whole[:2]) == (["held out", "step"], ["held out", "step x samples"])
    for row in (step, whole):
        assert row[2] in HELD_OUT and f"mean error {row[4]}" in HELD_OUT
    assert step[3] in HELD_OUT and f"class instead: {looked_up[2]}" in HELD_OUT
    for page in (PAGE, README):
        assert all(shown in page for shown in (whole[2], step[2], step[3], looked_up[2]))


def test_autocast_sends_fp32_gradients(asked, told):
    words = f"cluster --config {NAMES[16]} --set run.step_mode=eager --set mlperf.division=open"
    bf16, autocast, fp32 = (
        asked(words, f"--set model.precision={each}") for each in ("bf16", "bf16_autocast", "fp32")
    )
    assert autocast["communication_ms"] == pytest.approx(fp32["communication_ms"], rel=0.01)
    assert autocast["communication_ms"] > 1.9 * bf16["communication_ms"]
    settings = "--set model.precision=bf16_autocast --set parallel.allreduce_dtype=bf16"
    sent_as_bf16 = asked(words, settings)["communication_ms"]
    assert 0.9 * bf16["communication_ms"] < sent_as_bf16 < 0.7 * autocast["communication_ms"]
    # Without TF32, which the program does not use, fp32 has a sixteenth of the rate of bf16.
    assert fp32["parts_ms"]["backward"] > 8 * bf16["parts_ms"]["backward"]
    for name in ("forward", "backward"):  # but its matrix products are those of bf16
        assert autocast["parts_ms"][name] == pytest.approx(bf16["parts_ms"][name])
    assert ", bf16_autocast, " in told(words, "--set model.precision=bf16_autocast")


def test_numbers_in_sentences_stand_in_their_table():
    for name, shown in SHOWN.items():
        text = json.dumps(TABLES[name])
        for page, numbers in zip((PAGE, STORY), shown, strict=True):
            for number in filter(None, numbers.split(", ")):
                assert number in text and number in page, (name, number)

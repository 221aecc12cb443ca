"""The study of optimizers: samples to a target, who is best, fits; and what a page says of it."""

import json

import numpy as np
import pytest

from support import REPOSITORY, load_study

LOG = REPOSITORY / "logs" / "2026-11-24-optimizers"


@pytest.fixture(scope="module")
def modules():
    """The study and its tables, which stand beside their records."""
    return load_study(LOG.name, "study"), load_study(LOG.name, "tables")


def record(number, curve, reached):
    arm = {"optimizer": "muon", "batch": 32, "kind": "trial", "number": number}
    return {**arm, "name": f"muon-32-trial-{number}", "curve": curve, "reached": reached}


def test_samples_to_a_target_best_trials_and_fits(modules):
    study, tables = modules
    curve = [(100, 0.1), (200, 0.2), (300, 0.18), (400, 0.3)]
    assert study.crossing(curve, 0.15) == 150
    assert study.crossing(curve, 0.25) == round(300 + 100 * 0.07 / 0.12)
    assert study.crossing(curve, 0.05) == 50
    assert study.crossing(curve, 0.31) is None
    far = [record(0, [(10, 0.1)], None), record(1, [(10, 0.05), (20, 0.15)], None)]
    assert study.best_trial({each["name"]: each for each in far}, "muon", 32) is far[1]
    near = [record(2, [(30, 0.3)], 28), record(3, [(20, 0.3)], 19)]
    assert study.best_trial({each["name"]: each for each in far + near}, "muon", 32) is near[1]
    batches = np.array([32.0, 128.0, 512.0])
    least, critical = tables.fitted(batches, 20_000 * (1 + batches / 300))
    assert (least, critical) == pytest.approx((20_000, 300), rel=1e-6)


def test_what_the_page_says_of_muon_is_what_was_measured(modules):
    _, tables = modules
    lines = (LOG / "records.jsonl").read_text("utf-8").splitlines()
    records = {each["name"]: each for each in map(json.loads, lines)}
    batch = max(each["batch"] for each in records.values())
    muon, adamw = (tables.of_arm(records, name, batch, "seed") for name in ("muon", "adamw"))
    assert "| 0.42 (0.39 to 0.46)" in tables.cells(muon, adamw, tables.NEARER)
    page = (REPOSITORY / "docs" / "how" / "optimizer.md").read_text("utf-8")
    assert "target 0.42 at 2,048" in page

"""The study of optimizers: what a page says of it is what was measured."""

import json
import math

import numpy as np
import pytest

from support import REPOSITORY, load_study

LOG = REPOSITORY / "logs" / "2026-11-24-optimizers"


def test_what_the_page_says_of_muon_is_what_was_measured():
    tables = load_study(LOG.name, "tables")
    lines = (LOG / "records.jsonl").read_text("utf-8").splitlines()
    records = {each["name"]: each for each in map(json.loads, lines)}
    batch = max(each["batch"] for each in records.values())
    muon, adamw = (tables.of_arm(records, name, batch, "seed") for name in ("muon", "adamw"))
    assert "0.42 (0.37 to 0.48)" in tables.cells(muon, adamw, tables.NEARER)
    page = (REPOSITORY / "docs" / "concepts" / "optimizers.md").read_text("utf-8")
    assert "0.42 at 2,048 for the easier one" in " ".join(page.split())


def test_the_second_campaign_draws_the_same_points_for_every_optimizer():
    fair = load_study(LOG.name, "fair")
    for batch in fair.BATCHES:
        arms = {name: list(fair.drawn(name, batch)) for name in fair.OPTIMIZERS[batch]}
        steps = fair.BUDGETS[batch] // batch
        shares = [each["schedule.warmup_steps"] / steps for each in arms["adamw"]]
        assert len(shares) == 16 + fair.MORE_TRIALS[batch]
        assert min(shares) < 0.05 and 0.3 < max(shares) <= 0.4
        assert all(0.18 < share <= 0.4 for share in shares[16:])
        for name, arm in arms.items():
            assert [each["optim.weight_decay"] for each in arm] == [
                each["optim.weight_decay"] for each in arms["adamw"]
            ]
            low, high = (each["optim.learning_rate"] for each in (arm[0], arms["adamw"][0]))
            ratio = fair.RATES[name][0] / fair.RATES["adamw"][0]
            assert math.isclose(low / high, ratio, rel_tol=1e-3)


def test_exact_sign_flips():
    fair = load_study(LOG.name, "fair")
    assert fair.sign_flips(np.full(7, 0.1)) == 2 / 2**7
    assert fair.sign_flips(np.array([0.1, -0.1])) == 1
    assert fair.sign_flips(np.array([0.3, 0.2, -0.1])) == pytest.approx(4 / 8)

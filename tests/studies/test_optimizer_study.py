"""The study of optimizers: what a page says of it is what was measured."""

import json

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
    assert "for which Muon needed 0.42 times as many samples" in page

"""How a run ended, as its file says it: read as written, or one line of error."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.run.outcome import REMEDY, RunOutcome, read_outcome

REACHED = RunOutcome(
    status="success", steps=120, samples=1920, seconds=3.5, mlm_accuracy=0.72, stopped_by=None
)
STOPPED = replace(REACHED, status="aborted", mlm_accuracy=None, stopped_by="SIGTERM")


@pytest.mark.parametrize("outcome", [REACHED, STOPPED], ids=["reached", "stopped"])
def test_an_outcome_comes_back_as_it_was_written(outcome: RunOutcome, tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    path.write_bytes(outcome.to_json())
    assert read_outcome(path) == outcome


def test_the_file_says_its_version_and_every_field() -> None:
    assert json.loads(STOPPED.to_json()) == {
        "schema_version": 1,
        "status": "aborted",
        "steps": 120,
        "samples": 1920,
        "seconds": 3.5,
        "mlm_accuracy": None,
        "stopped_by": "SIGTERM",
    }


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("schema_version", 2, "schema_version: is 2, this program reads 1"),
        ("status", "fine", "status: is 'fine', neither success nor aborted"),
        ("status", None, "status: is None, not a non-empty string"),
        ("steps", -1, "steps: is -1, not an integer"),
        ("samples", 1.5, "samples: is 1.5, not an integer"),
        ("seconds", "1", "seconds: is '1', not a number"),
        ("seconds", -1, "seconds: is -1.0, less than none"),
        ("mlm_accuracy", 1.01, "mlm_accuracy: is 1.01, not in 0 .. 1"),
        ("mlm_accuracy", -0.1, "mlm_accuracy: is -0.1, not in 0 .. 1"),
        ("stopped_by", 15, "stopped_by: is 15, not a non-empty string"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(json.dumps({**json.loads(REACHED.to_json()), key: value}))
    with pytest.raises(DataError) as raised:
        read_outcome(path)
    assert reason in str(raised.value) and str(raised.value).endswith(REMEDY)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    with pytest.raises(DataError, match="is missing"):
        read_outcome(path)
    path.write_bytes(REACHED.to_json()[:-20])
    with pytest.raises(DataError, match="is not valid JSON"):
        read_outcome(path)

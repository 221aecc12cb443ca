"""`metrics.jsonl` from outside: read as written, or one line of error."""

import json
from pathlib import Path

import pytest
from run_cases import BATCH_16K, record, write_run

from bert_tools.report.run_files import (
    MAX_LINE_BYTES,
    MAX_METRICS_BYTES,
    MAX_RECORDS,
    read_metrics,
)
from mlperf_bert.common.errors import UserError

GOOD = json.dumps(record(1, 16, None)).encode()


def changed(**values: object) -> bytes:
    return json.dumps({**record(1, 16, None), **values}).encode() + b"\n"


def without(key: str) -> bytes:
    kept = {name: value for name, value in record(1, 16, None).items() if name != key}
    return json.dumps(kept).encode() + b"\n"


HOSTILE = {
    "no JSON": (b"{\n", "line 1: is no record"),
    "second line": (GOOD + b"\nx\n", "line 2: is no record"),
    "an empty line": (GOOD + b"\n\n", "line 2: is no record"),
    "a list": (b"[]\n", "is not a JSON object"),
    "deep": (b"[" * 8000 + b"\n", "is nested too deeply"),
    "NaN": (changed(loss=0).replace(b'"loss": 0', b'"loss": NaN'), "NaN is not JSON"),
    "a huge number": (b'{"step": 1e999}\n', "'step' is inf, no number"),
    "many digits": (b'{"step": ' + b"9" * 5000 + b"}\n", "line 1: is no record"),
    "a text": (changed(loss="1"), "'loss' is '1', no number"),
    "an object": (changed(more={}), "'more' is a dict, no number"),
    "a flag": (changed(step=True), "'step' is True, no number"),
    "no step": (without("step"), "step is None, no count"),
    "half a step": (changed(step=0.5), "step is 0.5, no count"),
    "fewer than no samples": (changed(samples=-1), "samples is -1, no count"),
    "no loss": (without("loss"), "loss is missing"),
    "more than all right": (changed(mlm_accuracy=1.5), "mlm_accuracy is 1.5, not in 0 .. 1"),
    "a step back": (GOOD + b"\n" + GOOD + b"\n", "line 2: goes back to step 1"),
    "a long line": (b" " * MAX_LINE_BYTES + GOOD + b"\n", "line 1: has more than 8,192 bytes"),
    "too many lines": (b"\n" * (MAX_RECORDS + 1), "has more than 200,000 lines"),
    "too large": (b" " * (MAX_METRICS_BYTES + 1), "has more than 33,554,432 bytes"),
}


@pytest.mark.parametrize(("contents", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_metrics_are_one_line(contents: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(contents)
    with pytest.raises(UserError, match=r"metrics\.jsonl") as raised:
        read_metrics(path)
    assert reason in str(raised.value)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_metrics_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [record(step, 16, None if step % 2 else 0.5) for step in range(1, 9)]
    written[3]["loss"] = None  # which is what a loss that is no number becomes
    directory = write_run(tmp_path / "run", BATCH_16K, written)
    assert read_metrics(directory / "run_0" / "metrics.jsonl") == written


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD[:40])
    assert [each["step"] for each in read_metrics(path)] == [1]

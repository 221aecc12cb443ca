"""Records of runs are read strictly: what is no record is refused in one line that says where."""

from pathlib import Path
from typing import Any

import pytest
from squad_records import pipeline_timeline, record, write_record

from bert_tools.squad.record import RESULT, Span, read_run
from mlperf_bert.common.errors import DataError


def test_a_record_is_read(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "schedule": "gpipe",
        "device_utilisation": [0.5, 0.7],
        "peak_memory_bytes": [5, 9],
        "bubble": {"measured": 0.21, "formula": 0.2},
        "timeline": pipeline_timeline(2, 4),
        "noise_scale": 31.0,
    }
    run = read_run(write_record(tmp_path, record("pipeline:2", ranks=2, seed=3, **changes)))
    assert (run.engine, run.schedule, run.ranks, run.seed) == ("pipeline:2", "gpipe", 2, 3)
    assert run.utilisation == pytest.approx(0.6)
    assert run.peak_memory_bytes == 9
    assert (run.bubble_measured, run.bubble_formula) == (0.21, 0.2)
    assert run.timeline[0] == Span(rank=0, stage=0, kind="F", microbatch=0, begin_s=0.0, end_s=1.0)
    assert run.noise_scale == 31.0
    assert run.losses[:2] == (3.0, 2.9)


@pytest.mark.parametrize(("ranks", "is_comparable"), [(1, True), (2, True), (4, False)])
def test_more_ranks_than_cores_are_not_comparable(
    tmp_path: Path, ranks: int, is_comparable: bool
) -> None:
    run = read_run(write_record(tmp_path, record(f"ddp:{ranks}", ranks=ranks)))
    assert run.is_comparable is is_comparable


def test_on_gpus_each_rank_has_its_own(tmp_path: Path) -> None:
    found = record("ddp:8", ranks=8, device="cuda", cores=2)
    assert read_run(write_record(tmp_path, found)).is_comparable


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2),
        ("engine", 7),
        ("ranks", 0),
        ("ranks", 10**9),
        ("losses", ["much"]),
        ("seconds", {"train": 0.0, "end_to_end": 1.0}),
        ("seconds", {"train": 10**400, "end_to_end": 1.0}),
        ("samples_per_s", [1.0]),
        ("noise_scale", -1.0),
        ("device_utilisation", "high"),
        ("model", {"layers": [1]}),
        ("timeline", [{"rank": 0}]),
        ("timeline", [pipeline_timeline(1, 1)[0] | {"end_s": -1.0}]),
        ("timeline", [pipeline_timeline(1, 1)[0] | {"kind": "G"}]),
        ("bubble", {"measured": "a lot"}),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(DataError) as refused:
        read_run(write_record(tmp_path, record() | {key: value}))
    assert RESULT in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", sorted(record().keys() - {"schedule", "mfu"}))
def test_a_record_without_one_of_its_keys_never_raises_anything_else(
    tmp_path: Path, key: str
) -> None:
    found = record()
    del found[key]
    try:
        run = read_run(write_record(tmp_path, found))
    except DataError as refused:
        assert key in str(refused)
    else:  # a key that comparisons do not need
        assert run.engine == "single"


def test_a_run_that_has_not_ended_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not ended"):
        read_run(tmp_path)

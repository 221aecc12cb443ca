"""A clock that is set during a run is said at the end of that run."""

import time

import pytest

from mlperf_bert.run.mlperf_log import MlperfLog
from support import mlperf_records


@pytest.mark.parametrize(
    ("jump", "way"),
    [(-3600, "back by 3,600 s"), (86_400, "ahead by 86,400"), (-0.4, ""), (0.4, "")],
)
def test_a_clock_that_was_set_is_said_and_one_kept_in_step_is_not(
    tmp_path, monkeypatch, capsys, jump, way
):
    log, of_other_rank = MlperfLog(tmp_path / "result_0.txt"), MlperfLog(None)
    log.run_start()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    for each in (of_other_rank, log):
        assert capsys.readouterr().err == ""
        each.run_stop(samples=1, eval_samples=1, status="success")
    log.close()
    said = capsys.readouterr().err
    assert said.count("\n") == bool(way)
    assert ("warning: the clock of this machine jumped " in said and way in said) == bool(way)
    assert mlperf_records(tmp_path / "result_0.txt")[-1]["key"] == "run_stop"

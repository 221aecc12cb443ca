"""A clock that is set during a run is said at the end of that run."""

import time

import pytest

from mlperf_bert.run.mlperf_log import MlperfLog
from support import mlperf_records


def ended(tmp_path, monkeypatch, jump):
    """A log whose clock jumps so many seconds between start and stop; what it says."""
    log = MlperfLog(tmp_path / "result_0.txt")
    log.run_start()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    log.run_stop(samples=1, eval_samples=1, status="success")
    log.close()
    return mlperf_records(tmp_path / "result_0.txt")


@pytest.mark.parametrize(("jump", "way"), [(-3600, "back by 3,600 s"), (86_400, "ahead by 86,400")])
def test_a_clock_that_was_set_is_said(tmp_path, monkeypatch, capsys, jump, way):
    ended(tmp_path, monkeypatch, jump)
    said = capsys.readouterr().err
    assert f"warning: the clock of this machine jumped {way}" in said and said.count("\n") == 1


@pytest.mark.parametrize("jump", [-0.4, 0.0, 0.4])
def test_a_clock_that_is_kept_in_step_is_not(tmp_path, monkeypatch, capsys, jump):
    assert ended(tmp_path, monkeypatch, jump)[-1]["key"] == "run_stop"
    assert capsys.readouterr().err == ""


def test_ranks_without_a_log_say_nothing(monkeypatch, capsys):
    log = MlperfLog(None)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    log.run_stop(samples=1, eval_samples=1, status="success")
    assert capsys.readouterr().err == ""

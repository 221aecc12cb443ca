"""`--resume auto` in a directory without a run: a new run, or a mistyped name."""

import fcntl
import os

import pytest

from mlperf_bert.errors import ConfigError
from mlperf_bert.run.earlier import describe_new_run, is_mistyped
from run_cases import end_run, write_run


def interrupted(root):
    """A run with a checkpoint that has not ended."""
    (write_run(root) / "run_0/checkpoints/step_00000005").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("typed", "existing", "is_close"),
    [
        *(("frist-run", "first-run", True), ("firrst-run", "first-run", True)),
        *(("First_Run", "first-run", True), ("first run", "first-run", True)),
        *(("adam", "adamw", False), ("cpu-tiny", "gpu-tiny", False), ("runA", "runB", False)),
        *(("try-A", "try-a", False), ("lr_+5", "lr_-5", False), ("seed_12", "seed_21", False)),
        *(("seed_1", "seed_2", False), ("seed_1", "seed_12", False), ("try-a", "try-b", False)),
        *(("8841-cpu_tiny", "8842-cpu_tiny", False), ("lamb", "adamw", False)),
        *(("a", "b", False), ("", "a", False)),
    ],
)
def test_which_names_are_mistyped(typed, existing, is_close):
    assert is_mistyped(typed, existing) == is_close


def test_a_name_close_to_an_interrupted_run_is_refused(tmp_path):
    first, mistyped = interrupted(tmp_path / "first-run"), tmp_path / "frist-run"
    with pytest.raises(ConfigError) as refused:
        describe_new_run(mistyped, is_requeued=False)
    assert str(refused.value).startswith(
        f"{mistyped}: has no run to resume; did you mean {first}? To start a new run, use --resume"
    )
    line = f"no earlier run in {mistyped}; starting a new one"
    assert describe_new_run(mistyped, is_requeued=True) == line
    assert describe_new_run(first, is_requeued=False) is None
    with (first / ".run_0.lock").open("w") as lock:
        # A process sees no lock of its own, so a child holds it.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        child = os.fork()
        if child == 0:
            try:
                os._exit(int(describe_new_run(mistyped, is_requeued=False) != line))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    end_run(first / "run_0", "aborted", stopped_by="SIGTERM")
    with pytest.raises(ConfigError):
        describe_new_run(mistyped, is_requeued=False)
    end_run(first / "run_0")
    assert describe_new_run(mistyped, is_requeued=False) == line


def test_a_first_start_is_said(tmp_path):
    write_run(tmp_path / "first-run")  # without a checkpoint
    interrupted(tmp_path / "other")
    for name in ("first-rnu", "fresh"):
        line = f"no earlier run in {tmp_path / name}; starting a new one"
        assert describe_new_run(tmp_path / name, is_requeued=False) == line

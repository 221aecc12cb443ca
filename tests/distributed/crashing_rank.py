"""A run of `mlperf_bert train` in which rank 1 meets an error that nobody expects.

`crashing_rank.py PLACE WORDS...`: a target of forked_ranks.py. The error comes in one of PLACES, in
the third step or after it, and when it comes is printed.
"""

import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from forked_ranks import run_ranks
from mlperf_bert.__main__ import entry
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.data.loader import Staging
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.step import eager
from support import sets_of

SAID = "a planted error"
SETTINGS = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=8", "run.max_steps=40"),
    *("schedule.decay_steps=40", "run.hang_timeout_s=60", "eval.interval_samples=64"),
    "checkpoint.interval_steps=3",
)
WARM_UPS = 3
PLACES = {  # what is called, and which call it is
    "loader": (Staging, "send", 3),  # in the loader's thread
    "forward": (BertForPretraining, "forward", WARM_UPS + 3),
    "backward": (eager, "pretraining_loss", WARM_UPS + 3),
    "evaluation": (Evaluator, "count", 1),
    "save": (CheckpointWriter, "begin", 1),
}


def crash(*_):
    """Raise the error, and print when."""
    print(f"crashed at {time.time()}", flush=True)
    raise RuntimeError(SAID)


def plant(place):
    """Have the call raise it; in "backward" the backward of what it returns."""
    owner, name, number = PLACES[place]
    usual = getattr(owner, name)
    calls = 0

    def planted(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number and place != "backward":
            crash()
        found = usual(*arguments, **options)
        if calls == number:
            assert isinstance(found, Tensor)
            found.register_hook(crash)
        return found

    setattr(owner, name, planted)


class Crash(NamedTuple):
    """What two ranks did."""

    seconds: float  # from the error to the end of the last rank
    statuses: list[int]
    printed: str  # from the error on


def crash_a_run(config, data, directory, policy, place):
    """Train on two ranks without a launcher, of which rank 1 meets the error in `place`."""
    words = ["train", "--config", config, "--data", data, "--run-dir", directory]
    words += sets_of(*SETTINGS, f"data.balance={policy}")
    statuses, printed = run_ranks(Path(__file__), (place, *words), 2, timeout_s=150)
    ended = time.time()
    crashed = re.search(r"crashed at ([\d.]+)", printed)
    assert crashed, printed
    return Crash(ended - float(crashed[1]), statuses, printed[crashed.start() :])


if __name__ == "__main__":
    if read_rank_info().rank == 1:
        plant(sys.argv[1])
    del sys.argv[1]
    entry()

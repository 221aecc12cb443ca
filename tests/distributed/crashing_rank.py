"""A run of `mlperf_bert train` in which rank 1 meets an error that nobody expects.

`crashing_rank.py PLACE WORDS...`: a target of forked_ranks.py. The error comes in one of PLACES, in
the third step or after it, and when it comes is printed.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from mlperf_bert.__main__ import entry
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.data.staging import Staging
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.step import eager

SAID = "a planted error"
WARM_UPS = 3
PLACES: dict[str, tuple[Any, str, int]] = {  # what is called, and which call it is
    "loader": (Staging, "send", 3),  # in the loader's thread
    "forward": (BertForPretraining, "forward", WARM_UPS + 3),
    "backward": (eager, "pretraining_loss", WARM_UPS + 3),
    "evaluation": (Evaluator, "count", 1),
    "save": (CheckpointWriter, "begin", 1),
}


def crash(*_: object) -> NoReturn:
    """Raise the error, and print when."""
    print(f"crashed at {time.time()}", flush=True)
    raise RuntimeError(SAID)


def plant(place: str) -> None:
    """Have the call raise it; in "backward" the backward of what it returns."""
    owner, name, number = PLACES[place]
    usual: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def planted(*arguments: Any, **options: Any) -> Any:
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


if __name__ == "__main__":
    if read_rank_info().rank == 1:
        plant(sys.argv[1])
    del sys.argv[1]
    entry()

"""Says in one line that other ranks stopped answering, where gloo and NCCL say it in many."""

from datetime import timedelta

import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.errors import LostRanksError

# Words of gloo's RuntimeErrors (torch 2.11 to 2.13), which have no type of their own.
_OF_GLOO = ("gloo/transport", "caused pair closure")
_SILENCE = ("timed out", "timeout")


def as_lost_ranks(error: RuntimeError, info: RankInfo, timeout: timedelta) -> LostRanksError | None:
    """The error in one line where it is about communication; None where it is about anything else.

    Args:
        error: as raised out of a collective, or of a backward that holds one.
        info: of this rank.
        timeout: of the process group.
    """
    text = str(error)
    if not isinstance(error, dist.DistError) and not any(word in text for word in _OF_GLOO):
        return None
    where = f"rank {info.rank} on {host_name()}"
    if any(word in text.lower() for word in _SILENCE):
        seconds = timeout.total_seconds()
        problem = f"no answer from other ranks within {seconds:g} s (run.hang_timeout_s)"
        remedy = "look for a rank that is slow or gone, and for a broken link between the nodes"
        return LostRanksError(where, problem, remedy)
    problem = "another rank closed the connection"
    return LostRanksError(where, problem, "look above for the first rank that failed")

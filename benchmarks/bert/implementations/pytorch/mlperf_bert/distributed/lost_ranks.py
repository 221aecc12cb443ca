"""Says in one line that other ranks stopped answering, where gloo and NCCL say it in many."""

from datetime import timedelta

import torch.distributed as dist

from mlperf_bert.common.errors import LostRanksError

# Words of gloo's RuntimeErrors (torch 2.11 to 2.13), which have no type of their own.
_OF_GLOO = ("gloo/transport", "caused pair closure")
_SILENCE = ("timed out", "timeout")
_OF_THIS_HOST = ("failed to listen", "already in use")


def as_lost_ranks(error: Exception, here: str, timeout: timedelta) -> LostRanksError | None:
    """The error in one line where it is about communication; None where it is about anything else.

    Args:
        error: as raised out of a collective, or of a backward that holds one.
        here: which rank this is, and what it was doing.
        timeout: how long the others had.
    """
    text = str(error).lower()
    is_of_torch = isinstance(error, dist.DistError) and not any(w in text for w in _OF_THIS_HOST)
    if not is_of_torch and not any(word in text for word in _OF_GLOO):
        return None
    if any(word in text for word in _SILENCE):
        seconds = timeout.total_seconds()
        problem = f"no answer from other ranks within {seconds:g} s (run.hang_timeout_s)"
        remedy = "look for a rank that is slow or gone, and for a broken link between the nodes"
        return LostRanksError(here, problem, remedy)
    problem = "another rank closed the connection"
    return LostRanksError(here, problem, "look above and below for the first rank that failed")

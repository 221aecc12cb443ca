"""torch's pipeline schedules by our names, and which stages a rank holds under each."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from bert_tools.squad.settings import Schedule

_OF_ONE_STAGE: dict[Schedule, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_SEVERAL: dict[Schedule, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


def stages_of_rank(schedule: Schedule, rank: int, ranks: int, num_stages: int) -> list[int]:
    """Numbers of the stages that a rank of the pipeline holds, the first in the model first.

    A zero-bubble pipeline goes down the ranks and up again, so that its last stage is the first
    rank's (arXiv 2401.10241, section 6); the others begin anew with the first rank.
    """
    if schedule == "zero_bubble":
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, ranks))


def make_schedule(
    schedule: Schedule,
    stages: Sequence[PipelineStage],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    is_half: bool = False,
) -> Any:
    """torch's schedule of so many microbatches, with sums of gradients left as they are.

    Half of an update's microbatches may be too few for a schedule: they take the plainest one, all
    forwards and then all backwards.
    """
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if schedule in _OF_ONE_STAGE:
        kind = ScheduleGPipe if is_half else _OF_ONE_STAGE[schedule]
        return kind(stages[0], microbatches, **options)
    if is_half and schedule == "interleaved":
        return ScheduleLoopedBFS(list(stages), microbatches, **options)
    return _OF_SEVERAL[schedule](list(stages), microbatches, **options)

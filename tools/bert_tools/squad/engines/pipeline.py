"""A pipeline: each rank holds some layers, microbatches stream through; or several side by side.

torch.distributed.pipelining runs the schedule. Of several pipelines each computes its share of the
microbatches, and their gradients are averaged when all have been through. A stage takes and gives
rows of one shape, as torch wants it: only hidden states travel between ranks, in rows of the run's
token capacity. Which tokens a row holds every rank knows, so a stage cuts the padding off on
arrival and computes real tokens only.

Shape letters: M microbatches of a pipeline, T tokens of a microbatch, C capacity of a row in
tokens, D hidden.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from bert_tools.squad.bubble import StageClock
from bert_tools.squad.engines.contract import REPLICA, STAGE, MakeBatch, Team, share_of
from bert_tools.squad.model import EMBEDDINGS, LAYERS, SpanModel
from bert_tools.squad.settings import EngineName, Schedule
from bert_tools.squad.spans import SpanBatch
from mlperf_bert.data.sampler import Int64Array

_OF_ONE_STAGE: dict[Schedule, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_SEVERAL: dict[Schedule, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}

MOST_AHEAD = 8  # batches of an evaluation that a stage may have sent and the next not yet taken


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


class StageModule(nn.Module):
    """One part, for the microbatch that its stage says is next."""

    def __init__(self, part: SpanModel, capacity: int) -> None:
        super().__init__()
        self.part = part
        self._capacity = capacity
        self.batches: Sequence[SpanBatch] = ()
        self.loss_factor = 1.0
        self.number = 0  # of the microbatch

    def forward(self, row: Tensor) -> Tensor:
        """[1, C] token ids or [1, C, D] hidden states -> [1, C, D], or of the last the loss [1]."""
        batch = self.batches[self.number]
        mine = row[0, : batch.num_tokens]
        hidden: Tensor | None = mine
        if self.part.part.has_embeddings:
            batch = replace(batch, tokens=replace(batch.tokens, input_ids=mine))
            hidden = None
        found: Tensor = self.part(hidden, batch, "loss_sum")
        # No views: schedules with a backward for the weights alone detach outputs in place.
        if self.part.part.has_head:
            return found[None] * self.loss_factor
        return F.pad(found[None], (0, 0, 0, self._capacity - batch.num_tokens))

    def example(self, *, of: str) -> Tensor:
        """An empty tensor of the shape and dtype of its "input" or "output", on its device."""
        config, part = self.part.config, self.part.part
        device, hidden = self.part.device, (1, self._capacity, config.hidden_size)
        if of == "input" and part.has_embeddings:
            return torch.empty((1, self._capacity), dtype=torch.int64, device=device)
        shape = (1,) if of == "output" and part.has_head else hidden
        return torch.empty(shape, dtype=self.part.dtype, device=device, requires_grad=True)


class TimedStage(PipelineStage):
    """A stage that tells its module which microbatch it is, and a clock when it computes."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        examples: tuple[Tensor, Tensor],
        group: dist.ProcessGroup | None,
        clock: StageClock,
    ) -> None:
        """`examples` are of input and output, so that torch need not try the module out."""
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=examples[:1],
            output_args=examples[1:],
            group=group,
        )
        self._clock = clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        with self._clock.span(self.stage_index, "F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        with self._clock.span(self.stage_index, "B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        with self._clock.span(self.stage_index, "W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What all ranks of a pipeline must agree on."""

    name: EngineName
    microbatches: int  # of one pipeline and update: M
    capacity: int  # C
    bounds: Sequence[int]  # first layer of each stage, and at the end how many layers there are

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of the stages of a rank."""
        assert self.name.schedule is not None
        return stages_of_rank(self.name.schedule, rank, self.name.stages, self.name.num_parts)

    def stage_of(self, name: str) -> int:
        """Which stage holds the tensor of that name."""
        if name.startswith(LAYERS):
            layer = int(name.removeprefix(LAYERS).partition(".")[0])
            return bisect_right(self.bounds, layer) - 1
        return 0 if name.startswith(EMBEDDINGS) else self.name.num_parts - 1

    def owners(self) -> list[int]:
        """The rank within its pipeline of each stage."""
        found = {stage: rank for rank in range(self.name.stages) for stage in self.stages_of(rank)}
        return [found[stage] for stage in range(self.name.num_parts)]


class Pipelined:
    """`pipeline`, with one replica or several.

    Args:
        parts: of the model, this rank's, the first in the model first.
        shape: of the pipeline.
        shapes: of all the model's tensors, by name.
        team: replicas times stages.
        clock: of this rank's stages.
    """

    def __init__(
        self,
        parts: Sequence[SpanModel],
        shape: PipelineShape,
        shapes: Mapping[str, tuple[int, ...]],
        team: Team,
        clock: StageClock,
    ) -> None:
        self.parts = parts
        self.copies = team.replicas
        self._shape = shape
        self._shapes = shapes
        self._team = team
        self._clock = clock
        self._owners = shape.owners()
        self._numbers = shape.stages_of(team.stage)
        self._modules = [StageModule(part, shape.capacity) for part in parts]
        self._schedules: dict[int, Any] = {}

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """See `Engine`."""
        team = self._team
        mine = microbatches[team.replica :: team.replicas]
        batches = [make(numbers) for numbers in mine]
        for module in self._modules:
            module.batches = batches
            # Averaged over replicas below: times their number that is the sum.
            module.loss_factor = team.replicas / divisor
        losses: list[Tensor] = []
        rows = (self._rows(batches),) if 0 in self._numbers else ()
        # The loss is made by the last stage; torch wants a target to compare it with.
        target = torch.zeros(len(batches), device=self.parts[0].device)
        self._schedule(len(batches)).step(*rows, target=target, losses=losses, return_outputs=False)
        self._average()
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for loss in losses:
            total += loss.detach().double() / team.replicas
        return total

    def _schedule(self, microbatches: int) -> Any:
        """Each number of microbatches has stages of its own: torch keeps its buffers in them."""
        if microbatches not in self._schedules:
            name = self._shape.name
            assert name.schedule is not None
            group = self._team.group(STAGE)
            stages = [
                TimedStage(
                    module,
                    number,
                    name.num_parts,
                    module.part.device,
                    (module.example(of="input"), module.example(of="output")),
                    group,
                    self._clock,
                )
                for module, number in zip(self._modules, self._numbers, strict=True)
            ]
            is_half = microbatches != self._shape.microbatches
            self._schedules[microbatches] = make_schedule(
                name.schedule, stages, microbatches, _loss_itself, is_half=is_half
            )
        return self._schedules[microbatches]

    def _rows(self, batches: Sequence[SpanBatch]) -> Tensor:
        """Token ids [M, C] for the first stage, zeros behind the tokens."""
        device = self.parts[0].device
        rows = torch.zeros((len(batches), self._shape.capacity), dtype=torch.int64, device=device)
        for row, batch in zip(rows, batches, strict=True):
            row[: batch.num_tokens] = batch.tokens.input_ids
        return rows

    def _average(self) -> None:
        """Gradients over the replicas, one all-reduce for each part."""
        group = self._team.group(REPLICA)
        if group is None:
            return
        for part in self.parts:
            gradients = [each.grad for each in part.parameters() if each.grad is not None]
            together = torch.cat([each.flatten() for each in gradients]) / self._team.replicas
            dist.all_reduce(together, group=group)
            pieces = together.split_with_sizes([each.numel() for each in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Int64Array], make: MakeBatch
    ) -> Iterator[tuple[int, Tensor]]:
        """See `Engine`: batch after batch through the stages, each rank as far ahead as it can."""
        team = self._team
        sent: deque[tuple[Any, Tensor]] = deque()
        for which, weight in share_of(batches, team.replica, team.replicas):
            batch = make(batches[which])
            hidden: Tensor | None = None
            for part, number in zip(self.parts, self._numbers, strict=True):
                if number > 0 and self._owners[number - 1] != team.stage:
                    hidden = self._received(part, batch, self._owners[number - 1])
                hidden = part(hidden, batch, "scores")
                if number == len(self._owners) - 1:
                    if weight:
                        yield which, hidden
                elif self._owners[number + 1] != team.stage:
                    sent.append(self._send(part, hidden, self._owners[number + 1]))
                    if len(sent) > MOST_AHEAD:
                        sent.popleft()[0].wait()
        for work, _ in sent:
            work.wait()

    def _received(self, part: SpanModel, batch: SpanBatch, owner: int) -> Tensor:
        shape = (batch.num_tokens, part.config.hidden_size)
        hidden = torch.empty(shape, dtype=part.dtype, device=part.device)
        dist.recv(hidden, group=self._team.group(STAGE), group_src=owner)
        return hidden

    def _send(self, part: SpanModel, hidden: Tensor, owner: int) -> tuple[Any, Tensor]:
        """The work, and the tensor that must stay until it is done."""
        kept = hidden.to(part.dtype).contiguous()
        return dist.isend(kept, group=self._team.group(STAGE), group_dst=owner), kept

    def weights(self) -> Mapping[str, Tensor]:
        """See `Engine`; one tensor after the other goes from its stage to all of the pipeline."""
        mine = {name: each for part in self.parts for name, each in part.named_parameters()}
        found = {}
        for name, shape in self._shapes.items():
            part = self.parts[0]
            tensor = mine[name].detach().clone() if name in mine else None
            if tensor is None:
                tensor = torch.empty(shape, dtype=part.dtype, device=part.device)
            group = self._team.group(STAGE)
            if group is not None:
                dist.broadcast(
                    tensor, group=group, group_src=self._owners[self._shape.stage_of(name)]
                )
            if self._team.replica == 0 and self._team.stage == 0:
                found[name] = tensor.cpu()
        return found


def _loss_itself(output: Tensor, target: Tensor) -> Tensor:
    """[1], what the last stage gives -> scalar."""
    return output.sum()

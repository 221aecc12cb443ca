"""Ways to compute an update on some ranks; all give the same gradients.

`Replicated`: one rank alone, DistributedDataParallel and fully sharded data parallel, all layers
everywhere; each rank computes its share of the microbatches, one after the other.

`Pipelined`: each rank holds some layers, and microbatches stream through; or several pipelines run
side by side. torch.distributed.pipelining runs the schedule. Each of several pipelines computes its
share of the microbatches, and their gradients are averaged after the last one. torch wants rows of
one shape between stages: only hidden states travel between ranks, in rows of the run's token
capacity. Every rank knows which tokens a row holds, so a stage cuts the padding off on arrival and
computes real tokens only.

Shape letters: M microbatches of a pipeline, T tokens of a microbatch, C capacity of a row in
tokens, D hidden.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bert_tools.huggingface.weights import FAMILIES
from bert_tools.squad.answers import Scores
from bert_tools.squad.batches import SpanBatch, UpdatePlan, WindowReader, evaluation_batches
from bert_tools.squad.bubble import StageClock
from bert_tools.squad.model import (
    Part,
    SpanModel,
    balanced_split,
    layer_costs,
    make_part,
    parameter_shapes,
    whole,
)
from bert_tools.squad.settings import EngineKind, EngineName, Schedule, SquadSettings
from bert_tools.squad.weights import Start
from bert_tools.squad.windows import Windows
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.seeds import derive_seed

MakeBatch = Callable[[Int64Array], SpanBatch]  # lists of windows' numbers, on the engine's device
REPLICA, STAGE = "replica", "stage"
TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16_384  # tokens in a batch of an evaluation
MOST_AHEAD = 8  # evaluation batches in flight between two stages


class Team:
    """This rank in its engine's mesh of REPLICA times STAGE; None: one rank alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.replica, self.stage = (0, 0) if mesh is None else mesh.get_coordinate() or (0, 0)
        self.replicas, self.stages = (1, 1) if mesh is None else tuple(mesh.shape)

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of all."""
        return self.replica == self.stage == 0

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in one dimension only; None if it is alone."""
        size = self.replicas if dimension == REPLICA else self.stages
        return None if self.mesh is None or size == 1 else self.mesh.get_group(dimension)

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over all ranks, in place; equal on all of them to the bit."""
        for dimension in (STAGE, REPLICA):
            group = self.group(dimension)
            if group is not None:
                dist.all_reduce(numbers, group=group)
        return numbers


def make_team(engine: EngineName, device: torch.device) -> Team:
    """The team of all ranks of the process group; neighbours in rank follow in a pipeline."""
    if engine.ranks == 1:
        return Team()
    ranks = torch.arange(engine.ranks).view(engine.replicas, engine.stages)
    return Team(DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICA, STAGE)))


def share_of(
    microbatches: Sequence[Int64Array], replica: int, replicas: int
) -> list[tuple[int, float]]:
    """The microbatches that a replica computes, and the weight of each.

    All replicas get equally many, as they wait for each other in each: if there are not enough, a
    replica repeats another's with the weight 0.
    """
    count = -(-len(microbatches) // replicas)
    numbers = [replica + replicas * each for each in range(count)]
    last = len(microbatches) - 1
    return [(min(number, last), float(number <= last)) for number in numbers]


class Replicated:
    """`single`, `ddp` and `fsdp`.

    ddp averages gradients once, in the backward of the last microbatch. fsdp holds a shard of each
    layer (ZeRO stage 3, arXiv 1910.02054), gathers it when it is needed and averages gradients in
    every backward, so that whole gradients never pile up.

    Every engine has `team`, its ranks; `parts`, the pieces of the model that this rank holds; and
    `copies`, the number of ranks that hold each of its elements. Every rank calls its methods with
    the same arguments. Here the `model` is whole, and the team has replicas only.
    """

    def __init__(self, kind: EngineKind, model: SpanModel, team: Team) -> None:
        self.parts: Sequence[SpanModel] = [model]
        self.copies = team.replicas if kind == "ddp" else 1
        self.team = team
        self._called: nn.Module = model
        self._ddp: DistributedDataParallel | None = None
        if kind == "ddp" and team.replicas > 1:
            self._ddp = DistributedDataParallel(model, process_group=team.group(REPLICA))
            self._called = self._ddp
        if kind == "fsdp" and team.mesh is not None:
            # Each layer by itself, and the rest of the model together, over the replicas.
            for module in (*model.layers, model):
                fully_shard(module, mesh=team.mesh[REPLICA])

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Add the gradient of (sum of the windows' losses / divisor) to all `.grad`.

        Afterwards `.grad` is the gradient over all ranks.

        Returns:
            This rank's share of that loss, a float64 scalar on its device.
        """
        team = self.team
        shares = share_of(microbatches, team.replica, team.replicas)
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for number, (which, weight) in enumerate(shares):
            is_last = number == len(shares) - 1
            with nullcontext() if self._ddp is None or is_last else self._ddp.no_sync():
                loss = self._called(None, make(microbatches[which]), "loss_sum")
                # torch averages over replicas; times their number gives the sum.
                (loss * (weight * team.replicas / divisor)).backward()
            total += loss.detach().double() * (weight / divisor)
        return total

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Int64Array], make: MakeBatch
    ) -> Iterator[tuple[int, Tensor]]:
        """Number and scores [T, 2] of each batch that ends on this rank.

        It is called in evaluation and must be read to its end.
        """
        team = self.team
        for which, weight in share_of(batches, team.replica, team.replicas):
            scores = self.parts[0](None, make(batches[which]), "scores")
            if weight:
                yield which, scores

    def weights(self) -> Mapping[str, Tensor]:
        """All tensors of the model on rank 0's host, by name."""
        found = {}
        for name, parameter in self.parts[0].named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self.team.is_first:  # other hosts need not hold them
                found[name] = whole.detach().cpu()
        return found


def stages_of_rank(schedule: Schedule, rank: int, ranks: int, num_stages: int) -> list[int]:
    """Numbers of the stages that a rank of the pipeline holds, in the model's order.

    A zero-bubble pipeline goes down the ranks and up again, so its last stage is on the first rank
    (arXiv 2401.10241, section 6); the others begin again with the first rank.
    """
    if schedule == "zero_bubble":
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, ranks))


def make_schedule(
    schedule: Schedule, stages: Sequence[PipelineStage], microbatches: int, *, is_half: bool = False
) -> Any:
    """torch's schedule for so many microbatches, without scaling of gradients.

    The last stage returns the loss itself. Half of an update's microbatches may be too few for a
    schedule: they take the plainest one, all forwards and then all backwards.
    """
    kinds: dict[Schedule, Any] = {
        "gpipe": ScheduleGPipe,
        "1f1b": ScheduleGPipe if is_half else Schedule1F1B,
        "interleaved": ScheduleLoopedBFS if is_half else ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleZBVZeroBubble,
    }
    held = stages[0] if schedule in ("gpipe", "1f1b") else list(stages)
    return kinds[schedule](
        held, microbatches, loss_fn=lambda output, _target: output.sum(), scale_grads=False
    )


class StageModule(nn.Module):
    """One part of the model, applied to the microbatch that its stage names."""

    def __init__(self, part: SpanModel, capacity: int) -> None:
        super().__init__()
        self.part = part
        self._capacity = capacity
        self.batches: Sequence[SpanBatch] = ()
        self.loss_factor = 1.0
        self.number = 0  # of the microbatch

    def forward(self, row: Tensor) -> Tensor:
        """Map token ids [1, C] or hidden states [1, C, D] to [1, C, D], or at the end loss [1]."""
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
    """A stage that tells its module the microbatch, and a clock its times of computing."""

    def __init__(self, clock: StageClock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of one chunk, as in torch, with its span recorded."""
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        with self._clock.span(self.stage_index, "F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Backward of one chunk, as in torch, with its span recorded."""
        with self._clock.span(self.stage_index, "B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Backward for the weights of one chunk, as in torch, with its span recorded."""
        with self._clock.span(self.stage_index, "W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipelined:
    """`pipeline`, with one replica or several.

    `make` returns a part of the `model` with its weights; the plan's mean length balances stages.
    """

    def __init__(
        self,
        settings: SquadSettings,
        model: ModelSection,
        make: Callable[[Part], SpanModel],
        plan: UpdatePlan,
        team: Team,
        clock: StageClock,
    ) -> None:
        name, schedule = settings.engine, settings.engine.schedule
        assert schedule is not None
        self._schedule, self.team, self._clock = schedule, team, clock
        mean_length = float(plan.tokens.sum() / plan.windows.size)
        self._bounds = balanced_split(layer_costs(model, mean_length), name.num_parts)
        of_ranks = [
            stages_of_rank(schedule, rank, name.stages, name.num_parts)
            for rank in range(name.stages)
        ]
        owners = {stage: rank for rank, stages in enumerate(of_ranks) for stage in stages}
        self._owners = [owners[stage] for stage in range(name.num_parts)]
        self._numbers = of_ranks[team.stage]
        self._shapes = parameter_shapes(model)
        self._capacity = plan.capacity(settings.max_length)
        self._microbatches = settings.microbatches // name.replicas  # of one pipeline: M
        self.copies = team.replicas
        self.parts: Sequence[SpanModel] = [
            make(Part(self._bounds[number], self._bounds[number + 1], model.num_layers))
            for number in self._numbers
        ]
        self._modules = [StageModule(part, self._capacity) for part in self.parts]
        self._schedules: dict[int, Any] = {}

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Accumulate gradients; see `Replicated.accumulate`."""
        team = self.team
        mine = microbatches[team.replica :: team.replicas]
        batches = [make(numbers) for numbers in mine]
        for module in self._modules:
            module.batches = batches
            # Averaged over replicas below; times their number gives the sum.
            module.loss_factor = team.replicas / divisor
        losses: list[Tensor] = []
        rows = (self._rows(batches),) if 0 in self._numbers else ()
        # The last stage computes the loss; torch wants a target to compare with.
        target = torch.zeros(len(batches), device=self.parts[0].device)
        self._run_of(len(batches)).step(*rows, target=target, losses=losses, return_outputs=False)
        self._average_gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for loss in losses:
            total += loss.detach().double() / team.replicas
        return total

    def _run_of(self, microbatches: int) -> Any:
        """The stages for a number of microbatches: torch keeps its buffers in them."""
        if microbatches not in self._schedules:
            stages = [
                TimedStage(
                    *(self._clock, module, number, len(self._owners), module.part.device),
                    input_args=(module.example(of="input"),),  # torch need not try the module out
                    output_args=(module.example(of="output"),),
                    group=self.team.group(STAGE),
                )
                for module, number in zip(self._modules, self._numbers, strict=True)
            ]
            is_half = microbatches != self._microbatches
            made = make_schedule(self._schedule, stages, microbatches, is_half=is_half)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    def _rows(self, batches: Sequence[SpanBatch]) -> Tensor:
        """Token ids [M, C] for the first stage, padded with zeros."""
        device = self.parts[0].device
        rows = torch.zeros((len(batches), self._capacity), dtype=torch.int64, device=device)
        for row, batch in zip(rows, batches, strict=True):
            row[: batch.num_tokens] = batch.tokens.input_ids
        return rows

    def _average_gradients(self) -> None:
        """Average gradients over the replicas, one all-reduce for each part."""
        group = self.team.group(REPLICA)
        if group is None:
            return
        for part in self.parts:
            gradients = [each.grad for each in part.parameters() if each.grad is not None]
            together = torch.cat([each.flatten() for each in gradients]) / self.team.replicas
            dist.all_reduce(together, group=group)
            pieces = together.split_with_sizes([each.numel() for each in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Int64Array], make: MakeBatch
    ) -> Iterator[tuple[int, Tensor]]:
        """Scores as in `Replicated.scores`; each rank works as far ahead as it can."""
        team, group = self.team, self.team.group(STAGE)
        sent: deque[tuple[Any, Tensor]] = deque()
        for which, weight in share_of(batches, team.replica, team.replicas):
            batch = make(batches[which])
            hidden: Tensor | None = None
            for part, number in zip(self.parts, self._numbers, strict=True):
                if number > 0 and self._owners[number - 1] != team.stage:
                    shape = (batch.num_tokens, part.config.hidden_size)
                    hidden = torch.empty(shape, dtype=part.dtype, device=part.device)
                    dist.recv(hidden, group=group, group_src=self._owners[number - 1])
                hidden = part(hidden, batch, "scores")
                if number == len(self._owners) - 1:
                    if weight:
                        yield which, hidden
                elif self._owners[number + 1] != team.stage:
                    kept = hidden.to(part.dtype).contiguous()  # must stay until it is sent
                    owner = self._owners[number + 1]
                    sent.append((dist.isend(kept, group=group, group_dst=owner), kept))
                    if len(sent) > MOST_AHEAD:
                        sent.popleft()[0].wait()
        for work, _ in sent:
            work.wait()

    def weights(self) -> Mapping[str, Tensor]:
        """Weights as in `Replicated.weights`, sent to the whole pipeline one after the other."""
        mine = {name: each for part in self.parts for name, each in part.named_parameters()}
        found = {}
        part, group = self.parts[0], self.team.group(STAGE)
        for name, shape in self._shapes.items():
            if name in mine:
                tensor = mine[name].detach().clone()
            else:
                tensor = torch.empty(shape, dtype=part.dtype, device=part.device)
            if group is not None:
                dist.broadcast(tensor, group=group, group_src=self._owners[self._stage_of(name)])
            if self.team.is_first:
                found[name] = tensor.cpu()
        return found

    def _stage_of(self, name: str) -> int:
        """The stage that holds the tensor of that name."""
        family = FAMILIES[self.parts[0].config.architecture]
        if name.startswith(family.layers):
            layer = int(name.removeprefix(family.layers).partition(".")[0])
            return bisect_right(self._bounds, layer) - 1
        return 0 if name.startswith(f"{family.body}embeddings.") else len(self._owners) - 1


Engine = Replicated | Pipelined


def make_engine(
    settings: SquadSettings,
    start: Start,
    plan: UpdatePlan,
    team: Team,
    device: torch.device,
    clock: StageClock,
) -> Engine:
    """The engine that `settings` name with this rank's part of the model, ready to train.

    Raises ConfigError for more stages than layers. Only a pipeline's stages use `clock`.
    """
    seed = derive_seed(settings.seed, "squad dropout")

    def part_of(part: Part) -> SpanModel:
        return make_part(start.model, part, start.weights, device, settings.precision, seed)

    if settings.engine.kind != "pipeline":
        return Replicated(settings.engine.kind, part_of(whole(start.model)), team)
    return Pipelined(settings, start.model, part_of, plan, team, clock)


def score_windows(engine: Engine, windows: Windows) -> Scores:
    """Scores, float32, on every rank; all ranks call it. Data-parallel ranks share windows.

    In a pipeline they go through the stages one batch after the other.
    """
    device = engine.parts[0].device
    at_once = TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_GPU
    batches = evaluation_batches(windows.lengths, at_once)
    reader = WindowReader(windows)
    found = np.zeros((len(windows.input_ids), 2), dtype=np.float32)
    for part in engine.parts:
        part.eval()
    for which, scores in engine.scores(batches, lambda each: reader.batch(each).to(device)):
        found[reader.places(batches[which])] = scores.float().cpu().numpy()
    for part in engine.parts:
        part.train()
    # Zero on all ranks but one, so the sum is exact.
    return engine.team.sum(torch.from_numpy(found).to(device)).cpu().numpy()

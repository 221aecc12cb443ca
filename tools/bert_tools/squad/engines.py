"""Engines that compute the gradients of an update on one or more ranks, in different ways.

All engines compute the same gradients.

`Replicated` runs on a single rank, with DistributedDataParallel, or with fully sharded data
parallelism. Every rank computes all layers for its share of the micro-batches, one micro-batch
after another.

`Pipelined` divides the layers among the ranks, and every micro-batch passes through all ranks.
torch.distributed.pipelining runs the schedule. Ranks send each other only hidden states, one row
per micro-batch. torch requires all rows to have the same shape, so each row is padded to the length
of the run's longest micro-batch. Every rank knows how many tokens of a row are real, so a stage
removes the padding of each row that it receives and computes only the real tokens.

Shape letters: M micro-batches of an update, T tokens of a micro-batch, C capacity of a row in
tokens, D hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
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

from bert_tools.squad.answers import Scores
from bert_tools.squad.batches import SpanBatch, UpdatePlan, WindowReader, evaluation_batches
from bert_tools.squad.measures import StageClock
from bert_tools.squad.model import (
    Part,
    SpanModel,
    Start,
    even_split,
    make_part,
    parameter_shapes,
    whole,
)
from bert_tools.squad.settings import EngineKind, EngineName, Schedule, SquadSettings
from bert_tools.squad.windows import Windows
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.seeds import derive_seed

MakeBatch = Callable[[Int64Array], SpanBatch]  # from numbers of windows, on the engine's device


class RankMesh:
    """The ranks of an engine, and this rank's position among them.

    Without a device mesh, the engine has a single rank.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()
        self.group = None if mesh is None else mesh.get_group()

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it.

        The result is bit-identical on all ranks. All ranks must call this function.
        """
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        return numbers


def make_rank_mesh(engine: EngineName, device: torch.device) -> RankMesh:
    """Create the mesh of the engine's ranks, which are all ranks of the process group."""
    return RankMesh(
        DeviceMesh(device.type, torch.arange(engine.ranks)) if engine.ranks > 1 else None
    )


class Replicated:
    """The engines `single`, `ddp` and `fsdp`, in which every rank computes all layers.

    ddp averages gradients once, in the backward pass of the last micro-batch. fsdp stores a shard
    of each layer on each rank (ZeRO stage 3, arXiv 1910.02054) and gathers the layer when it is
    needed. It averages gradients in every backward pass, so no rank has to store gradients of the
    whole model.

    Every engine has the attributes `mesh` (its ranks), `parts` (the parts of the model on this
    rank) and `copies` (the number of ranks that store the same element of a parameter). All ranks
    must call its methods with the same arguments. The argument `model` is the whole model.
    """

    def __init__(self, kind: EngineKind, model: SpanModel, mesh: RankMesh) -> None:
        self.parts: Sequence[SpanModel] = [model]
        self.copies = mesh.size if kind == "ddp" else 1
        self.mesh = mesh
        self._called: nn.Module = model
        self._ddp: DistributedDataParallel | None = None
        if kind == "ddp" and mesh.group is not None:
            self._ddp = DistributedDataParallel(model, process_group=mesh.group)
            self._called = self._ddp
        if kind == "fsdp" and mesh.mesh is not None:
            # Shard each layer separately, and then the rest of the model together.
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh.mesh)

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Compute an update's gradients on all ranks, and add them to `.grad` of the parameters.

        The loss is the sum of the losses of all windows, divided by `divisor`. Each rank computes
        the same number of micro-batches. Afterwards `.grad` has the gradient summed over all ranks.

        Returns:
            This rank's share of the loss, a float64 scalar on its device.
        """
        mesh = self.mesh
        mine = microbatches[mesh.rank :: mesh.size]
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for number, windows in enumerate(mine, 1):
            is_last = number == len(mine)
            with nullcontext() if self._ddp is None or is_last else self._ddp.no_sync():
                loss = self._called(None, make(windows), "loss_sum")
                # torch averages over ranks, so multiply by their number to get the sum.
                (loss * (mesh.size / divisor)).backward()
            total += loss.detach().double() * (1 / divisor)
        return total

    def weights(self) -> Mapping[str, Tensor]:
        """Return all parameters of the model by name, on the host of every rank."""
        weights = {}
        for name, parameter in self.parts[0].named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            weights[name] = full.detach().cpu()
        return weights


def stages_of_rank(schedule: Schedule, rank: int, ranks: int, num_stages: int) -> list[int]:
    """Return the numbers of a rank's pipeline stages, in the order of the model.

    The zero-bubble schedule assigns stages to the ranks in ascending order and then in descending
    order, so the first rank has the first and the last stage (arXiv 2401.10241, section 6). The
    other schedules assign every group of stages in ascending order of the ranks.
    """
    if schedule == "zero_bubble":
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, ranks))


def make_schedule(
    schedule: Schedule, stages: Sequence[PipelineStage], microbatches: int, *, is_half: bool = False
) -> Any:
    """Create torch's pipeline schedule for a number of micro-batches, without scaling gradients.

    The last stage returns the loss itself. Set `is_half` if the schedule runs only half of an
    update's micro-batches, which may be too few for a 1F1B schedule. The result is then a schedule
    that runs all forward passes and then all backward passes.
    """
    kinds: dict[Schedule, Any] = {
        "gpipe": ScheduleGPipe,
        "1f1b": ScheduleGPipe if is_half else Schedule1F1B,
        "interleaved": ScheduleLoopedBFS if is_half else ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleZBVZeroBubble,
    }
    own_stages = stages[0] if schedule in ("gpipe", "1f1b") else list(stages)
    return kinds[schedule](
        own_stages, microbatches, loss_fn=lambda output, _target: output.sum(), scale_grads=False
    )


class StageModule(nn.Module):
    """The part of the model that one pipeline stage computes.

    The stage sets `number`, the number of the micro-batch to compute, before each call.
    """

    def __init__(self, part: SpanModel, capacity: int) -> None:
        super().__init__()
        self.part = part
        self._capacity = capacity
        self.batches: Sequence[SpanBatch] = ()
        self.loss_factor = 1.0
        self.number = 0  # the number of the current micro-batch

    def forward(self, row: Tensor) -> Tensor:
        """Compute this part's hidden states [1, C, D] or, in the last part, the loss [1].

        `row` has the token ids [1, C] for the first part, and hidden states [1, C, D] for the
        others.
        """
        batch = self.batches[self.number]
        mine = row[0, : batch.num_tokens]
        hidden: Tensor | None = mine
        if self.part.part.has_embeddings:
            batch = replace(batch, tokens=replace(batch.tokens, input_ids=mine))
            hidden = None
        found: Tensor = self.part(hidden, batch, "loss_sum")
        # Return no views, because zero-bubble schedules detach outputs in place.
        if self.part.part.has_head:
            return found[None] * self.loss_factor
        return F.pad(found[None], (0, 0, 0, self._capacity - batch.num_tokens))

    def example(self, *, of: str) -> Tensor:
        """Return an uninitialized tensor with the shape and dtype of the module's input or output.

        `of` is "input" or "output".
        """
        config, part = self.part.config, self.part.part
        device, hidden = self.part.device, (1, self._capacity, config.hidden_size)
        if of == "input" and part.has_embeddings:
            return torch.empty((1, self._capacity), dtype=torch.int64, device=device)
        shape = (1,) if of == "output" and part.has_head else hidden
        return torch.empty(shape, dtype=self.part.dtype, device=device, requires_grad=True)


class TimedStage(PipelineStage):
    """A pipeline stage that records in a clock when it computes.

    The stage also tells its module which micro-batch to compute.
    """

    def __init__(self, clock: StageClock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward pass of one micro-batch, and record when it ran."""
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        with self._clock.span(self.stage_index, "F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's backward pass of one micro-batch, and record when it ran."""
        with self._clock.span(self.stage_index, "B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's backward pass of a micro-batch for the weights, and record when it ran."""
        with self._clock.span(self.stage_index, "W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipelined:
    """The engine `pipeline`, in which each rank computes some of the layers.

    The argument `make` creates a part of the model with its weights.
    """

    copies = 1

    def __init__(
        self,
        settings: SquadSettings,
        model: ModelSection,
        make: Callable[[Part], SpanModel],
        plan: UpdatePlan,
        mesh: RankMesh,
        clock: StageClock,
    ) -> None:
        name, schedule = settings.engine, settings.engine.schedule
        assert schedule is not None
        self._schedule, self.mesh, self._clock = schedule, mesh, clock
        self._num_stages = name.num_parts
        self._numbers = stages_of_rank(schedule, mesh.rank, name.ranks, name.num_parts)
        self._shapes = parameter_shapes(model)
        self._capacity = int(plan.tokens.max())
        self._microbatches = settings.microbatches
        bounds = even_split(model.num_layers, name.num_parts)
        self.parts: Sequence[SpanModel] = [
            make(Part(bounds[number], bounds[number + 1], model.num_layers))
            for number in self._numbers
        ]
        self._modules = [StageModule(part, self._capacity) for part in self.parts]
        self._schedules: dict[int, Any] = {}

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Compute an update's gradients on all ranks, as `Replicated.accumulate` does.

        Each rank computes its own pipeline stages for every micro-batch.
        """
        batches = [make(numbers) for numbers in microbatches]
        for module in self._modules:
            module.batches, module.loss_factor = batches, 1 / divisor
        losses: list[Tensor] = []
        rows = (self._rows(batches),) if 0 in self._numbers else ()
        # The last stage computes the loss itself, but torch requires a target.
        target = torch.zeros(len(batches), device=self.parts[0].device)
        self._run_of(len(batches)).step(*rows, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for loss in losses:
            total += loss.detach().double()
        return total

    def _run_of(self, microbatches: int) -> Any:
        """Return the schedule for a number of micro-batches, and create it at the first call.

        Each schedule has its own stages, because torch's stages keep buffers for their
        micro-batches.
        """
        if microbatches not in self._schedules:
            stages = [
                TimedStage(
                    *(self._clock, module, number, self._num_stages, module.part.device),
                    input_args=(module.example(of="input"),),  # otherwise torch calls the module
                    output_args=(module.example(of="output"),),
                    group=self.mesh.group,
                )
                for module, number in zip(self._modules, self._numbers, strict=True)
            ]
            is_half = microbatches != self._microbatches
            made = make_schedule(self._schedule, stages, microbatches, is_half=is_half)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    def _rows(self, batches: Sequence[SpanBatch]) -> Tensor:
        """Return the input of the first stage: token ids padded with zeros, int64 [M, C]."""
        device = self.parts[0].device
        rows = torch.zeros((len(batches), self._capacity), dtype=torch.int64, device=device)
        for row, batch in zip(rows, batches, strict=True):
            row[: batch.num_tokens] = batch.tokens.input_ids
        return rows

    def weights(self) -> Mapping[str, Tensor]:
        """Return all parameters of the model by name, on the host of every rank.

        The rank that owns a parameter broadcasts it to the others. All ranks must
        call this function.
        """
        mine = {name: each for part in self.parts for name, each in part.named_parameters()}
        found, part, mesh = {}, self.parts[0], self.mesh
        ranks = [mesh.rank if name in mine else 0 for name in self._shapes]
        owners = mesh.sum(torch.tensor(ranks, device=part.device)).tolist()
        for owner, (name, shape) in zip(owners, self._shapes.items(), strict=True):
            tensor = torch.empty(shape, dtype=part.dtype, device=part.device)
            if name in mine:
                tensor.copy_(mine[name].detach())
            dist.broadcast(tensor, group=mesh.group, group_src=owner)
            found[name] = tensor.cpu()
        return found


Engine = Replicated | Pipelined


def make_engine(
    settings: SquadSettings,
    start: Start,
    plan: UpdatePlan,
    mesh: RankMesh,
    device: torch.device,
    clock: StageClock,
) -> Engine:
    """Create the engine that `settings` choose, with this rank's part of the model.

    The engine is ready to train. Only the engine `pipeline` uses `clock`. Raises ConfigError if
    there are more stages than layers.
    """
    seed = derive_seed(settings.seed, "squad dropout")
    torch.manual_seed(derive_seed(settings.seed, "others' kernels", mesh.rank))

    def part_of(part: Part) -> SpanModel:
        return make_part(start.model, part, start.weights, device, settings.precision, seed)

    if settings.engine.kind != "pipeline":
        return Replicated(settings.engine.kind, part_of(whole(start.model)), mesh)
    return Pipelined(settings, start.model, part_of, plan, mesh, clock)


@torch.no_grad()
def score_windows(model: SpanModel, windows: Windows, mesh: RankMesh) -> Scores:
    """Compute the start and end scores of all tokens, float32 [T, 2] on every rank.

    `model` must be the whole model. All ranks must call this function, and each rank computes a
    share of the windows.
    """
    reader = WindowReader(windows)
    result = np.zeros((len(windows.input_ids), 2), dtype=np.float32)
    model.eval()
    for numbers in evaluation_batches(windows.lengths)[mesh.rank :: mesh.size]:
        scores = model(None, reader.batch(numbers).to(model.device), "scores")
        result[reader.positions(numbers)] = scores.float().cpu().numpy()
    # Each score is zero on all ranks except one, so the sum is exact.
    return mesh.sum(torch.from_numpy(result).to(model.device)).cpu().numpy()

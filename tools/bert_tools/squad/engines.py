"""Ways to compute an update on some ranks; all give the same gradients.

`Replicated`: one rank alone, DistributedDataParallel and fully sharded data parallel, all layers
everywhere; each rank computes its share of the microbatches, one after the other.

`Pipelined`: each rank holds some layers, and microbatches stream through.
torch.distributed.pipelining runs the schedule. torch wants rows of one shape between stages: only
hidden states travel between ranks, in rows of the run's longest microbatch. Every rank knows which
tokens a row holds, so a stage cuts the padding off on arrival and computes real tokens only.

Shape letters: M microbatches of an update, T tokens of a microbatch, C capacity of a row in tokens,
D hidden.
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

MakeBatch = Callable[[Int64Array], SpanBatch]  # lists of windows' numbers, on the engine's device


class RankMesh:
    """This rank among the ranks of its engine; without a mesh, one rank alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()
        self.group = None if mesh is None else mesh.get_group()

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over all ranks, in place; equal on all of them to the bit."""
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        return numbers


def make_rank_mesh(engine: EngineName, device: torch.device) -> RankMesh:
    """The mesh of all ranks of the process group."""
    return RankMesh(
        DeviceMesh(device.type, torch.arange(engine.ranks)) if engine.ranks > 1 else None
    )


class Replicated:
    """`single`, `ddp` and `fsdp`.

    ddp averages gradients once, in the backward of the last microbatch. fsdp holds a shard of each
    layer (ZeRO stage 3, arXiv 1910.02054), gathers it when it is needed and averages gradients in
    every backward, so that whole gradients never pile up.

    Every engine has `mesh`, its ranks; `parts`, the pieces of the model that this rank holds; and
    `copies`, the number of ranks that hold each of its elements. Every rank calls its methods with
    the same arguments. Here the `model` is whole.
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
            # Each layer by itself, and the rest of the model together.
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh.mesh)

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Add the gradient of (sum of the windows' losses / divisor) to all `.grad`.

        Afterwards `.grad` is the gradient over all ranks, each of which computes equally many of
        the microbatches.

        Returns:
            This rank's share of that loss, a float64 scalar on its device.
        """
        mesh = self.mesh
        mine = microbatches[mesh.rank :: mesh.size]
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for number, windows in enumerate(mine, 1):
            is_last = number == len(mine)
            with nullcontext() if self._ddp is None or is_last else self._ddp.no_sync():
                loss = self._called(None, make(windows), "loss_sum")
                # torch averages over ranks; times their number gives the sum.
                (loss * (mesh.size / divisor)).backward()
            total += loss.detach().double() * (1 / divisor)
        return total

    def weights(self) -> Mapping[str, Tensor]:
        """All tensors of the model by name, on every rank's host."""
        found = {}
        for name, parameter in self.parts[0].named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = full.detach().cpu()
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
    schedule: they take the plainest one, all micro-batches and then all backwards.
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
    """`pipeline`. `make` returns a part of the `model` with its weights."""

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
        """Accumulate gradients; see `Replicated.accumulate`. Each rank computes its stages."""
        batches = [make(numbers) for numbers in microbatches]
        for module in self._modules:
            module.batches, module.loss_factor = batches, 1 / divisor
        losses: list[Tensor] = []
        rows = (self._rows(batches),) if 0 in self._numbers else ()
        # The last stage computes the loss; torch wants a target to compare with.
        target = torch.zeros(len(batches), device=self.parts[0].device)
        self._run_of(len(batches)).step(*rows, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for loss in losses:
            total += loss.detach().double()
        return total

    def _run_of(self, microbatches: int) -> Any:
        """The stages for a number of microbatches: torch keeps its buffers in them."""
        if microbatches not in self._schedules:
            stages = [
                TimedStage(
                    *(self._clock, module, number, self._num_stages, module.part.device),
                    input_args=(module.example(of="input"),),  # torch need not try the module out
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
        """Token ids [M, C] for the first stage, padded with zeros."""
        device = self.parts[0].device
        rows = torch.zeros((len(batches), self._capacity), dtype=torch.int64, device=device)
        for row, batch in zip(rows, batches, strict=True):
            row[: batch.num_tokens] = batch.tokens.input_ids
        return rows

    def weights(self) -> Mapping[str, Tensor]:
        """Weights as in `Replicated.weights`, sent to the whole pipeline one after the other."""
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
    """The engine that `settings` name with this rank's part of the model, ready to train.

    Raises ConfigError for more stages than layers. Only a pipeline's stages use `clock`.
    """
    seed = derive_seed(settings.seed, "squad dropout")

    def part_of(part: Part) -> SpanModel:
        return make_part(start.model, part, start.weights, device, settings.precision, seed)

    if settings.engine.kind != "pipeline":
        return Replicated(settings.engine.kind, part_of(whole(start.model)), mesh)
    return Pipelined(settings, start.model, part_of, plan, mesh, clock)


@torch.no_grad()
def score_windows(model: SpanModel, windows: Windows, mesh: RankMesh) -> Scores:
    """Scores of all tokens by a whole model, float32 [T, 2], on every rank; all ranks call it.

    The ranks share the windows.
    """
    reader = WindowReader(windows)
    found = np.zeros((len(windows.input_ids), 2), dtype=np.float32)
    model.eval()
    for numbers in evaluation_batches(windows.lengths)[mesh.rank :: mesh.size]:
        scores = model(None, reader.batch(numbers).to(model.device), "scores")
        found[reader.places(numbers)] = scores.float().cpu().numpy()
    # Zero on all ranks but one, so the sum is exact.
    return mesh.sum(torch.from_numpy(found).to(model.device)).cpu().numpy()

"""What every engine does, and who a rank is among those of its engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bert_tools.squad.model import SpanModel
from bert_tools.squad.settings import EngineName
from bert_tools.squad.spans import SpanBatch
from mlperf_bert.data.sampler import Int64Array

MakeBatch = Callable[[Int64Array], SpanBatch]  # of windows' numbers, on the engine's device
REPLICA, STAGE = "replica", "stage"


class Team:
    """The ranks of an engine as a mesh of replicas times stages, and this rank among them.

    Args:
        mesh: of dimensions REPLICA and STAGE, with this rank in it; None: one rank alone.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.replica, self.stage = (0, 0) if mesh is None else mesh.get_coordinate() or (0, 0)
        self.replicas, self.stages = (1, 1) if mesh is None else tuple(mesh.shape)

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """Those that differ from this rank in one dimension only; None where that is it alone."""
        size = self.replicas if dimension == REPLICA else self.stages
        return None if self.mesh is None or size == 1 else self.mesh.get_group(dimension)

    def sum(self, numbers: Tensor) -> Tensor:
        """Summed over all ranks, in place; equal on all of them to the bit."""
        for dimension in (STAGE, REPLICA):
            group = self.group(dimension)
            if group is not None:
                dist.all_reduce(numbers, group=group)
        return numbers


def make_team(engine: EngineName, device: torch.device) -> Team:
    """Of all ranks of the process group; neighbours in rank are neighbours in a pipeline."""
    if engine.ranks == 1:
        return Team()
    ranks = torch.arange(engine.ranks).view(engine.replicas, engine.stages)
    return Team(DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICA, STAGE)))


class Engine(Protocol):
    """One way to compute an update on some ranks; all give the same gradients.

    `parts` are the pieces of the model that this rank holds, `copies` how many ranks hold each of
    its elements.
    """

    parts: Sequence[SpanModel]
    copies: int

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """Add the gradient of (sum of the windows' losses / divisor) to all `.grad`.

        Called by every rank with the same microbatches. Afterwards `.grad` is that of all ranks.

        Returns:
            This rank's share of that loss, a float64 scalar on its device.
        """

    def scores(
        self, batches: Sequence[Int64Array], make: MakeBatch
    ) -> Iterator[tuple[int, Tensor]]:
        """Which of the batches, and its scores [T, 2], for those that end on this rank.

        Called by every rank with the same batches, in evaluation, and read to its end.
        """

    def weights(self) -> Mapping[str, Tensor]:
        """All tensors of the model on rank 0's host, by name; called by every rank."""


def named_parameters(parts: Sequence[SpanModel]) -> Iterator[tuple[str, Tensor]]:
    """Of all parts, with the names of the whole model."""
    for part in parts:
        yield from part.named_parameters()


def share_of(
    microbatches: Sequence[Int64Array], replica: int, replicas: int
) -> list[tuple[int, float]]:
    """Which microbatches a replica computes, and the weight of each.

    All replicas get equally many, as they wait for each other in each: where there are not enough,
    one that another has too, with the weight 0.
    """
    count = -(-len(microbatches) // replicas)
    numbers = [replica + replicas * each for each in range(count)]
    last = len(microbatches) - 1
    return [(min(number, last), float(number <= last)) for number in numbers]

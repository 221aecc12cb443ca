"""One rank alone, DistributedDataParallel and fully sharded data parallel: all layers everywhere.

Each rank computes its share of the microbatches, one after the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bert_tools.squad.engines.contract import REPLICA, MakeBatch, Team, share_of
from bert_tools.squad.model import SpanModel
from bert_tools.squad.settings import EngineKind
from mlperf_bert.data.sampler import Int64Array


class Replicated:
    """`single`, `ddp` and `fsdp`.

    ddp averages gradients once, in the backward of the last microbatch. fsdp holds a shard of each
    layer (ZeRO stage 3, arXiv 1910.02054), gathers it when it is needed and averages gradients in
    every backward, so that whole ones never pile up.

    Args:
        kind: which of the three.
        model: all parts in one, with its weights.
        team: replicas alone.
    """

    def __init__(self, kind: EngineKind, model: SpanModel, team: Team) -> None:
        self.parts: Sequence[SpanModel] = [model]
        self.copies = team.replicas if kind == "ddp" else 1
        self._team = team
        self._called: nn.Module = model
        self._ddp: DistributedDataParallel | None = None
        if kind == "ddp" and team.replicas > 1:
            group = team.group(REPLICA)
            self._ddp = DistributedDataParallel(model, process_group=group)
            self._called = self._ddp
        if kind == "fsdp" and team.mesh is not None:
            _shard(model, team)

    def accumulate(
        self, microbatches: Sequence[Int64Array], make: MakeBatch, divisor: float
    ) -> Tensor:
        """See `Engine`."""
        team = self._team
        shares = share_of(microbatches, team.replica, team.replicas)
        total = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        for number, (which, weight) in enumerate(shares):
            with self._summing(is_last=number == len(shares) - 1):
                loss = self._called(None, make(microbatches[which]), "loss_sum")
                # torch averages over replicas: times their number that is the sum.
                (loss * (weight * team.replicas / divisor)).backward()
            total += loss.detach().double() * (weight / divisor)
        return total

    def _summing(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if self._ddp is None or is_last:
            return nullcontext()
        return self._ddp.no_sync()

    @torch.no_grad()
    def scores(
        self, batches: Sequence[Int64Array], make: MakeBatch
    ) -> Iterator[tuple[int, Tensor]]:
        """See `Engine`."""
        team = self._team
        for which, weight in share_of(batches, team.replica, team.replicas):
            scores = self.parts[0](None, make(batches[which]), "scores")
            if weight:
                yield which, scores

    def weights(self) -> Mapping[str, Tensor]:
        """See `Engine`."""
        found = {}
        for name, parameter in self.parts[0].named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self._team.replica == 0:  # the others' hosts need not hold them
                found[name] = whole.detach().cpu()
        return found


def _shard(model: SpanModel, team: Team) -> None:
    """Each layer by itself, and what is around them together, over the replicas."""
    assert team.mesh is not None
    mesh = team.mesh[REPLICA]
    layers = model.bert.encoder.layer
    assert isinstance(layers, nn.ModuleDict)
    for layer in layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

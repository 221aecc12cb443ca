"""The work of a rank: a model whose layers sleep for the planned time, and a watch on its steps.

A sleeping rank needs no core, so that eight ranks fit two cores. All else is the program's own:
batches, balance, buckets, clipping, transfers, shards, update.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.distributed.bucket_plan import plan_in_reverse, plan_layout
from mlperf_bert.distributed.clipping import ClipOutcome, Clipping
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import LossSums
from phases import BACKWARD, phase_of, phase_shares


class SleepingModel(nn.Module):
    """As many weights as BERT has in each phase, and sleeps in proportion to a batch's tokens."""

    def __init__(self, section: ModelSection, ms_per_token: float) -> None:
        """`ms_per_token`: of forward and backward together."""
        super().__init__()
        like = BertForPretraining(section, torch.device("meta"))
        weights: list[list[nn.Parameter]] = [[] for _ in range(section.num_layers + 2)]
        for name, each in like.named_parameters():
            own = nn.Parameter(torch.zeros(each.shape))
            weights[phase_of(name, section.num_layers)].append(own)
        times = [ms_per_token / 1e3 / (1 + BACKWARD) * each for each in phase_shares(section)]
        self.phases = nn.ModuleList(map(SleepingPhase, times, weights))
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, batch: UnpaddedBatch, _: str) -> LossSums:
        """The loss sums of a batch, which mean nothing."""
        passed, tokens = torch.zeros(()), sum(batch.lengths)
        for phase in self.phases:
            passed = phase(passed, tokens)
        return LossSums(mlm=passed, nsp=None)


class SleepingPhase(nn.Module):
    """One phase: it sleeps in both directions, and then has gradients for its weights."""

    def __init__(self, seconds_per_token: float, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.seconds_per_token = seconds_per_token
        for number, each in enumerate(weights):  # its own: shards are waited for by module
            self.register_parameter(f"weight_{number}", each)
        self.gradients = [torch.full_like(each, 1e-3) for each in weights]

    def forward(self, passed: Tensor, tokens: int) -> Tensor:
        """`passed` after the sleep."""
        seconds = self.seconds_per_token * tokens
        slept: Tensor = _Sleep.apply(passed, seconds, self.gradients, *self.parameters())
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passed: Tensor, seconds: float, gradients: Sequence[Tensor], *_: Tensor
    ) -> Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.gradients = BACKWARD * seconds, gradients
        return passed.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return gradient, None, None, *ctx.gradients


def buckets_of(
    model: nn.Module, section: ModelSection, cap_mb: float, shards: int
) -> list[tuple[int, int]]:
    """Bytes of each bucket in the order of sending, and the backward's phase that completes it."""
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    last = section.num_layers + 1

    def backward_phase(name: str) -> int:
        own = name.startswith("phases.")
        return last - (int(name.split(".")[1]) if own else phase_of(name, section.num_layers))

    planned = plan_in_reverse(numels, 4, cap_mb)
    return [
        (4 * (bucket.stop - bucket.start), max(map(backward_phase, names)))
        for bucket, names in zip(plan_layout(shapes, planned, shards).buckets, planned, strict=True)
    ]


class Watch:
    """A clipping that notes when a step's backward has ended, and when its gradients are ready.

    `wait` is called before they are: ranks that send nothing wait there for each other.
    """

    def __init__(self, clipping: Clipping, wait: Callable[[], object]) -> None:
        self._clipping = clipping
        self._wait = wait
        self.backward_end = self.reduced = 0.0

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """As the clipping has it."""
        return self._noting(self._clipping.forward(is_last=is_last))

    @contextmanager
    def _noting(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        with inner:
            yield
            self.backward_end = time.perf_counter()

    def finish(self) -> ClipOutcome:
        """As the clipping has it."""
        outcome = self._clipping.finish()
        self._wait()
        self.reduced = time.perf_counter()
        return outcome

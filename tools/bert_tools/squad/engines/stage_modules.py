"""A part of the model as torch's pipelining wants a stage: rows of one shape in, and out.

Only hidden states travel between ranks, in rows of the run's token capacity. Which tokens a row
holds every rank knows, so a stage cuts the padding off on arrival and computes real tokens only.

Shape letters: T tokens of a microbatch, C capacity of a row in tokens, D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from bert_tools.squad.bubble import StageClock
from bert_tools.squad.model import SpanModel
from bert_tools.squad.spans import SpanBatch


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

"""Attention over made-up sequences of real lengths: whether a policy is right, and its time.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.model.attention import AttentionPolicy, reference
from mlperf_bert.model.attention_layout import AttentionLayout, Queries
from mlperf_bert.model.blocks import side_by_side
from mlperf_bert.model.dropout import DropoutKeys, make_site

NUM_SEQUENCES = 32
NUM_EMPTY = 2  # behind them, as in a batch that was padded to a capacity
QUERY_SHARE = 0.15  # of a sequence's tokens, in the last layer

Timer = Callable[[Callable[[], object]], float]


class Trial:
    """One layer's attention in training, and the last layer's, whose queries are fewer.

    Lengths are the published ones, in proportion where the model's maximum is another. Always the
    same numbers, drawn from a generator of its own.
    """

    def __init__(self, config: ModelSection, device: torch.device, dtype: torch.dtype) -> None:
        published, longest = wikipedia_lengths(), config.max_position_embeddings
        drawn = -(-published.draw_evenly(NUM_SEQUENCES, seed=0) * longest // published.max_length)
        counts = np.maximum(np.rint(drawn * QUERY_SHARE).astype(np.int64), 1)
        lengths = (*drawn.tolist(), *(0,) * NUM_EMPTY)
        query_lengths = (*counts.tolist(), *(0,) * NUM_EMPTY)
        self.num_tokens = sum(lengths)
        self._layout = AttentionLayout(lengths, _bounds(lengths, device), longest)
        first = np.cumsum(drawn) - drawn
        rows = [start + np.arange(count) for start, count in zip(first, counts, strict=True)]
        queries = Queries(
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            cu_seqlens=_bounds(query_lengths, device),
            lengths=query_lengths,
            max_length=max(query_lengths),
        )
        self._last_layout = self._layout.for_queries(queries)
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_tokens, 4, config.num_heads, config.head_size)
        drawn_values = torch.randn(shape, generator=generator).to(device, dtype)
        # Columns of one product's result, as the fused blocks hand them over.
        self._inputs = drawn_values[:, :3].contiguous().unbind(1)
        self._gradient = drawn_values[:, 3].contiguous()
        number = torch.arange(NUM_SEQUENCES).repeat_interleave(torch.from_numpy(drawn))
        keys = DropoutKeys(
            0,
            torch.zeros(1, dtype=torch.int64, device=device),
            number.to(device),
            (torch.arange(self.num_tokens) - torch.from_numpy(first)[number]).to(device),
        )
        self._site = make_site(config.attention_dropout, 0, keys)
        self._expected: list[Tensor] | None = None

    def difference(self, policy: AttentionPolicy) -> float:
        """Largest difference from `reference` in float32, without dropout.

        Of the context and the gradients of q, k and v, in both layouts, each in shares of its
        largest element.
        """
        if self._expected is None:
            self._expected = self._both(reference, [x.float() for x in self._inputs])
        found = self._both(policy, self._inputs)
        shares = [
            (ours.float() - theirs).abs().max() / theirs.abs().max()
            for ours, theirs in zip(found, self._expected, strict=True)
        ]
        return float(torch.stack(shares).max())  # host sync: the model is being built

    def run(self, policy: AttentionPolicy) -> Tensor:
        """Forward and backward of one layer, dropout as in training.

        Returns:
            The gradients of q, k and v side by side, [T, 3 N H], as the product's backward wants
            them: copied where the policy does not leave them so.
        """
        q, k, v = leaves = [x.detach().requires_grad_() for x in self._inputs]
        context = policy(q, k, v, self._layout, self._site)
        gradients = torch.autograd.grad(context, leaves, self._gradient)
        return side_by_side(tuple(gradient.flatten(1) for gradient in gradients))

    def _both(self, policy: AttentionPolicy, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = []
        for layout in (self._layout, self._last_layout):
            q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
            context = policy(layout.select(q), k, v, layout, None)
            gradient = layout.select(self._gradient).to(context.dtype)
            results += [context.detach(), *torch.autograd.grad(context, leaves, gradient)]
        return results


def seconds_on_cuda(run: Callable[[], object], *, warm_up: int = 3, repeats: int = 10) -> float:
    """Mean seconds of a call, on the device; torch's generator there is left as it was."""
    with torch.random.fork_rng([torch.cuda.current_device()], device_type="cuda"):
        for _ in range(warm_up):
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()  # host sync: the model is being built
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

"""Checks of attention policies on every device, against `reference` in float64 on the CPU."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.model.attention import AttentionPolicy, reference
from mlperf_bert.model.attention_layout import AttentionLayout, Queries
from mlperf_bert.model.dropout_keys import DropoutKeys, DropoutSite

MAX_LENGTH = 136  # of a sequence that may come: rows of packed sequences are as long
# Of one token; in blocks of kernels, on their edges and across; none at the end.
LENGTHS = ((1,), (130, 1, 33, 64), (65, 128, 3, 129, 0, 0))
NUM_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Inputs in float64, the gradient of the context, and what they belong to."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    layout: AttentionLayout
    keys: DropoutKeys  # of the queries

    def site(self, probability: float) -> DropoutSite | None:
        return DropoutSite(probability, 7, self.keys) if probability else None


def bounds_of(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def layout_of(
    lengths: tuple[int, ...], device: str = "cpu", max_length: int = MAX_LENGTH
) -> AttentionLayout:
    return AttentionLayout(lengths, bounds_of(lengths, device), max_length)


def queries_of(lengths: tuple[int, ...], device: str = "cpu") -> Queries:
    """About half of the rows; of one sequence none, where there are several, of one a row twice."""
    rows, counts, start = [], [], 0
    for number, length in enumerate(lengths):
        own = list(range(start, start + length, 1 + number % 3)) if number != 1 else []
        own += own[-1:] * (number == 2)
        rows += own
        counts.append(len(own))
        start += length
    return Queries(
        rows=torch.tensor(rows, device=device),
        cu_seqlens=bounds_of(tuple(counts), device),
        lengths=tuple(counts),
        max_length=max(lengths) + 1,
    )


def make_case(
    lengths: tuple[int, ...],
    *,
    head_size: int = 16,
    some_queries: bool = False,
    device: str = "cpu",
    max_length: int = MAX_LENGTH,
) -> Case:
    generator = torch.Generator().manual_seed(sum(lengths))
    layout, num_tokens = layout_of(lengths, device, max_length), sum(lengths)
    shape = (4, num_tokens, NUM_HEADS, head_size)
    q, k, v, gradient = torch.randn(shape, dtype=torch.float64, generator=generator).unbind()
    place = torch.cat([torch.arange(length) for length in lengths])
    sample_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) * 11 + 3
    keys = DropoutKeys(
        0x1234_5678_9ABC, torch.tensor([5], device=device), sample_ids.to(device), place.to(device)
    )
    if some_queries:
        layout = layout.for_queries(queries_of(lengths, device))
        rows = layout.queries.rows
        q, gradient, keys = q[rows.cpu()], gradient[rows.cpu()], keys.rows(rows)
    return Case((q, k, v), gradient, layout, keys)


def results(
    attend: AttentionPolicy,
    case: Case,
    probability: float,
    dtype: torch.dtype = torch.float64,
    spare_rows: int = 0,
) -> list[Tensor]:
    """Context and gradients of q, k and v, without rows behind the last sequence.

    There are `spare_rows` of these, all NaN.
    """
    device = case.layout.cu_seqlens.device

    def given(x: Tensor) -> Tensor:
        spare = x.new_full((spare_rows, *x.shape[1:]), torch.nan)
        return torch.cat((x, spare)).to(device, dtype)

    leaves = [given(x).requires_grad_() for x in case.inputs]
    context = attend(*leaves, case.layout, case.site(probability))
    grads = torch.autograd.grad(context, leaves, given(case.gradient))
    sizes = [len(x) for x in (case.inputs[0], *case.inputs)]
    return [x[:size] for x, size in zip((context.detach(), *grads), sizes, strict=True)]


def check_policy(
    attend: AttentionPolicy,
    probability: float,
    dtype: torch.dtype,
    tolerance: float,
    *,
    head_size: int = 16,
    device: str = "cpu",
    spare_rows: int = 0,
) -> None:
    """Context and gradients are those of `reference`, in all layouts.

    `tolerance` is in shares of the largest element of each, or of 1 where that is more.
    """
    for lengths, some_queries in itertools.product(LENGTHS, (False, True)):
        options = {"head_size": head_size, "some_queries": some_queries}
        # The reference gets what the dtype makes of the inputs: the policy's own error counts.
        case, plain = (make_case(lengths, **options, device=each) for each in (device, "cpu"))
        rounded = tuple(x.to(dtype).double() for x in plain.inputs)
        plain = Case(rounded, plain.gradient.to(dtype).double(), plain.layout, plain.keys)
        expected = results(reference, plain, probability)
        found = results(attend, case, probability, dtype, spare_rows)
        for name, ours, theirs in zip(("context", *"qkv"), found, expected, strict=True):
            difference = (ours.cpu().double() - theirs).abs().max()
            where = f"{name} of {lengths}, some queries: {some_queries}"
            assert difference <= tolerance * theirs.abs().max().clamp_min(1), (
                f"{where}: {difference}"
            )

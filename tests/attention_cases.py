"""Checks of attention policies on every device, against `reference` in float64 on the CPU."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.model.attention import reference
from mlperf_bert.model.attention_layout import AttentionLayout, Queries, Rotary
from mlperf_bert.model.dropout import attention_factors
from mlperf_bert.model.dropout_keys import DropoutKeys, DropoutSite

MAX_LENGTH = 136  # of a sequence that may come
# Of one token; in blocks of kernels, on their edges and across; none at the end.
LENGTHS = ((1,), (130, 1, 33, 64), (65, 128, 3, 129, 0, 0), EDGES := (64, 1, 1, 128, 0), 9 * (1,))
# Reaches below a block, of one, and beyond every sequence; more queries than are searched at once.
WINDOWS = (
    ((130, 1, 33, 64), 0),
    ((330, 9, 66, 0), 5),
    ((330, 9, 66, 0), 64),
    ((65, 128, 3, 129, 0, 0), 500),
    ((1100, 2), 64),
    ((330, 9, 66, 0), None),
)
NUM_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Inputs in float64, the gradient of the context, and what they belong to."""

    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    layout: AttentionLayout
    keys: DropoutKeys  # of the queries

    def site(self, probability):
        return DropoutSite(probability, 7, self.keys) if probability else None


def bounds_of(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def layout_of(lengths, device="cpu", max_length=MAX_LENGTH):
    places = torch.cat([torch.arange(length) for length in lengths])
    return AttentionLayout(lengths, bounds_of(lengths, device), max_length, places.to(device))


def queries_of(lengths, device="cpu"):
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
    lengths,
    *,
    head_size=16,
    some_queries=False,
    device="cpu",
    max_length=MAX_LENGTH,
    reach=None,
    rotates=False,
):
    generator = torch.Generator().manual_seed(sum(lengths))
    layout, num_tokens = layout_of(lengths, device, max_length), sum(lengths)
    shape = (4, num_tokens, NUM_HEADS, head_size)
    q, k, v, gradient = torch.randn(shape, dtype=torch.float64, generator=generator).unbind()
    place = torch.cat([torch.arange(length) for length in lengths])
    sample_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) * 11 + 3
    keys = DropoutKeys(
        0x1234_5678_9ABC, torch.tensor([5], device=device), sample_ids.to(device), place.to(device)
    )
    layout.reach = reach
    if rotates:
        layout.rotary = Rotary.of_base(50.0, max_length, head_size).on(torch.device(device))
    if some_queries:
        layout = layout.for_queries(queries_of(lengths, device))
        rows = layout.queries.rows
        q, gradient, keys = q[rows.cpu()], gradient[rows.cpu()], keys.rows(rows)
    return Case((q, k, v), gradient, layout, keys)


def windowed(q, k, v, layout, site):
    """Rotation, window and dropout of all tokens at once, as their definitions say."""
    lengths = torch.tensor(layout.lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    places = layout.position_ids, layout.query_positions
    near = (places[1][:, None] - places[0][None, :]).abs()
    is_visible = layout.select(sequence)[:, None] == sequence[None, :]
    if layout.reach is not None:
        is_visible &= near <= layout.reach
    if layout.rotary is not None:
        q, k = rotated(q, layout.rotary, places[1]), rotated(k, layout.rotary, places[0])
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    if site is not None:
        longest = max(layout.lengths)
        shape = (1, q.shape[1], len(q), longest)  # keys by position
        kept = attention_factors(site, shape, weights.dtype)[0]
        weights = weights * kept[:, :, places[0]]
    return torch.einsum("nqk,knh->qnh", weights, v)


def rotated(x, rotary, position):
    """Each pair of channels as a complex number, times that of its angle."""
    one, other = x.chunk(2, dim=-1)
    turn = torch.complex(rotary.cos.to(x), rotary.sin.to(x))[position][:, None]
    turned = torch.complex(one, other) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def results(attend, case, probability, dtype=torch.float64, spare_rows=0):
    """Context and gradients of q, k and v, without rows behind the last sequence.

    There are `spare_rows` of these, all NaN.
    """
    device = case.layout.cu_seqlens.device

    def given(x):
        spare = x.new_full((spare_rows, *x.shape[1:]), torch.nan)
        return torch.cat((x, spare)).to(device, dtype)

    leaves = [given(x).requires_grad_() for x in case.inputs]
    context = attend(*leaves, case.layout, case.site(probability))
    grads = torch.autograd.grad(context, leaves, given(case.gradient))
    sizes = [len(x) for x in (case.inputs[0], *case.inputs)]
    return [x[:size] for x, size in zip((context.detach(), *grads), sizes, strict=True)]


def check_policy(attend, probability, dtype, tolerance, *, lengths=LENGTHS, **how):
    """Context and gradients are those of `reference`, in all layouts.

    `tolerance` is in shares of the largest element of each, or of 1 where that is more.
    """
    for own, some_queries in itertools.product(lengths, (False, True)):
        options = {"some_queries": some_queries, "lengths": own}
        _check_case((attend, reference), probability, dtype, tolerance, options, **how)


def check_windows(attend, probability, dtype, tolerance, *, windows=WINDOWS, **how):
    """As `check_policy`, with rotation and windows."""
    for (own, reach), some_queries in itertools.product(windows, (False, True)):
        options = {"some_queries": some_queries, "lengths": own}
        options |= {"reach": reach, "rotates": reach != 5, "max_length": max(own) + 7}
        both = (attend, windowed)
        _check_case(both, probability, dtype, tolerance, options, **{"spare_rows": 3, **how})


def _check_case(
    both, probability, dtype, tolerance, options, *, head_size=16, device="cpu", spare_rows=0
):
    """The first policy on `device` in `dtype`, the second in float64 on the CPU."""
    options["head_size"] = head_size
    # The reference gets what the dtype makes of the inputs: the policy's own error counts.
    case, plain = (make_case(**options, device=each) for each in (device, "cpu"))
    rounded = tuple(x.to(dtype).double() for x in plain.inputs)
    plain = Case(rounded, plain.gradient.to(dtype).double(), plain.layout, plain.keys)
    expected = results(both[1], plain, probability)
    found = results(both[0], case, probability, dtype, spare_rows)
    for name, ours, theirs in zip(("context", *"qkv"), found, expected, strict=True):
        difference = (ours.cpu().double() - theirs).abs().max()
        assert difference <= tolerance * theirs.abs().max().clamp_min(1), (
            f"{name} of {options}: {difference}"
        )

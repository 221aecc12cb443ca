"""Self-attention inside each sequence of an unpadded batch: policies for any device.

Shape letters: B sequences, S padded length, T tokens, R queries, N heads, H head size.

A policy is `attend(q, k, v, layout, site) -> context`: q and context [R, N, H], k and v [T, N, H],
all in one floating dtype. The queries are those of the layout: all T tokens, or some. Each query
sees exactly the tokens of its own sequence. Scores are divided by sqrt(H), and dropout acts on the
probabilities (BERT, arXiv 1810.04805; Transformer, arXiv 1706.03762, section 3.2.1; unpadded form:
arXiv 2208.08124). If the layout has rotary positions, the policy turns queries and keys by them
(arXiv 2104.09864); if it has a reach, a query sees only tokens that many places to each side.

This file has the policies that need no kernel of ours. `reference` and `grouped` read the
lengths on the host, so a captured step cannot contain them. On a CPU the site's keys decide what is
dropped; elsewhere torch's generator decides.

`flash` is a torch operator for CUDA, in bf16. It reads the sequence bounds on the device
and draws dropout from torch's generator, whose state the forward hands to the backward. torch's
public `varlen_attn` has no dropout; the operator below it does. It has not been run on a GPU yet.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlperf_bert.model.attention_layout import AttentionLayout, Slots
from mlperf_bert.model.dropout import attention_factors
from mlperf_bert.model.dropout_keys import DropoutSite

NUM_STREAMS = 4  # beside the current one, at most


def on_side_streams(
    work: Callable[[int], Tensor], count: int, device: torch.device
) -> list[Tensor]:
    """Results of `work(0)` .. `work(count - 1)`, on CUDA dealt to side streams in turn.

    The side streams wait for the work queued on the current stream, and the current stream then
    waits for all of them. Autograd runs each piece's backward on its own stream, with waits where
    the streams meet. All of it can be captured. Tensors that `work` reads must be made on the
    current stream, and the caller must hold them until this returns. A tensor of a side stream may
    be freed at any time: its memory goes back to that stream, whose next work waits for the current
    one.
    """
    if device.type != "cuda" or count == 1:
        return [work(number) for number in range(count)]
    current = torch.cuda.current_stream(device)
    streams = _side_streams(device)[:count]
    results = []
    for stream in streams:
        stream.wait_stream(current)
    for number in range(count):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(work(number))
    for stream in streams:
        current.wait_stream(stream)
    return results


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The same streams each time: memory freed on a stream can be reused only by that stream."""
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]  # type: ignore[no-untyped-call]


class AttentionPolicy(Protocol):
    """The signature that all policies share; see the module's docstring for shapes."""

    __name__: str

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None, /
    ) -> Tensor:
        """Context [R, N, H] of queries [R, N, H], keys and values [T, N, H].

        The keys of `site` are those of the R queries.
        """
        ...


def turned(q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
    """Queries [R, N, H] and keys [T, N, H] turned by the layout's rotary positions, if it has any.

    Source: Su et al., "RoFormer" (arXiv 2104.09864), section 3.2.2, with the channels of a pair
    half a head apart, as in ModernBERT.
    """
    rotary = layout.rotary
    if rotary is None:
        return q, k
    of_queries, of_keys = (
        [table.index_select(0, places)[:, None] for table in (rotary.cos, rotary.sin)]
        for places in (layout.query_positions, layout.position_ids)
    )
    return _Turn.apply(q, *of_queries), _Turn.apply(k, *of_keys)  # type: ignore[no-untyped-call]


class _Turn(torch.autograd.Function):
    """Pairs of channels turned by an angle, and their gradients turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32 at least, rounded once."""
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=-1).to(x.dtype)


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Attention one sequence at a time, not fused or padded: the reference of all policies."""
    q, k = turned(q, k, layout)
    contexts = []
    first_query = 0
    for own_q, own_k, own_v in zip(
        q.split_with_sizes(layout.query_lengths),
        k.split_with_sizes(layout.lengths),
        v.split_with_sizes(layout.lengths),
        strict=True,
    ):
        scores = torch.einsum("qnh,knh->nqk", own_q, own_k) * q.shape[-1] ** -0.5
        if layout.reach is not None:
            places = layout.query_positions.narrow(0, first_query, len(own_q))
            distance = places[:, None] - torch.arange(len(own_k), device=q.device)
            scores = scores.masked_fill(distance.abs() > layout.reach, float("-inf"))
        probabilities = torch.softmax(scores, dim=-1)
        own_site = _part(site, first_query, len(own_q))
        probabilities = _drop(probabilities[None], own_site)[0].to(v.dtype)
        contexts.append(torch.einsum("nqk,knh->qnh", probabilities, own_v))
        first_query += len(own_q)
    return torch.cat(contexts)


def grouped(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Padded attention for each group of sequences of similar length.

    Runs on any device and dtype; on CUDA the groups run side by side on several streams. All
    lengths are known on the host, so nothing waits for a device. A reach cuts sequences into
    chunks, one group after the other; on CUDA that waits for the device, and keys' gradients are
    summed in no fixed order. A reach with dropout goes one sequence at a time.
    """
    if layout.reach is not None and site is not None:
        return reference(q, k, v, layout, site)
    q, k = turned(q, k, layout)
    if layout.reach is not None:
        return _in_chunks(q, k, v, layout)
    groups, queries = layout.groups, layout.query_groups
    heads = q.shape[1:]
    keys_of = [len(own) * s for own, s in zip(groups.sequences, groups.keys.lengths, strict=True)]
    queries_of = [len(own) * s for own, s in zip(groups.sequences, queries.lengths, strict=True)]
    parts_k, parts_v = (_to_slots(x, groups.keys.slots).split_with_sizes(keys_of) for x in (k, v))
    parts_q = _to_slots(q, queries.slots).split_with_sizes(queries_of)
    slot_site = _site_of_slots(site, queries.slots)

    def attend(number: int) -> Tensor:
        count = len(groups.sequences[number])
        own_q, own_k, own_v = (
            parts[number].view(count, -1, *heads).transpose(1, 2)
            for parts in (parts_q, parts_k, parts_v)
        )
        own_site = _part(slot_site, sum(queries_of[:number]), queries_of[number])
        context = _attend_padded(own_q, own_k, own_v, groups.key_is_real[number], own_site)
        return context.transpose(1, 2).reshape(-1, *heads)

    contexts = on_side_streams(attend, len(groups.sequences), q.device)
    joined = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    slots = queries.slots
    return joined if slots is None else joined.index_select(0, slots.row_slot)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """Attention of each chunk of queries to the keys in its reach, without dropout."""
    chunks, heads = layout.chunks, q.shape[1:]
    counts = [len(each) for each in chunks.is_visible]
    keys_of = [n * slots for n, slots in zip(counts, chunks.key_lengths, strict=True)]
    queries_of = [n * slots for n, slots in zip(counts, chunks.queries.lengths, strict=True)]
    parts = (
        _to_slots(q, chunks.queries.slots).split_with_sizes(queries_of),
        k.index_select(0, chunks.key_rows).split_with_sizes(keys_of),
        v.index_select(0, chunks.key_rows).split_with_sizes(keys_of),
    )
    contexts = []
    for count, is_visible, *own in zip(counts, chunks.is_visible, *parts, strict=True):
        own_q, own_k, own_v = (each.view(count, -1, *heads).transpose(1, 2) for each in own)
        context = _attend_padded(own_q, own_k, own_v, is_visible, None)
        contexts.append(context.transpose(1, 2).reshape(-1, *heads))
    joined = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    slots = chunks.queries.slots
    return joined if slots is None else joined.index_select(0, slots.row_slot)


def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_visible: Tensor | None,
    site: DropoutSite | None,
) -> Tensor:
    """Context [b, N, s, H] of q [b, N, s, H]; k and v may have another number of slots.

    `is_visible` bool [b, 1, 1 or s, key slots], None if all keys are visible; `site` as for
    `_drop`.
    """
    if site is None or q.device.type != "cpu":
        dropout_p = 0.0 if site is None else site.probability
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, dropout_p=dropout_p)
    # On a CPU torch has no fused attention with dropout; this is its plain formula with our
    # dropout.
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_visible is not None:  # added in place: the product's backward does not need its result
        scores += scores.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    return _drop(torch.softmax(scores, dim=-1), site).to(v.dtype) @ v


def _drop(probabilities: Tensor, site: DropoutSite | None) -> Tensor:
    """Dropout of probabilities [b, N, s, key slots]; a query's keys lie in slots by position.

    The keys of `site` are those of the b * s query slots.
    """
    if site is None:
        return probabilities
    if probabilities.device.type != "cpu":
        return F.dropout(probabilities, site.probability)
    return probabilities * attention_factors(site, probabilities.shape, probabilities.dtype)


def _part(site: DropoutSite | None, start: int, count: int) -> DropoutSite | None:
    """`site` restricted to `count` rows from `start`."""
    if site is None:
        return None
    keys = site.keys
    of_part = replace(
        keys,
        sample_ids=keys.sample_ids.narrow(0, start, count),
        positions=keys.positions.narrow(0, start, count),
    )
    return replace(site, keys=of_part)


def _site_of_slots(site: DropoutSite | None, slots: Slots | None) -> DropoutSite | None:
    if site is None or slots is None:
        return site
    return replace(site, keys=site.keys.rows(slots.slot_row))


def _to_slots(x: Tensor, slots: Slots | None) -> Tensor:
    if slots is None:
        return x
    padded: Tensor = _GatherSlots.apply(x, slots.slot_row, slots.row_slot)  # type: ignore[no-untyped-call]
    return padded


class _GatherSlots(torch.autograd.Function):
    """x[slot_row], with a gather as backward too.

    Autograd would scatter-add all slots. No gradient reaches a padding slot (no token sees
    its key, its context is not used), so each row's gradient is exactly that of its own slot.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_row: Tensor, row_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_slot)
        return x.index_select(0, slot_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_slot,) = ctx.saved_tensors
        return grad.index_select(0, row_slot), None, None


def flash(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """FlashAttention-2 (arXiv 2307.08691). Heads of at most 256 channels, a multiple of 8."""
    q, k = turned(q, k, layout)
    context: Tensor = _VarlenAttention.apply(q, k, v, layout, site)  # type: ignore[no-untyped-call]
    return context


class _VarlenAttention(torch.autograd.Function):
    """Attention that saves logsumexp, float32 [N, R], and random state."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        site: DropoutSite | None,
    ) -> Tensor:
        starts, longest = (
            (layout.cu_queries, layout.cu_seqlens),
            (layout.max_queries, layout.max_length),
        )
        dropout_p = 0.0 if site is None else site.probability
        context, logsumexp, *random_state, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *starts, *longest, dropout_p, False, False, **_window(layout.reach)
        )
        ctx.save_for_backward(q, k, v, context, logsumexp, *starts, *random_state)
        ctx.not_tensors = longest, dropout_p, layout.reach
        return context  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsumexp, *starts, seed, offset = ctx.saved_tensors
        longest, dropout_p, reach = ctx.not_tensors
        of_forward = (grad.contiguous(), q, k, v, context, logsumexp)
        bounds, random_state = (*starts, *longest), (seed, offset)
        gradients = torch.ops.aten._flash_attention_backward(
            *of_forward, *bounds, dropout_p, False, *random_state, **_window(reach)
        )
        return *gradients, None, None


def _window(reach: int | None) -> dict[str, int]:
    return {} if reach is None else {"window_size_left": reach, "window_size_right": reach}

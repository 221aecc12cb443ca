"""Policies for self-attention within each sequence of an unpadded batch, on any device.

Shapes use the letters B (sequences), T (tokens), R (queries), N (heads) and H (head size).

A policy is a function `attend(q, k, v, layout, site) -> context`. The shape of q and context is [R,
N, H], and that of k and v is [T, N, H]. All have the same floating dtype. The layout defines the
queries, which are all T tokens or some of them. Each query attends to exactly the tokens of its own
sequence. Scores are divided by sqrt(H), and dropout is applied to the probabilities (BERT, arXiv
1810.04805; Transformer, arXiv 1706.03762, section 3.2.1; unpadded form: arXiv 2208.08124). If the
layout has rotary positions, the policy rotates queries and keys by them (arXiv 2104.09864). If the
layout has a reach, a query attends only to tokens within that distance on each side.

This file contains the policies that need no kernel of this project. `reference` and `grouped` read
the lengths on the host, so a captured step cannot contain these policies. Which elements are
dropped depends on the keys of the dropout site on a CPU, and on torch's generator on other devices.

`flash` is a torch operator for CUDA in bf16. It reads the sequence bounds on the device and draws
dropout from torch's generator, whose state the forward pass saves for the backward pass. It calls
the private operator behind torch's public `varlen_attn`, because `varlen_attn` does not support
dropout. `flash` has not been run on a GPU yet.
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

NUM_STREAMS = 4  # largest number of side streams


def on_side_streams(
    work: Callable[[int], Tensor], count: int, device: torch.device
) -> list[Tensor]:
    """Return the results of `work(0)` .. `work(count - 1)`. On CUDA the calls use several streams.

    These side streams first wait for the work queued on the current stream, and the current stream
    then waits for all of them. Autograd runs the backward pass of each call on that call's stream
    and inserts waits at the points where streams meet. All of this can be captured in a CUDA graph.
    Tensors that `work` reads must be created on the current stream, and the caller must keep
    references to them until this function returns. A tensor created on a side stream may be freed
    at any time, because its memory is returned to that stream, whose next work waits for the
    current stream.
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
    """Return the side streams of a device.

    Every call returns the same streams, because memory can be reused only by the stream that freed
    it.
    """
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]  # type: ignore[no-untyped-call]


class AttentionPolicy(Protocol):
    """The signature of all attention policies. The module's docstring defines the shapes."""

    __name__: str

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None, /
    ) -> Tensor:
        """Return the context [R, N, H] of queries [R, N, H] over keys and values [T, N, H].

        `site` contains the dropout keys of the R queries.
        """
        ...


def rotate(q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
    """Return queries [R, N, H] and keys [T, N, H], rotated by the layout's rotary positions.

    Without rotary positions, both are returned unchanged. As in ModernBERT, the two channels of a
    pair are half a head apart. Source: Su et al., "RoFormer" (arXiv 2104.09864), section 3.2.2.
    """
    rotary = layout.rotary
    if rotary is None:
        return q, k
    query_angles, key_angles = (
        [table.index_select(0, positions)[:, None] for table in (rotary.cos, rotary.sin)]
        for positions in (layout.query_positions, layout.position_ids)
    )
    return _Rotate.apply(q, *query_angles), _Rotate.apply(k, *key_angles)


class _Rotate(torch.autograd.Function):
    """A rotation of pairs of channels, whose backward pass rotates the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, -sin), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels in at least float32, and round once to the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat(rotated, dim=-1).to(x.dtype)


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Compute attention one sequence at a time, without padding or fused operators.

    All other policies are compared with this one.
    """
    q, k = rotate(q, k, layout)
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
            positions = layout.query_positions.narrow(0, first_query, len(own_q))
            distance = positions[:, None] - torch.arange(len(own_k), device=q.device)
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
    """Compute padded attention separately for each group of sequences of similar length.

    This policy runs on any device and dtype. On CUDA the groups run in parallel on several streams.
    All lengths are known on the host, so the host does not wait for the device. If the layout has a
    reach (sliding window), sequences are cut into chunks, and the groups of chunks run one after
    another. On CUDA the host then waits for the device, and the gradients of keys are summed in no
    fixed order. With both a reach and dropout, the function computes one sequence at a time.
    """
    if layout.reach is not None and site is not None:
        return reference(q, k, v, layout, site)
    q, k = rotate(q, k, layout)
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
    """Compute attention without dropout, for one chunk of queries and its keys at a time."""
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
    """Compute the context [b, N, s, H] of queries [b, N, s, H] in a padded group of sequences.

    k and v [b, N, key slots, H] may have any number of slots. `is_visible` is bool [b, 1, 1 or s,
    key slots], or None if all keys are visible. `site` contains the dropout keys of the b * s query
    slots.
    """
    if site is None or q.device.type != "cpu":
        dropout_p = 0.0 if site is None else site.probability
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, dropout_p=dropout_p)
    # torch has no fused attention with dropout on a CPU, so this is the plain formula with our
    # dropout.
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_visible is not None:  # in place, because the product's backward does not read the scores
        scores += scores.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    return _drop(torch.softmax(scores, dim=-1), site).to(v.dtype) @ v


def _drop(probabilities: Tensor, site: DropoutSite | None) -> Tensor:
    """Apply dropout to attention probabilities [b, N, s, key slots].

    A key's slot must be its position, because dropout depends on the slot. `site` contains the
    dropout keys of the b * s query slots.
    """
    if site is None:
        return probabilities
    if probabilities.device.type != "cpu":
        return F.dropout(probabilities, site.probability)
    return probabilities * attention_factors(site, probabilities.shape, probabilities.dtype)


def _part(site: DropoutSite | None, start: int, count: int) -> DropoutSite | None:
    """Return `site` with the dropout keys of `count` rows only, beginning with row `start`."""
    if site is None:
        return None
    keys = site.keys
    part = replace(
        keys,
        sample_ids=keys.sample_ids.narrow(0, start, count),
        positions=keys.positions.narrow(0, start, count),
    )
    return replace(site, keys=part)


def _site_of_slots(site: DropoutSite | None, slots: Slots | None) -> DropoutSite | None:
    if site is None or slots is None:
        return site
    return replace(site, keys=site.keys.rows(slots.slot_row))


def _to_slots(x: Tensor, slots: Slots | None) -> Tensor:
    if slots is None:
        return x
    padded: Tensor = _GatherSlots.apply(x, slots.slot_row, slots.row_slot)
    return padded


class _GatherSlots(torch.autograd.Function):
    """A gather of the rows x[slot_row], whose backward pass is a gather as well.

    Autograd would scatter-add the gradients of all slots. No gradient reaches a padding slot,
    because no token attends to the slot's key, and the slot's context is not used. So each row's
    gradient is exactly that of its own slot.
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
    """Compute attention with torch's implementation of FlashAttention-2 (arXiv 2307.08691).

    The number of channels per head must be a multiple of 8 and at most 256.
    """
    q, k = rotate(q, k, layout)
    context: Tensor = _VarlenAttention.apply(q, k, v, layout, site)
    return context


class _VarlenAttention(torch.autograd.Function):
    """FlashAttention that saves its logsumexp, float32 [N, R], and torch's generator state."""

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
        saved = (grad.contiguous(), q, k, v, context, logsumexp)
        bounds, random_state = (*starts, *longest), (seed, offset)
        gradients = torch.ops.aten._flash_attention_backward(
            *saved, *bounds, dropout_p, False, *random_state, **_window(reach)
        )
        return *gradients, None, None


def _window(reach: int | None) -> dict[str, int]:
    return {} if reach is None else {"window_size_left": reach, "window_size_right": reach}

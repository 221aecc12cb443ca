"""Attention policies: they agree, they drop what they should, and they refuse what they cannot."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CPU

from mlperf_bert.errors import ConfigError
from mlperf_bert.model.attention import (
    AttentionPolicy,
    choose_attention,
    grouped,
    packed,
    reference,
    varlen,
)
from mlperf_bert.model.attention_layout import AttentionLayout, build_groups, build_rows

# Rounds to none of 2**16: takes the way of dropout, and drops nothing.
DROPS_NOTHING = 2.0**-20

MAX_LENGTH = 40  # rows of packed sequences are as long
LENGTHS = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=12).map(tuple)


def layout_of(lengths: tuple[int, ...], device: str = "cpu") -> AttentionLayout:
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    on_device = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return AttentionLayout(lengths, on_device, MAX_LENGTH)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=LENGTHS)
def test_all_are_reference(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v, grad = torch.randn(
        4, sum(lengths), 2, 8, dtype=torch.float64, generator=generator
    ).unbind()
    results = []
    for attend, dropout_p in (
        (reference, 0.0),
        (grouped, 0.0),
        (grouped, DROPS_NOTHING),
        (packed, 0.0),
        (packed, DROPS_NOTHING),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        context = attend(*leaves, layout_of(lengths), dropout_p)
        results.append((context, *torch.autograd.grad(context, leaves, grad)))
    for result in results[1:]:
        torch.testing.assert_close(results[0], result, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=LENGTHS)
def test_groups_hold_every_token_once(lengths: tuple[int, ...]) -> None:
    groups = build_groups(lengths, CPU)
    num_tokens = sum(lengths)
    num_slots = sum(group.num_slots for group in groups.members)
    assert sum(group.num_sequences for group in groups.members) == len(lengths)
    if groups.slot_token is None or groups.token_slot is None:
        assert num_slots == num_tokens
        return
    assert groups.slot_token.shape == (num_slots,)
    torch.testing.assert_close(groups.slot_token[groups.token_slot], torch.arange(num_tokens))
    masks = [
        torch.ones(group.num_slots, dtype=torch.bool)
        if group.key_is_real is None
        else group.key_is_real.flatten()
        for group in groups.members
    ]
    torch.testing.assert_close(
        torch.cat(masks).nonzero().flatten(), groups.token_slot.sort().values
    )


def test_sequences_of_one_length_are_one_group_without_copies() -> None:
    groups = build_groups((16, 16, 16), CPU)
    (group,) = groups.members
    assert group.key_is_real is None
    assert groups.slot_token is None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=LENGTHS)
def test_rows_hold_every_sequence_whole_and_once(lengths: tuple[int, ...]) -> None:
    rows = build_rows(lengths, MAX_LENGTH, CPU)
    num_rows = len(rows.is_visible)
    assert rows.slot_token.shape == (num_rows * MAX_LENGTH,)
    torch.testing.assert_close(rows.slot_token[rows.token_slot], torch.arange(sum(lengths)))
    for slots in rows.token_slot.split(lengths):
        row = int(slots[0]) // MAX_LENGTH
        seen = torch.zeros(MAX_LENGTH, dtype=torch.bool)
        seen[slots - row * MAX_LENGTH] = True
        assert int(slots[-1] - slots[0]) == len(slots) - 1
        assert int(slots[-1]) // MAX_LENGTH == row
        is_visible = rows.is_visible[row, 0, seen]
        assert torch.equal(is_visible, seen.expand(len(slots), -1))
    assert rows.is_visible.any(dim=-1).all()  # no softmax over nothing


def test_packing_needs_fewer_rows_than_padding() -> None:
    lengths = (40, 12, 7, 28, 33, 20, 20)
    assert sum(lengths) == 4 * MAX_LENGTH
    assert len(build_rows(lengths, MAX_LENGTH, CPU).is_visible) == 4


@pytest.mark.parametrize("attend", [reference, grouped, packed])
def test_dropout_rate(attend: AttentionPolicy) -> None:
    # Equal scores and one-hot values: the context is the probabilities themselves.
    lengths, num_heads, head_size, rate = (32, 32, 20, 24, 31), 16, 32, 0.25
    place = torch.cat([torch.arange(length) for length in lengths])
    v = torch.nn.functional.one_hot(place, head_size).float()
    v = v[:, None].expand(-1, num_heads, -1).contiguous()
    zeros = torch.zeros_like(v)
    torch.manual_seed(0)
    dropped = attend(zeros, zeros, v, layout_of(lengths), rate)
    whole = attend(zeros, zeros, v, layout_of(lengths), 0.0)
    is_key = whole > 0
    num_keys = int(is_key.sum())
    assert num_keys == num_heads * sum(length**2 for length in lengths)
    num_dropped = int((dropped[is_key] == 0).sum())
    standard_error = (num_keys * rate * (1 - rate)) ** 0.5
    assert abs(num_dropped - num_keys * rate) < 4 * standard_error
    kept = dropped > 0
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - rate))


@pytest.mark.parametrize("attend", [reference, grouped, packed])
def test_choice_by_name(attend: AttentionPolicy) -> None:
    name: Any = attend.__name__
    assert choose_attention(name, CPU, torch.float32, 64) is attend


def test_auto_on_cpu_is_grouped() -> None:
    assert choose_attention("auto", CPU, torch.float32, 64) is grouped
    assert choose_attention("auto", CPU, torch.bfloat16, 64) is grouped
    assert choose_attention("auto", torch.device("cuda"), torch.float32, 64) is grouped


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)]
)
def test_varlen_is_refused_where_it_cannot_run(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention.*'grouped'"):
        choose_attention("varlen", torch.device(device), dtype, 64)


def test_varlen_refuses_float32_inputs() -> None:
    x = torch.zeros(5, 2, 8)
    with pytest.raises(ConfigError, match=r"model\.attention.*'grouped'"):
        varlen(x, x, x, layout_of((5,)), 0.0)


def test_varlen_calls_operators_as_their_schemas_say() -> None:
    """Shapes only, on "meta": no kernel runs here. Its numbers have not been checked on a GPU."""
    q, k, v = (
        torch.empty(12, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    context = varlen(q, k, v, layout_of((5, 7), "meta"), 0.1)
    assert context.shape == q.shape
    grads = torch.autograd.grad(context, (q, k, v), torch.empty_like(context))
    assert [grad.shape for grad in grads] == [q.shape] * 3

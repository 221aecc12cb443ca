"""Attention policies: they agree, they drop what they should, and they refuse what they cannot."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import layout_of, make_case, queries_of, results, windowed
from mlperf_bert.errors import ConfigError
from mlperf_bert.model import choices
from mlperf_bert.model.attention import flash, grouped, reference
from mlperf_bert.model.attention_layout import Rotary
from mlperf_bert.model.choices import choose_attention
from mlperf_bert.step.captured import check_capturable
from model_cases import CPU, MODERN, TINY

MAX_LENGTH = 40
RATE = 0.25


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=12).map(tuple),
    empty=st.integers(0, 2),
    reach=st.none() | st.integers(0, MAX_LENGTH + 1),
    rotates=st.booleans(),
    some_queries=st.booleans(),
    probability=st.sampled_from([0.0, RATE]),
)
def test_policies_are_attention_as_defined(lengths, empty, probability, **options):
    """Context and gradients; windows shorter and longer than the sequences; equal dropout."""
    case = make_case(lengths + empty * (0,), max_length=MAX_LENGTH, **options)
    expected = results(windowed, case, probability)
    for attend in (reference, grouped):
        found = results(attend, case, probability)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lengths=st.lists(
        st.integers(0, 200) | st.sampled_from([0, 1, 64, 128]), min_size=1, max_size=40
    ).map(tuple),
    spare_rows=st.integers(0, 150),
    size=st.sampled_from([32, 64, 128]),
)
def test_each_block_of_each_sequence_comes_once(lengths, spare_rows, size):
    layout = layout_of(lengths)
    bounds, num_rows = layout.cu_seqlens, sum(lengths) + spare_rows
    blocks = layout.blocks(bounds, num_rows, size)
    assert len(blocks) == num_rows // size + len(lengths)  # for all batches of a shape
    first = (torch.arange(len(blocks)) - bounds[blocks] // size - blocks) * size  # by `block_of`
    places = zip(blocks.tolist(), first.tolist(), strict=True)
    expected = [(i, row) for i, length in enumerate(lengths) for row in range(0, length, size)]
    assert [(i, row) for i, row in places if row < lengths[i]] == expected


def test_blocks_are_computed_once_for_all_layers():
    layout = layout_of((5, 7))
    local = layout.attending(Rotary.of_base(50.0, 8, 16), 3)
    last = local.for_queries(queries_of((5, 7)))
    blocks = local.blocks(layout.cu_seqlens, 12, 64)
    assert layout.blocks(layout.cu_seqlens, 12, 64) is blocks
    assert last.blocks(last.cu_seqlens, 12, 64) is blocks
    assert last.blocks(last.cu_queries, 12, 64) is not blocks


def test_angles_are_the_published_ones():
    """arXiv 2104.09864, section 3.2.2."""
    rotary = Rotary.of_base(10_000.0, 100, 64)
    of_pairs = torch.tensor([10_000.0 ** (-2 * pair / 64) for pair in range(32)]).double()
    angles = torch.arange(100).double()[:, None] * of_pairs
    for found, expected in ((rotary.cos, angles.cos()), (rotary.sin, angles.sin())):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


CUDA = torch.device("cuda")
WIDE = replace(TINY, hidden_size=64)  # with heads of 16 channels, which every policy takes
BF16 = torch.bfloat16
# Config, device and dtype, what the machine lacks, and why triton and flash cannot run, if so.
CHOICES = {
    "CPU": (WIDE, CPU, BF16, {}, "it needs CUDA", "it needs CUDA"),
    "meta": (WIDE, torch.device("meta"), BF16, {}, "it needs CUDA", "it needs CUDA"),
    "float32": (WIDE, CUDA, torch.float32, {}, "it needs bf16", "it needs bf16"),
    "nothing lacks": (WIDE, CUDA, BF16, {}, None, None),
    "modern": (replace(MODERN, hidden_size=64), CUDA, BF16, {}, None, None),
    "with dropout": (replace(WIDE, attention_dropout=0.1), CUDA, BF16, {}, None, None),
    "older GPU": (WIDE, CUDA, BF16, {"capability": (7, 5)}, "capability 8.0", "capability 8.0"),
    "no compiler": (WIDE, CUDA, BF16, {"no_triton": "no compiler"}, "no compiler", None),
    "no flash": (TINY, CUDA, BF16, {"has_flash": False}, "8 channels", "without flash kernels"),
    "heads of 24": (replace(TINY, hidden_size=96), CUDA, BF16, {}, "24 channels", None),
    "heads of 20": (replace(TINY, hidden_size=80), CUDA, BF16, {}, "20 channels", "20 channels"),
    "last layer local": (
        *(replace(MODERN, num_layers=6), CUDA, BF16, {}),
        *("8 channels", "the last layer is local"),
    ),
}


def equip(monkeypatch, capability=(9, 0), no_triton=None, *, has_flash=True):
    """Make it a machine that has what policies need, but no GPU: a measurement would fail."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_flash)
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: no_triton)


@pytest.mark.parametrize("case", CHOICES)
def test_attention_is_chosen_by_a_rule_and_kernels_refused_where_they_cannot_run(case, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    config, device, dtype, machine, *problems = CHOICES[case]
    equip(monkeypatch, **machine)
    reasons = dict(zip(("triton", "flash"), problems, strict=True))
    best = next((name for name, problem in reasons.items() if problem is None), "grouped")
    found = choose_attention(config, device, dtype)
    assert found.name == best and found.note.startswith(f"attention: {best}")
    for name, problem in reasons.items():
        named = replace(config, attention=name)
        if problem is None:
            assert choose_attention(named, device, dtype).name == name
            continue
        words = rf"model\.attention.*'{name}' cannot run on .* because .*{problem}.*'grouped'"
        with pytest.raises(ConfigError, match=words):
            choose_attention(named, device, dtype)
        if device == CUDA:
            assert f"not {name}, because " in found.note and problem in found.note
    assert ("because" in found.note) == (device == CUDA and best != "triton")


def test_a_name_chooses_its_policy(monkeypatch):
    equip(monkeypatch)
    for attend in (reference, grouped, flash):
        name = attend.__name__
        choice = choose_attention(replace(WIDE, attention=name), CUDA, BF16)
        assert (choice.name, choice.policy, choice.note) == (name, attend, f"attention: {name}")
    assert choose_attention(WIDE, CPU, BF16).policy is grouped


def test_a_captured_step_says_why_attention_is_grouped():
    choice = choose_attention(TINY, CUDA, torch.float32)
    with pytest.raises(ConfigError, match=r"'grouped' reads lengths.*not triton, because it needs"):
        check_capturable(choice, CUDA)


def test_flash_calls_operators_as_their_schemas_say():
    """Shapes only, on "meta": no kernel runs here. Its numbers have not been checked on a GPU."""
    lengths = (5, 7)
    layout = layout_of(lengths, "meta").for_queries(queries_of(lengths, "meta"))
    q, k, v = (
        torch.empty(count, 2, 64, dtype=BF16, device="meta", requires_grad=True)
        for count in (len(layout.queries.rows), 12, 12)
    )
    context = flash(q, k, v, layout, make_case(lengths).site(0.1))
    assert context.shape == q.shape
    grads = torch.autograd.grad(context, (q, k, v), torch.empty_like(context))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]

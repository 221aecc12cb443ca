"""Attention policies: they agree, they drop what they should, and they refuse what they cannot."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import (
    NUM_HEADS,
    bounds_of,
    check_policy,
    layout_of,
    make_case,
    queries_of,
    results,
)
from mlperf_bert.errors import ConfigError
from mlperf_bert.model import choices
from mlperf_bert.model.attention import flash, grouped, reference
from mlperf_bert.model.attention_layout import (
    AttentionLayout,
    Rotary,
    build_groups,
)
from mlperf_bert.model.choices import choose_attention
from mlperf_bert.step.captured import check_capturable
from model_cases import CPU, MODERN, TINY

MAX_LENGTH = 40
LENGTHS = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=12).map(tuple)
RATE = 0.25


@pytest.mark.parametrize("some_queries", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (9, 5, 5), (3, 17, 8, 0, 0)])
def test_reference_is_attention_of_each_sequence(lengths, some_queries):
    """Against a plain softmax, token by token."""
    case = make_case(lengths, some_queries=some_queries)
    q, k, v = case.inputs
    found = reference(q, k, v, case.layout, None)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = case.layout.queries.rows if some_queries else torch.arange(len(sequence))
    for number, row in enumerate(rows.tolist()):
        own = sequence == sequence[row]
        for head in range(NUM_HEADS):
            weights = (k[own, head] @ q[number, head] / q.shape[-1] ** 0.5).exp()
            expected = weights @ v[own, head] / weights.sum()
            torch.testing.assert_close(found[number, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("probability", [0.0, RATE])
@pytest.mark.parametrize("attend", [grouped])
def test_policies_are_reference(attend, probability):
    """With dropout too: all drop the same elements."""
    check_policy(attend, probability, torch.float64, 1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=LENGTHS)
def test_policies_are_reference_at_any_lengths(lengths):
    case = make_case(lengths, max_length=MAX_LENGTH, some_queries=len(lengths) % 2 == 1)
    for probability in (0.0, RATE):
        expected = results(reference, case, probability)
        found = results(grouped, case, probability)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def turning_case(lengths, reach, some_queries):
    """A case whose layout turns queries and keys, in float64, and has this reach."""
    case = make_case(lengths, max_length=MAX_LENGTH, some_queries=some_queries)
    places = torch.cat([torch.arange(length) for length in lengths])
    layout = AttentionLayout(lengths, bounds_of(lengths), MAX_LENGTH, places)
    layout = layout.attending(rotary_of(case.inputs[0].shape[-1]), reach)
    if some_queries:
        layout = layout.for_queries(queries_of(lengths))
    return replace(case, layout=layout)


def rotary_of(head_size):
    """Angles in float64, of a small base: all pairs turn."""
    angles = torch.arange(MAX_LENGTH).double()[:, None] / angles_per_turn(head_size, 20.0)
    return Rotary(cos=angles.cos(), sin=angles.sin())


def angles_per_turn(head_size, base):
    return torch.tensor([base ** (2 * pair / head_size) for pair in range(head_size // 2)]).double()


def plainly(q, k, v, case):
    """All queries with all keys; those of other sequences and those too far away are masked."""
    layout, rotary = case.layout, case.layout.rotary
    assert rotary is not None
    place = torch.cat([torch.arange(length) for length in layout.lengths])
    sequence = torch.arange(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths))
    row = torch.arange(len(place)) if layout.queries is None else layout.queries.rows
    is_seen = sequence[row][:, None] == sequence
    if layout.reach is not None:
        is_seen &= (place[row][:, None] - place).abs() <= layout.reach

    def turned(x, places):
        turn = torch.complex(rotary.cos, rotary.sin)[places][:, None]
        product = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((product.real, product.imag), dim=-1)

    scores = torch.einsum("qnh,knh->nqk", turned(q, place[row]), turned(k, place))
    scores = (scores / q.shape[-1] ** 0.5).masked_fill(~is_seen, -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(dim=-1), v)


@pytest.mark.parametrize("some_queries", [False, True])
@pytest.mark.parametrize("reach", [None, 1, 4, 8, 64])
@pytest.mark.parametrize("lengths", [(1,), (9, 5, 5), (16, 8), (3, 40, 17, 1, 8, 0, 0)])
def test_rotation_and_reach_are_as_defined(lengths, reach, some_queries):
    """Context and gradients, in windows shorter and longer than the sequences."""
    case = turning_case(lengths, reach, some_queries)
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    context = plainly(*leaves, case)
    expected = [context.detach(), *torch.autograd.grad(context, leaves, case.gradient)]
    for attend in (reference, grouped):
        found = results(attend, case, 0.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    dropped = results(reference, case, RATE)
    assert max(lengths) == 1 or not torch.allclose(dropped[0], expected[0])
    torch.testing.assert_close(results(grouped, case, RATE), dropped, rtol=0, atol=1e-12)


def test_angles_are_the_published_ones():
    """arXiv 2104.09864, section 3.2.2."""
    rotary = Rotary.of_base(10_000.0, 100, 64)
    angles = torch.arange(100).double()[:, None] / angles_per_turn(64, 10_000.0)
    for found, expected in ((rotary.cos, angles.cos()), (rotary.sin, angles.sin())):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def test_sequences_of_one_length_are_one_group_without_copies():
    groups = build_groups((16, 16, 16), CPU)
    assert groups.key_is_real == (None,)
    assert groups.keys.slots is None


@pytest.mark.parametrize("attend", [reference, grouped])
def test_dropout_rate(attend):
    # Equal scores and one-hot values: the context is the probabilities themselves.
    lengths, num_channels = (32, 32, 20, 24, 31), 32
    case = make_case(lengths, max_length=MAX_LENGTH)
    values = torch.nn.functional.one_hot(case.keys.positions, num_channels).double()
    v = values[:, None].expand(-1, NUM_HEADS, -1).contiguous()
    zeros = torch.zeros_like(v)
    dropped, whole = (
        attend(zeros, zeros, v, case.layout, case.site(probability)) for probability in (RATE, 0.0)
    )
    is_key = whole > 0
    num_keys = int(is_key.sum())
    assert num_keys == NUM_HEADS * sum(length**2 for length in lengths)
    num_dropped = int((dropped[is_key] == 0).sum())
    standard_error = (num_keys * RATE * (1 - RATE)) ** 0.5
    assert abs(num_dropped - num_keys * RATE) < 4 * standard_error
    kept = dropped > 0
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - RATE))


@pytest.mark.parametrize("attend", [reference, grouped])
def test_choice_by_name(attend):
    name = attend.__name__
    choice = choose_attention(replace(TINY, attention=name), CPU, torch.float32)
    assert choice.policy is attend
    assert attend.__name__ in choice.note


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_without_cuda_is_grouped(device, dtype):
    assert choose_attention(TINY, torch.device(device), dtype).policy is grouped


def test_auto_is_grouped_where_no_kernel_takes_the_dtype():
    choice = choose_attention(TINY, torch.device("cuda"), torch.float32)
    assert choice.policy is grouped
    assert "flash left out (it needs bf16, " in choice.note


@pytest.mark.parametrize("name", ["flash", "triton"])
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)]
)
def test_cuda_policies_are_refused_where_they_cannot_run(name, device, dtype):
    with pytest.raises(ConfigError, match=rf"model\.attention.*'{name}'.*'grouped'"):
        choose_attention(replace(TINY, attention=name), torch.device(device), dtype)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flash", "without flash kernels"), ("triton", "8 channels")],
)
def test_kernels_are_refused_where_they_would_be_wrong(name, reason, monkeypatch):
    """On a GPU, with this torch and heads of 8 channels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    device = torch.device("cuda")
    with pytest.raises(ConfigError, match=f"'{name}' cannot run here: .*{reason}"):
        choose_attention(replace(TINY, attention=name), device, torch.bfloat16)
    choice = choose_attention(TINY, device, torch.bfloat16)
    assert choice.policy is grouped
    assert f"{name} left out (" in choice.note


@pytest.mark.parametrize(
    ("name", "layers", "reason"),
    [("flash", 6, "the last layer is local"), ("flash", 5, None)],
)
def test_kernels_whose_windows_would_be_wrong_are_refused(name, layers, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    config, device = replace(MODERN, attention=name, num_layers=layers), torch.device("cuda")
    if reason is None:
        assert choose_attention(config, device, torch.bfloat16).name == name
        return
    with pytest.raises(ConfigError, match=f"'{name}' cannot run here: .*{reason}"):
        choose_attention(config, device, torch.bfloat16)


@pytest.fixture
def fully_equipped(monkeypatch):
    """A machine that has what every policy of the rule needs, but no GPU to run anything on."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: None)


LARGER = replace(TINY, hidden_size=64)  # with heads of 16 channels, which every policy takes
ON_CUDA = (torch.device("cuda"), torch.bfloat16)


@pytest.mark.usefixtures("fully_equipped")
def test_auto_on_cuda_is_triton_and_nothing_is_measured():
    """There is no CUDA device here, so a measurement would fail."""
    choice = choose_attention(LARGER, *ON_CUDA)
    assert (choice.name, choice.note) == ("triton", "attention: triton")
    assert choice == choose_attention(replace(LARGER, attention="triton"), *ON_CUDA)
    for config in (replace(MODERN, hidden_size=64), replace(LARGER, attention_dropout=0.1)):
        assert choose_attention(config, *ON_CUDA) == choice


@pytest.mark.usefixtures("fully_equipped")
def test_auto_on_cuda_is_flash_where_triton_cannot_compile(
    monkeypatch,
):
    monkeypatch.setattr(choices, "why_triton_cannot_compile", lambda: "no compiler")
    choice = choose_attention(LARGER, *ON_CUDA)
    assert choice.policy is flash
    assert choice.note == "attention: flash (triton left out (no compiler))"
    with pytest.raises(ConfigError, match="'triton' cannot run here: no compiler; use 'auto'"):
        choose_attention(replace(LARGER, attention="triton"), *ON_CUDA)


@pytest.mark.usefixtures("fully_equipped")
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (replace(TINY, hidden_size=96), "flash"),  # heads of 24 channels
        (replace(TINY, hidden_size=80), "grouped"),  # of 20
        (replace(MODERN, num_layers=6), "grouped"),  # of 8, and the last layer sees a window
    ],
)
def test_auto_on_cuda_goes_by_the_config(config, name):
    choice = choose_attention(config, *ON_CUDA)
    assert choice.name == name
    assert choice.note.startswith(f"attention: {name} (triton left out (heads have ")
    assert ("flash left out (" in choice.note) == (name == "grouped")


def test_a_captured_step_says_why_attention_is_grouped():
    choice = choose_attention(TINY, torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match=r"'grouped' reads lengths.*triton left out \(it needs"):
        check_capturable(choice, torch.device("cuda"))


def test_flash_calls_operators_as_their_schemas_say():
    """Shapes only, on "meta": no kernel runs here. Its numbers have not been checked on a GPU."""
    lengths = (5, 7)
    layout = layout_of(lengths, "meta").for_queries(queries_of(lengths, "meta"))
    q, k, v = (
        torch.empty(count, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (len(layout.queries.rows), 12, 12)
    )
    site = make_case(lengths).site(0.1)
    context = flash(q, k, v, layout, site)
    assert context.shape == q.shape
    grads = torch.autograd.grad(context, (q, k, v), torch.empty_like(context))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]

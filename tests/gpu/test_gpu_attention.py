"""Attention policies on a GPU: equal to the reference, captured, and chosen by a rule."""

from dataclasses import replace

import pytest
import torch

from attention_cases import bounds_of, check_policy, check_windows, make_case, results
from graph_cases import captured
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.attention import grouped
from mlperf_bert.model.choices import choose_attention

DEVICE = "cuda"
KERNELS = ("triton", "flash")
# Share of the largest element of context and gradients. bf16 itself rounds to 0.004.
TOLERANCE = 0.02
MODEL = ModelSection(max_position_embeddings=256)


def policy(name, dtype, head_size=64):
    config = replace(MODEL, attention=name, hidden_size=head_size * MODEL.num_heads)
    try:
        return choose_attention(config, torch.device(DEVICE), dtype).policy
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_reference(name, head_size):
    attend = policy(name, torch.bfloat16, head_size)
    options = {"head_size": head_size, "device": DEVICE}
    check_policy(attend, 0.0, torch.bfloat16, TOLERANCE, **options)
    if (name, head_size) == ("triton", 64):  # which also drops what the reference drops
        check_policy(attend, 0.3, torch.bfloat16, TOLERANCE, **options, spare_rows=3)


@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_triton_rotates_and_hides(probability, head_size):
    attend = policy("triton", torch.bfloat16, head_size)
    options = {"head_size": head_size, "device": DEVICE}
    check_windows(attend, probability, torch.bfloat16, TOLERANCE, **options)


@pytest.mark.parametrize("some_queries", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_backward_drops_what_the_forward_dropped(name, some_queries):
    """The context is linear in v: its product with a gradient is that of v with its own."""
    attend = policy(name, torch.bfloat16)
    case = make_case((130, 7), head_size=64, some_queries=some_queries, device=DEVICE)
    context, _, _, of_v = results(attend, case, 0.3, torch.bfloat16)
    plain = results(attend, case, 0.0, torch.bfloat16)[0]
    assert (context - plain).abs().max() > 0.1  # something was dropped
    v, gradient = (x.to(DEVICE) for x in (case.inputs[2], case.gradient))
    of_context = (context.double() * gradient).sum()
    torch.testing.assert_close((of_v.double() * v).sum(), of_context, rtol=0.02, atol=0.5)


def both_ways(attend, case, site, dtype):
    """A function that gives context and gradients, always for the same leaves."""
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in case.inputs]
    gradient = case.gradient.to(DEVICE, dtype)

    def run():
        context = attend(*leaves, case.layout, site)
        return [context, *torch.autograd.grad(context, leaves, gradient)]

    return run


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("name", KERNELS)
def test_a_captured_kernel_follows_its_bounds(name, probability):
    """Other lengths and another step in a replay give what they give without a graph."""
    if probability and name != "triton":
        pytest.skip("torch's generator: no two runs drop the same")
    attend = policy(name, torch.bfloat16)
    case = make_case((130, 64, 6), head_size=64, device=DEVICE)
    graph, outputs = captured(both_ways(attend, case, case.site(probability), torch.bfloat16))
    for step, lengths in ((6, (70, 130, 0)), (7, (1, 63, 136))):
        case.layout.cu_seqlens.copy_(bounds_of(lengths, DEVICE))
        case.keys.step.fill_(step)
        graph.replay()
        expected = results(attend, case, probability, torch.bfloat16)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=3e-2)


def test_grouped_is_reference_and_captured_with_its_side_streams():
    check_policy(grouped, 0.0, torch.float32, 1e-4, device=DEVICE)
    case = make_case((130, 64, 6, 33, 100), device=DEVICE)
    # Before the capture its indices are copied to the device.
    expected = results(grouped, case, 0.0, torch.float32)
    graph, outputs = captured(both_ways(grouped, case, None, torch.float32))
    graph.replay()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("triton")
def test_auto_is_triton_and_nothing_is_drawn():
    state = torch.cuda.get_rng_state()
    choice = choose_attention(MODEL, torch.device(DEVICE), torch.bfloat16)
    assert choice.note == "attention: triton"
    assert torch.equal(torch.cuda.get_rng_state(), state)

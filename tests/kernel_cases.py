"""Checks of the update kernels of every device, against readable updates in float64."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.optim.flat_optimizer import Constants, FlatShard, StepScalars
from mlperf_bert.optim.optimizers import adamw_update, lamb_update, trust_ratio

RULES = ("adamw", "lamb", "muon")
DTYPES = {  # name: of masters, gradients and weights
    "fp64": (torch.float64, torch.float64, None),
    "fp32": (torch.float32, torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float32, torch.float16, torch.float16),
    "fp64 from fp32": (torch.float64, torch.float32, None),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}  # relative; a hundredth of it absolute
CONSTANTS = Constants(beta_1=0.8, beta_2=0.817, epsilon=1e-6, momentum=0.7)
RATES = (0.01, 0.03, 0.02, 0.005)
FACTOR = 0.37
NUMEL = {4: 2100, 0: 1024, 2: 1, 5: 500, 1: 2500}  # by tensor, in the buffer's order; 3 is not here
WEIGHT_DECAY = (0.1, 0.0, 0.1, 0.1, 0.0, 0.1)
ADAPTED = (True, False, True, True, True, True)
DIRECTION_SCALE = (0.0, 1.5, 0.0, 0.7, 0.5, 0.0)  # Muon's matrices are those above 0
ZERO_WEIGHTS, ZERO_UPDATE = 5, 4  # each of them makes a trust ratio of 1
CHANGING = ("masters", "weights", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """A shard in its first state, and which of its elements each tensor has."""

    shard: FlatShard
    elements: dict[int, slice]


def make_case(dtypes, device, numel=NUMEL):
    """Random weights; moments, padding and gradients are zero."""
    masters_dtype, gradients_dtype, weights_dtype = DTYPES[dtypes]
    blocks = torch.tensor([math.ceil(count / BLOCK) for count in numel.values()])
    starts = (blocks.cumsum(0) - blocks) * BLOCK
    elements = {
        tensor: slice(start, start + count)
        for (tensor, count), start in zip(numel.items(), starts.tolist(), strict=True)
    }
    masters = torch.zeros(int(blocks.sum()) * BLOCK, dtype=masters_dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor, own in elements.items():
        if tensor != ZERO_WEIGHTS:
            masters[own] = torch.randn(numel[tensor], generator=generator)
    present = torch.tensor(list(numel), dtype=torch.int32)
    shard = FlatShard(
        masters=masters.to(device),
        gradients=torch.zeros_like(masters, dtype=gradients_dtype, device=device),
        weights=None if weights_dtype is None else masters.to(device, weights_dtype),
        exp_avg=torch.zeros_like(masters, device=device),
        exp_avg_sq=torch.zeros_like(masters, device=device),
        tensor_of_block=present.repeat_interleave(blocks).to(device),
        weight_decay=torch.tensor(WEIGHT_DECAY, device=device),
        adapted=torch.tensor(ADAPTED, device=device),
        direction=torch.zeros_like(masters, device=device),
        direction_scale=torch.tensor(DIRECTION_SCALE, dtype=torch.float64, device=device),
    )
    return Case(shard, elements)


def set_gradients(case, step):
    """Set a step's gradients, random and of every size; padding stays zero."""
    generator = torch.Generator().manual_seed(100 + step)
    for tensor, own in case.elements.items():
        if tensor != ZERO_UPDATE:
            values = torch.randn(own.stop - own.start, generator=generator)
            case.shard.gradients[own] = values.to(case.shard.gradients) * 10.0 ** (tensor - 3)


def make_scalars(step, device, skip=0.0):
    def scalar(value, dtype):
        return torch.tensor(value, dtype=dtype, device=device)

    return StepScalars(
        learning_rate=scalar(RATES[step - 1], torch.float64),
        correction_1=scalar(1 - CONSTANTS.beta_1**step, torch.float64),
        correction_2=scalar(1 - CONSTANTS.beta_2**step, torch.float64),
        gradient_factor=scalar(FACTOR, torch.float32),
        skip=scalar(skip, torch.float32),
    )


def update(kernels, rule, shard, scalars):
    """One whole update by the kernels; Muon's directions are not orthogonalised."""
    if rule == "adamw":
        kernels.adamw(shard, CONSTANTS, scalars)
        return
    if rule == "muon":
        kernels.muon_momentum(shard, CONSTANTS, scalars)
        kernels.muon_apply(shard, CONSTANTS, scalars)
        return
    ratios = ratios_of(shard, kernels.lamb_norms(shard, CONSTANTS, scalars))
    kernels.lamb_apply(shard, CONSTANTS, scalars, ratios)


def ratios_of(shard, squares):
    """The factor of each tensor's update."""
    norms = squares.sqrt()
    return torch.where(shard.adapted, trust_ratio(norms[:, 0], norms[:, 1]), 1.0)


class Reference:
    """Each tensor for itself, in float64."""

    def __init__(self, case, rule):
        self.rule = rule
        self.state = {
            tensor: [getattr(case.shard, name)[own].double().cpu() for name in STATE]
            for tensor, own in case.elements.items()
        }

    def update(self, case, step):
        factor = float(torch.tensor(FACTOR))
        decays = case.shard.weight_decay.tolist()
        for tensor, (masters, exp_avg, exp_avg_sq) in self.state.items():
            gradient = case.shard.gradients[case.elements[tensor]].double().cpu() * factor
            scale = DIRECTION_SCALE[tensor] if self.rule == "muon" else 0.0
            if scale:
                exp_avg.lerp_(gradient, 1 - CONSTANTS.momentum)
                direction = gradient.lerp(exp_avg, CONSTANTS.momentum)
                masters.mul_(1 - RATES[step - 1] * decays[tensor])
                masters.sub_(RATES[step - 1] * scale * direction)
                continue
            of_lamb = {"layer_adaptation": ADAPTED[tensor]} if self.rule == "lamb" else {}
            (lamb_update if of_lamb else adamw_update)(
                *(masters, gradient, exp_avg, exp_avg_sq, step),
                lr=RATES[step - 1],
                **{name: getattr(CONSTANTS, name) for name in ("beta_1", "beta_2", "epsilon")},
                weight_decay=decays[tensor],
                **of_lamb,
            )


STATE = ("masters", "exp_avg", "exp_avg_sq")


def check_updates(kernels, rule, dtypes, device):
    """Several steps, with tensors whose trust ratio is 1, and one that is elsewhere."""
    case = make_case(dtypes, device)
    shard = case.shard
    reference = Reference(case, rule)
    tolerance = TOLERANCES[shard.masters.dtype]
    is_padding = torch.ones(len(shard.masters), dtype=torch.bool)
    for own in case.elements.values():
        is_padding[own] = False
    for step in range(1, len(RATES) + 1):
        set_gradients(case, step)
        reference.update(case, step)
        update(kernels, rule, shard, make_scalars(step, device))
        for tensor, expected in reference.state.items():
            for name, values in zip(STATE, expected, strict=True):
                found = getattr(shard, name)[case.elements[tensor]].double().cpu()
                scale = float(values.abs().max())
                torch.testing.assert_close(
                    found, values, rtol=tolerance, atol=tolerance * scale, msg=f"{tensor} {name}"
                )
        for name in STATE:
            assert not getattr(shard, name).cpu()[is_padding].any()
        if shard.weights is not None:
            unit = torch.finfo(shard.weights.dtype).eps
            torch.testing.assert_close(
                shard.weights.to(shard.masters), shard.masters, rtol=unit, atol=0.0
            )


def check_rounding(kernels, rule, dtypes, device):
    """16-bit weights are the nearest to their masters."""
    case = make_case(dtypes, device)
    set_gradients(case, 1)
    update(kernels, rule, case.shard, make_scalars(1, device))
    if case.shard.weights is not None:
        assert torch.equal(case.shard.weights, case.shard.masters.to(case.shard.weights.dtype))


def check_skip(kernels, rule, dtypes, device):
    """Gradients that are not finite change nothing under `skip`, and the next step is as ever."""
    case, untouched = make_case(dtypes, device), make_case(dtypes, device)
    for each in (case, untouched):
        set_gradients(each, 1)
        update(kernels, rule, each.shard, make_scalars(1, device))
    case.shard.gradients[0], case.shard.gradients[1] = math.nan, math.inf
    skipped = make_scalars(2, device, skip=1.0)
    if rule == "lamb":
        assert not kernels.lamb_norms(case.shard, CONSTANTS, skipped).any()
        kernels.lamb_apply(case.shard, CONSTANTS, skipped, torch.ones(len(ADAPTED), device=device))
    else:
        update(kernels, rule, case.shard, skipped)
    assert_equal(case.shard, untouched.shard)
    case.shard.gradients.zero_()
    for each in (case, untouched):
        set_gradients(each, 2)
        update(kernels, rule, each.shard, make_scalars(2, device))
    assert_equal(case.shard, untouched.shard)


def check_parts(kernels, rule, dtypes, device):
    """A shard updated in parts, cut inside tensors, is the shard updated at once."""
    whole, cut = make_case(dtypes, device), make_case(dtypes, device)
    edges = [BLOCK * number for number in (0, 1, 4, 7, len(cut.shard.tensor_of_block))]
    parts = [cut.shard.part(*both) for both in pairwise(edges)]
    scalars = make_scalars(1, device)
    for case in (whole, cut):
        set_gradients(case, 1)
    if rule != "lamb":
        for shard in (whole.shard, *parts):
            update(kernels, rule, shard, scalars)
    else:
        squares = kernels.lamb_norms(whole.shard, CONSTANTS, scalars)
        of_parts = [kernels.lamb_norms(part, CONSTANTS, scalars) for part in parts]
        assert squares.dtype == of_parts[0].dtype == torch.float64
        torch.testing.assert_close(sum(of_parts), squares, rtol=1e-12, atol=0.0)
        ratios = ratios_of(whole.shard, squares)
        kernels.lamb_apply(whole.shard, CONSTANTS, scalars, ratios)
        for part in parts:
            kernels.lamb_apply(part, CONSTANTS, scalars, ratios)
    assert_equal(whole.shard, cut.shard)


def assert_equal(one, other):
    """Bit for bit in all that an update writes."""
    for name in CHANGING:
        values = getattr(one, name)
        assert values is None or torch.equal(values, getattr(other, name)), name


CHECKS = (check_updates, check_rounding, check_skip, check_parts)

"""Checks of fused blocks on every device: results and gradients of the reference blocks.

Shape letters: R rows, D hidden, V classes.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dropout_cases import site_of
from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.blocks import Blocks

NUM_WORDS, NUM_POSITIONS = 11, 40
EPSILON = 1e-12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest element of each result; 16-bit references round after every operator.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
BLOCKS = (
    "residual_output",
    "intermediate",
    "embed",
    "project_qkv",
    "project_qkv_of_rows",
    "masked_lm_loss",
    "sum_norm",
    "gated",
    "embed_words",
    "project_qkv_without_bias",
    "columns",
)
# Of blocks of one product: its width for a hidden size, and whether it has a bias.
WIDTHS = {
    "intermediate": (lambda hidden: hidden + 5, True),
    "gated": (lambda hidden: 2 * hidden + 10, False),
    "columns": (lambda hidden: 3 * hidden, False),
}


@dataclass(frozen=True)
class Source:
    """Random inputs of a case."""

    rows: int
    hidden: int
    dtype: torch.dtype
    device: str
    generator: torch.Generator

    def normal(self, *shape):
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)

    def ids(self, bound):
        return torch.randint(bound, (self.rows,), generator=self.generator).to(self.device)


def make_case(block, rows, hidden, dtype, device, *, dropout):
    """Modules, inputs with gradients, and how to run a set of blocks on them."""
    generator = torch.Generator().manual_seed(rows + 100 * hidden)
    source = Source(rows, hidden, dtype, device, generator)
    site = site_of(rows, device=device) if dropout else None
    if block in ("residual_output", "sum_norm"):
        modules, inputs, run = _normed_sum(source, site, is_modern=block == "sum_norm")
    elif block in ("embed", "embed_words"):
        modules, inputs, run = _embed(source, site, is_modern=block == "embed_words")
    elif block == "masked_lm_loss":
        modules, inputs, run = _masked_lm_loss(source)
    elif block in WIDTHS:
        modules, inputs, run = _of_one_product(source, block)
    else:
        every, bias = 2 if block.endswith("rows") else 1, not block.endswith("without_bias")
        modules, inputs, run = _project_qkv(source, every=every, bias=bias)
    made = nn.ModuleDict(modules).to(device, dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(source.normal(*parameter.shape) / 2)
    return made, tuple(each.requires_grad_() for each in inputs), run


def _normed_sum(source, site, *, is_modern):
    rows, hidden, width = source.rows, source.hidden, source.hidden + 5

    def run(blocks, m, x, residual):
        given = (x, residual, m["dense"], m["norm"], site)
        return blocks.sum_norm(*given) if is_modern else (blocks.residual_output(*given),)

    dense = nn.Linear(width, hidden, bias=not is_modern)
    norm = nn.LayerNorm(hidden, EPSILON, bias=not is_modern)
    inputs = (source.normal(rows, width), source.normal(rows, hidden))
    return {"dense": dense, "norm": norm}, inputs, run


def _of_one_product(source, block):
    def run(blocks, m, hidden):
        if block == "columns":
            return blocks.columns(*blocks.multiply(hidden, (m["dense"],)), 3)
        return (getattr(blocks, block)(hidden, m["dense"]),)

    width, has_bias = WIDTHS[block]
    modules = {"dense": nn.Linear(source.hidden, width(source.hidden), has_bias)}
    return modules, (source.normal(source.rows, source.hidden),), run


def _embed(source, site, *, is_modern):
    sizes = {"words": NUM_WORDS, "types": 2, "positions": NUM_POSITIONS}
    words, types, positions = (source.ids(size) for size in sizes.values())

    def run(blocks, m):
        if is_modern:
            return (blocks.embed_words(words, m["words"], m["norm"], site),)
        tables = (m["words"], m["types"], m["positions"])
        return (blocks.embed((words, types, positions), tables, m["norm"], site),)

    names = ["words"] if is_modern else list(sizes)
    tables = {name: nn.Embedding(sizes[name], source.hidden) for name in names}
    return {**tables, "norm": nn.LayerNorm(source.hidden, EPSILON, bias=not is_modern)}, (), run


def _project_qkv(source, *, every, bias):
    def run(blocks, m, hidden):
        wanted = hidden if every == 1 else hidden[::every]
        return blocks.project_qkv(hidden, wanted, m["query"], m["key"], m["value"])

    hidden = source.hidden
    modules = {name: nn.Linear(hidden, hidden, bias) for name in ("query", "key", "value")}
    return modules, (source.normal(source.rows, hidden),), run


def _masked_lm_loss(source):
    classes = 10 * source.hidden
    labels = source.ids(classes)
    labels[1::3] = IGNORED

    def run(blocks, m, hidden):
        return (blocks.masked_lm_loss(hidden, m["decoder"].weight, m["decoder"].bias, labels),)

    modules = {"decoder": nn.Linear(source.hidden, classes)}
    return modules, (source.normal(source.rows, source.hidden),), run


def results(run, blocks, modules, inputs):
    """Outputs, then gradients of inputs and parameters for a fixed random gradient of outputs."""
    outputs = run(blocks, modules, *inputs)
    generator = torch.Generator().manual_seed(1)
    given = [
        torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each)
        for each in outputs
    ]
    gradients = torch.autograd.grad(outputs, (*inputs, *modules.parameters()), given)
    return [*(each.detach() for each in outputs), *gradients]


def assert_near(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        scale = float(theirs.detach().double().abs().max()) or 1.0
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=0.0, atol=tolerance * max(scale, 1e-3)
        )


def check_block(fused, block, rows, hidden, dtype, device):
    """With dropout and without; twice, as the sums must have one order."""
    for dropout in (False, True):
        modules, inputs, run = make_case(block, rows, hidden, dtype, device, dropout=dropout)
        expected = results(run, Blocks(), modules, inputs)
        found = results(run, fused, modules, inputs)
        assert_near(found, expected, TOLERANCES[dtype])
        again = results(run, fused, modules, inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))

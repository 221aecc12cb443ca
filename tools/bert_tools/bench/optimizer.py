"""`bench optimizer`: our update of a whole model against a loop over its tensors and torch's."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bert_tools.bench.peer import usual_adamw
from bert_tools.bench.timing import Contender, InterleavedTimes
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import MUON_MOMENTUM, is_exempt
from mlperf_bert.optim.muon import Muon, muon_update
from mlperf_bert.optim.muon_plan import is_hidden_matrix, num_matrices
from mlperf_bert.optim.optimizers import adamw_update, lamb_update, make_optimizer_alone
from mlperf_bert.seeds import derive_seed

RULES = (
    OptimSection(name="lamb", learning_rate=1e-3),
    OptimSection(name="adamw", learning_rate=1e-3),
    OptimSection(name="muon", learning_rate=1e-3),
)
REFERENCE = "per-tensor loop"
GRADIENT_SIZE = 1e-3  # standard deviation
LARGEST_DIFFERENCE = 2e-6  # of a weight, after all steps; one step moves it by about the rate
# Where one orthogonalises in bfloat16: of the way that the steps together can go, the share that
# 16 roundings of 2^-8 make up.
_BF16_SHARE = 16 / 256


@dataclass(frozen=True, slots=True)
class Updater:
    """A contender and the weights that it updates, in the model's order."""

    run: Contender
    weights: list[Tensor]
    products: torch.dtype = torch.float32  # of Newton-Schulz


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """The JSON object of `bench optimizer`, from at most `steps` updates by each.

    After `seconds` no further update of a rule begins. Raises ConfigError if a contender's weights
    differ from the reference's.
    """
    seed, rows = int(config.run.seed), []
    for rule in RULES:
        # In fp32 at any precision of the config: no contender's weights are rounded.
        model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
        rows += _compared(rule, model, seed, steps, seconds, report)
    parameters = list(model.parameters())
    return {
        "schema_version": 1,
        "rows": rows,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "layers": config.model.num_layers,
        "hidden": config.model.hidden_size,
        "vocabulary": config.model.vocab_size,
        "largest_difference_allowed": LARGEST_DIFFERENCE,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "seed": config.run.seed,
        "torch": torch.__version__,
    }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['vocabulary']} words: "
        f"{result['parameters']:,} parameters in {result['tensors']} tensors, fp32 on "
        f"{result['device']}, {result['threads']} threads",
        f"one update, median of {result['rows'][0]['steps']}; ratio: updates while the loop over "
        "tensors does one; difference: of any",
        "weight from the loop's at the end, at most "
        f"{result['largest_difference_allowed']:g}; single ones: lowest, median, highest ratio",
        f"{'rule':6} {'updater':32} {'ms':>8} {'ratio':>6}  {'single ones':18} {'difference':>10}",
    ]
    for row in result["rows"]:
        singles = ", ".join(f"{ratio:.2f}" for ratio in row["ratio_range"])
        lines.append(
            f"{row['rule']:6} {row['updater']:32} {row['ms']:8.1f} {row['ratio']:6.2f} "
            f" {singles:18} {row['largest_difference']:10.1e}"
        )
    return "\n".join(lines)


def make_updaters(
    model: BertForPretraining, rule: OptimSection, seed: int
) -> tuple[dict[str, Updater], Contender]:
    """Contenders by name, each with its own weights and state; and a drawer of gradients."""
    named = dict(model.named_parameters())
    gradients = {name: torch.empty_like(each) for name, each in named.items()}
    device = next(iter(gradients.values())).device
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "gradients"))

    def new_gradients(number: int) -> Tensor:
        for gradient in gradients.values():
            gradient.normal_(std=GRADIENT_SIZE, generator=generator)
        return gradient.view(-1)[0]

    ours = _ours(rule, model, gradients)
    updaters = {REFERENCE: _loop(rule, named, gradients, ours.products)}
    if rule.name == "adamw":
        ways: tuple[Literal["foreach", "fused"], ...] = ("foreach", "fused")
        for how in ways:
            updaters[f"torch.optim.AdamW({how}=True)"] = _torch_adamw(rule, model, gradients, how)
    if rule.name == "muon":
        updaters["torch.optim.Muon, AdamW(fused=True)"] = _torch_muon(rule, model, gradients)
    updaters["flat buffers"] = ours
    return updaters, new_gradients


def check_same_weights(
    rule: OptimSection, updaters: dict[str, Updater], steps: int
) -> dict[str, float]:
    """Largest difference of each contender's weights from the reference's, after `steps` updates.

    Raises ConfigError above LARGEST_DIFFERENCE, or what products in bfloat16 allow: times of
    different updates mean nothing.
    """
    reference = updaters[REFERENCE].weights
    differences = {}
    for name, updater in updaters.items():
        pairs = zip(updater.weights, reference, strict=True)
        # torch's maximum of a NaN is NaN.
        difference = float(torch.stack([(one - other).abs().max() for one, other in pairs]).max())
        is_rounded = updater.products == torch.bfloat16
        rounding = _BF16_SHARE * steps * rule.learning_rate if is_rounded else 0.0
        if not difference <= LARGEST_DIFFERENCE + rounding:
            raise ConfigError(
                "bench optimizer",
                f"{rule.name}, {name}: weights differ by {difference:.1e} from the reference's",
                "nothing is compared; use a version of torch that the tests pass with",
            )
        differences[name] = difference
    return differences


def _compared(
    rule: OptimSection,
    model: BertForPretraining,
    seed: int,
    steps: int,
    seconds: float,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each updater."""
    updaters, new_gradients = make_updaters(model, rule, seed)
    contenders = {
        "new gradients": new_gradients,
        **{name: updater.run for name, updater in updaters.items()},
    }
    times = InterleavedTimes(contenders, num_batches=1)
    times.run_once()
    times.measure(
        num_steps=steps,
        seconds=seconds,
        report=lambda line: report(f"{rule.name}, {line}"),
    )
    differences = check_same_weights(rule, updaters, times.num_steps + 1)
    return [
        {
            "rule": rule.name,
            "updater": name,
            "ms": 1e3 * times.seconds_per_batch(name),
            "ratio": times.seconds_per_batch(REFERENCE) / times.seconds_per_batch(name),
            "ratio_range": times.range_of_ratios(REFERENCE, name),
            "largest_difference": differences[name],
            "steps": times.num_steps,
        }
        for name in updaters
    ]


def _loop(
    rule: OptimSection,
    named: dict[str, nn.Parameter],
    gradients: dict[str, Tensor],
    products: torch.dtype,
) -> Updater:
    """The readable update, tensor by tensor."""
    weights = [each.detach().clone() for each in named.values()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
    updates = [_readable_update(rule, name, each, products) for name, each in named.items()]
    numbers = count(1)

    @torch.no_grad()
    def run(number: int) -> Tensor:
        step = next(numbers)
        for update, weight, gradient, (exp_avg, exp_avg_sq) in zip(
            updates, weights, gradients.values(), moments, strict=True
        ):
            update(weight, gradient, exp_avg, exp_avg_sq, step)
        return weights[0].view(-1)[0]

    return Updater(run, weights, products)


def _readable_update(
    rule: OptimSection, name: str, weight: Tensor, products: torch.dtype
) -> Callable[..., None]:
    """The readable update of the tensor of this name."""
    if rule.name == "muon" and is_hidden_matrix(name, tuple(weight.shape)):
        return partial(_readable_muon, rule, products, num_matrices(name))
    update = partial(
        lamb_update if rule.name == "lamb" else adamw_update,
        lr=rule.learning_rate,
        beta_1=rule.beta_1,
        beta_2=rule.beta_2,
        epsilon=rule.epsilon,
        weight_decay=0.0 if is_exempt(name) else rule.weight_decay,
    )
    return partial(update, layer_adaptation=not is_exempt(name)) if rule.name == "lamb" else update


def _readable_muon(
    rule: OptimSection,
    products: torch.dtype,
    matrices: int,
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *_: object,
) -> None:
    update = partial(
        muon_update,
        lr=rule.learning_rate,
        momentum=MUON_MOMENTUM,
        weight_decay=rule.weight_decay,
        products=products,
    )
    for own in zip(*(x.chunk(matrices) for x in (weight, gradient, exp_avg)), strict=True):
        update(*own)


def _torch_muon(rule: OptimSection, model: nn.Module, gradients: dict[str, Tensor]) -> Updater:
    """torch's Muon, in bfloat16, of the matrices, and its fused AdamW of all else."""
    twin = copy.deepcopy(model)
    matrices = []
    for name, parameter in twin.named_parameters():
        parameter.grad = gradients[name]
        if not is_hidden_matrix(name, tuple(parameter.shape)):
            continue
        parameter.requires_grad_(False)  # not AdamW's
        count = num_matrices(name)
        for own, gradient in zip(parameter.chunk(count), gradients[name].chunk(count), strict=True):
            matrices.append(nn.Parameter(own.detach()))
            matrices[-1].grad = gradient
    weights = [parameter.detach() for parameter in twin.parameters()]
    muon = torch.optim.Muon(
        matrices,
        lr=rule.learning_rate,
        weight_decay=rule.weight_decay,
        momentum=MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = usual_adamw(twin, rule, "fused")

    def run(number: int) -> Tensor:
        muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
        return weights[0].view(-1)[0]

    return Updater(run, weights, torch.bfloat16)


def _torch_adamw(
    rule: OptimSection,
    model: nn.Module,
    gradients: dict[str, Tensor],
    how: Literal["foreach", "fused"],
) -> Updater:
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        parameter.grad = gradients[name]
    optimizer = usual_adamw(twin, rule, how)
    weights = [parameter.detach() for parameter in twin.parameters()]

    def run(number: int) -> Tensor:
        optimizer.step()
        return weights[0].view(-1)[0]

    return Updater(run, weights)


def _ours(rule: OptimSection, model: nn.Module, gradients: dict[str, Tensor]) -> Updater:
    """Our update; a backward may leave gradients anywhere, so moving them is part of it."""
    optimizer = make_optimizer_alone(rule, model)
    named = dict(model.named_parameters())
    weights = [each.detach() for each in named.values()]
    rate = torch.tensor(rule.learning_rate, dtype=torch.float64, device=weights[0].device)
    one, zero = (torch.full((), value, device=rate.device) for value in (1.0, 0.0))

    def run(number: int) -> Tensor:
        optimizer.zero_grad()
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        optimizer.step(rate, one, zero)
        return weights[0].view(-1)[0]

    products = optimizer.products if isinstance(optimizer, Muon) else torch.float32
    return Updater(run, weights, products)

"""The measurement of `bench optimizer`, which times implementations of the optimizer's update.

It compares our flat buffers, a loop over tensors (the reference), and torch's fused AdamW.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from bert_tools.bench.baseline import fused_adamw
from bert_tools.bench.timing import Contender, InterleavedTimes
from bert_tools.bench.train import surroundings
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import is_exempt
from mlperf_bert.optim.optimizers import adamw_update, lamb_update, make_optimizer_alone
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.seeds import derive_seed

RULES = (
    OptimSection(name="lamb", learning_rate=1e-3),
    OptimSection(name="adamw", learning_rate=1e-3),
)
REFERENCE = "per-tensor loop"
GRADIENT_SIZE = 1e-3  # standard deviation
# The limit for any weight after all steps. One step changes a weight by about the learning rate
# of 1e-3.
LARGEST_DIFFERENCE = 2e-6


@dataclass(frozen=True, slots=True)
class Updater:
    """An implementation of the optimizer's update, and its weights in the model's order."""

    run: Contender
    weights: list[Tensor]


def measure(
    config: RunConfig,
    device: torch.device,
    progress: ProgressLines,
    *,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure each implementation of the update, and return the JSON object of `bench optimizer`.

    For each optimizer, every implementation runs at most `steps` updates, and no update starts
    after `seconds` seconds. Raises ConfigError if the resulting weights differ too much.
    """
    seed, rows = int(config.run.seed), []
    for number, rule in enumerate(RULES, 1):
        progress.line(f"building the model for {rule.name}, rule {number} of {len(RULES)}")
        # The weights are fp32 in every precision of the config, so no contender rounds them.
        model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
        updaters, new_gradients = make_updaters(model, rule, seed)
        contenders = {
            "new gradients": new_gradients,
            **{name: updater.run for name, updater in updaters.items()},
        }
        times = InterleavedTimes(contenders, num_batches=1)
        times.run_once(progress)
        times.measure(num_steps=steps, seconds=seconds, progress=progress)
        differences = check_same_weights(rule, updaters)
        rows += [
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
    parameters = list(model.parameters())
    return {
        "schema_version": 2,
        "rows": rows,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "largest_difference_allowed": LARGEST_DIFFERENCE,
        **surroundings(config, device),
    }


def make_updaters(
    model: BertForPretraining, rule: OptimSection, seed: int
) -> tuple[dict[str, Updater], Contender]:
    """Return the implementations by name, and a function that draws new gradients for all of them.

    Each implementation has its own weights and optimizer state.
    """
    named = dict(model.named_parameters())
    gradients = {name: torch.empty_like(each) for name, each in named.items()}
    device = next(iter(gradients.values())).device
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "gradients"))

    def new_gradients(number: int) -> Tensor:
        for gradient in gradients.values():
            gradient.normal_(std=GRADIENT_SIZE, generator=generator)
        return gradient.view(-1)[0]

    updaters = {REFERENCE: _loop(rule, named, gradients)}
    if rule.name == "adamw":
        updaters["torch.optim.AdamW(fused=True)"] = _torch_adamw(rule, model, gradients)
    updaters["flat buffers"] = _ours(rule, model, gradients)
    return updaters, new_gradients


def check_same_weights(rule: OptimSection, updaters: dict[str, Updater]) -> dict[str, float]:
    """Return the largest absolute difference of each implementation's weights from the reference.

    Raises ConfigError if a difference exceeds LARGEST_DIFFERENCE, because the times of updates that
    compute different results cannot be compared.
    """
    reference = updaters[REFERENCE].weights
    differences = {}
    for name, updater in updaters.items():
        pairs = zip(updater.weights, reference, strict=True)
        # A NaN is noticed, because torch's maximum of values with a NaN is NaN.
        difference = float(torch.stack([(one - other).abs().max() for one, other in pairs]).max())
        if not difference <= LARGEST_DIFFERENCE:
            raise ConfigError(
                "bench optimizer",
                f"with {rule.name}, the weights of {name} differ by {difference:.1e} from the "
                "reference, so the times cannot be compared",
                "install a torch version that pyproject.toml allows",
            )
        differences[name] = difference
    return differences


def _loop(
    rule: OptimSection, named: dict[str, nn.Parameter], gradients: dict[str, Tensor]
) -> Updater:
    """Return the reference implementation, which updates one tensor after the other in a loop."""
    weights = [each.detach().clone() for each in named.values()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
    updates = [_plain_update(rule, name) for name in named]
    numbers = count(1)

    @torch.no_grad()
    def run(number: int) -> Tensor:
        step = next(numbers)
        for update, weight, gradient, (exp_avg, exp_avg_sq) in zip(
            updates, weights, gradients.values(), moments, strict=True
        ):
            update(weight, gradient, exp_avg, exp_avg_sq, step)
        return weights[0].view(-1)[0]

    return Updater(run, weights)


def _plain_update(rule: OptimSection, name: str) -> Callable[..., None]:
    """Return the function with which the reference updates the tensor `name`."""
    update = partial(
        lamb_update if rule.name == "lamb" else adamw_update,
        lr=rule.learning_rate,
        beta_1=rule.beta_1,
        beta_2=rule.beta_2,
        epsilon=rule.epsilon,
        weight_decay=0.0 if is_exempt(name) else rule.weight_decay,
    )
    return partial(update, layer_adaptation=not is_exempt(name)) if rule.name == "lamb" else update


def _torch_adamw(rule: OptimSection, model: nn.Module, gradients: dict[str, Tensor]) -> Updater:
    """Return the implementation that updates a copy of the model with torch's fused AdamW."""
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        parameter.grad = gradients[name]
    optimizer = fused_adamw(twin, rule)
    weights = [parameter.detach() for parameter in twin.parameters()]

    def run(number: int) -> Tensor:
        optimizer.step()
        return weights[0].view(-1)[0]

    return Updater(run, weights)


def _ours(rule: OptimSection, model: nn.Module, gradients: dict[str, Tensor]) -> Updater:
    """Return the implementation that updates flat buffers, as our training step does.

    The measured time includes copying the gradients into the buffers, because a backward pass may
    write gradients to other memory.
    """
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

    return Updater(run, weights)

"""LAMB: the readable update of one tensor, and an optimizer that does all tensors together.

Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm 2,
in MLPerf's form: bias-corrected moments, weight decay added to the update, epsilon outside the
square root, no layer adaptation of biases and LayerNorm. Gradient clipping is done elsewhere.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def lamb_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    layer_adaptation: bool,
) -> None:
    """One step of one tensor, in place on `param`, `exp_avg` and `exp_avg_sq`. The reference.

    Args:
        param, grad, exp_avg, exp_avg_sq: same shape and float dtype.
        step: this update's number, from 1.
        layer_adaptation: scale by ||param|| / ||update|| (1 where either norm is zero); if false
            the scale is 1.
    """
    exp_avg.mul_(beta_1).add_(grad, alpha=1 - beta_1)
    exp_avg_sq.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
    mean = exp_avg / (1 - beta_1**step)
    variance = exp_avg_sq / (1 - beta_2**step)
    update = mean / (variance.sqrt() + epsilon) + weight_decay * param
    if layer_adaptation:
        update.mul_(trust_ratio(param.norm(), update.norm()))
    param.sub_(lr * update)


def trust_ratio(param_norm: Tensor, update_norm: Tensor) -> Tensor:
    """||param|| / ||update||, or 1 where either is zero. Any shape, element by element."""
    usable = (param_norm > 0) & (update_norm > 0)
    return torch.where(usable, param_norm / update_norm, torch.ones_like(param_norm))


class LAMB(torch.optim.Optimizer):
    """`lamb_update` over all parameters with few kernels; no host waits for the device.

    A group may hold `layer_adaptation` (default true). The state of a parameter is `step` (0-d
    float32), `exp_avg` and `exp_avg_sq`. Set `param_groups[i]["lr"]` to follow a schedule, and
    `found_inf` (0-d, 0 or 1, on the device) as in torch's fused optimizers: where it is 1, `step`
    changes nothing but the gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (beta_1, beta_2),
            "eps": epsilon,
            "weight_decay": weight_decay,
            "layer_adaptation": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A closure is not supported."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update_group(group, params)

    def _update_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        states = [self._state_of(param) for param in params]
        exp_avgs = [state["exp_avg"] for state in states]
        exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        beta_1, beta_2 = group["betas"]
        skip = self._skip_on(params[0].device)
        for grad in grads:
            grad.masked_fill_(skip, 0.0)  # NaN times zero would be NaN
        keep = (~skip).double()
        weight = (1 - beta_1) * keep.to(params[0].dtype)
        torch._foreach_lerp_(exp_avgs, grads, [weight] * len(grads))  # alone, it would be read
        torch._foreach_mul_(exp_avg_sqs, torch.where(skip, 1.0, beta_2 * keep))
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta_2)

        counters = [state["step"] for state in states]
        torch._foreach_add_(counters, keep.float())
        # In float64: 1 - beta_2 loses digits in fp32. At least 1, where the first step is skipped.
        steps = torch.stack(counters).double().clamp(min=1)
        roots = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(roots, list((1 - beta_2**steps).sqrt().unbind()))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(exp_avgs, list((1 - beta_1**steps).unbind()))
        torch._foreach_div_(updates, roots)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["layer_adaptation"]:
            ratios = trust_ratio(
                torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(updates))
            )
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_mul_(updates, keep)
        torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _skip_on(self, device: torch.device) -> Tensor:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return torch.zeros((), dtype=torch.bool, device=device)
        return found_inf.to(device) > 0

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

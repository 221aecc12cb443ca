"""A model's weights and gradients in two flat buffers: its parameters become views of them."""

import torch
from torch import Tensor, nn

from mlperf_bert.optim.flat_layout import FlatLayout


class FlatBuffers:
    """Weights and gradients of a model, both [layout.numel] and of the dtype of `weights`.

    Parameters are views of `weights`. A backward leaves its gradients where autograd made them,
    which costs nothing; `take` or `collect` then moves them into `gradients`, once an update where
    there is one backward: less traffic than zeroing the buffer and adding to it.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, weights: Tensor) -> None:
        self.layout = layout
        self.parameters = _trained(model, layout)
        self.weights = weights
        self.gradients = torch.zeros_like(weights)
        self.gradient_views = views(self.gradients, layout)
        for parameter, view in zip(self.parameters, views(weights, layout), strict=True):
            parameter.data = view
        # They stay zero, but where a bucket was multiplied by NaN because its norm was not finite.
        self._gaps = [self.gradients[gap] for gap in layout.gaps]
        self.begin_update()

    def begin_update(self) -> None:
        """Forget all gradients."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        for parameter in self.parameters:
            parameter.grad = None
        self._awaited = set(range(len(self.parameters)))

    def take(self, number: int) -> None:
        """Move the gradient of one parameter into `gradients`, or add it if there is one already.

        `number`: its place in `layout.tensors`.
        """
        parameter, own = self.parameters[number], self.gradient_views[number]
        if parameter.grad is None:
            return
        if number in self._awaited:
            self._awaited.remove(number)
            own.copy_(parameter.grad)
        else:
            own.add_(parameter.grad)
        parameter.grad = None

    def collect(self) -> None:
        """Copy those gradients of the update that were not taken; zeros where there is none."""
        found = [number for number in self._awaited if self.parameters[number].grad is not None]
        for number in self._awaited.difference(found):
            self.gradient_views[number].zero_()
        if found:
            gradients = [self.parameters[number].grad for number in found]
            torch._foreach_copy_(
                [self.gradient_views[number] for number in found],
                [gradient for gradient in gradients if gradient is not None],
            )
        self._awaited.clear()


def flat_weights(model: nn.Module, layout: FlatLayout) -> Tensor:
    """A copy of all weights as one buffer [layout.numel], zero between them."""
    parameters = _trained(model, layout)
    first = parameters[0]
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for view, parameter in zip(views(flat, layout), parameters, strict=True):
        view.copy_(parameter.detach())
    return flat


def views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """The tensors of a whole flat buffer, in the layout's order and their own shapes."""
    return [flat[each.start : each.stop].view(each.shape) for each in layout.tensors]


def _trained(model: nn.Module, layout: FlatLayout) -> list[nn.Parameter]:
    named = dict(model.named_parameters())
    return [named[tensor.name] for tensor in layout.tensors]

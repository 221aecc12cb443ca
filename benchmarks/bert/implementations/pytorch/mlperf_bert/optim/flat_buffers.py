"""A model's weights and gradients in two flat buffers: its parameters become views of them."""

import torch
from torch import Tensor, nn

from mlperf_bert.optim.flat_layout import FlatBucket, FlatLayout


class FlatBuffers:
    """Weights and gradients of a model, both [layout.numel] and of the dtype of `weights`.

    `parameter.data` and `parameter.grad` become views, so a backward adds to `gradients`. Where
    something keeps a gradient elsewhere (DistributedDataParallel has buckets of its own), `collect`
    fetches it.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, weights: Tensor) -> None:
        self.layout = layout
        self.parameters = _trained(model, layout)
        self.weights = weights
        self.gradients = torch.zeros_like(weights)
        self._own_gradients = views(self.gradients, layout)
        for parameter, view in zip(self.parameters, views(weights, layout), strict=True):
            parameter.data = view
        for parameter, own in zip(self.parameters, self._own_gradients, strict=True):
            parameter.grad = own

    def parameters_of(self, bucket: FlatBucket) -> list[nn.Parameter]:
        """The parameters of one bucket, in its order."""
        first = self.layout.tensors.index(bucket.tensors[0])
        return self.parameters[first : first + len(bucket.tensors)]

    def zero_gradients(self) -> None:
        """Begin an update."""
        self.gradients.zero_()
        for parameter, own in zip(self.parameters, self._own_gradients, strict=True):
            if not _is(parameter.grad, own):
                parameter.grad = None  # DistributedDataParallel's: its next backward writes all

    def collect(self) -> None:
        """Copy into `gradients` those that are kept elsewhere."""
        elsewhere = [
            (own, parameter.grad)
            for parameter, own in zip(self.parameters, self._own_gradients, strict=True)
            if parameter.grad is not None and not _is(parameter.grad, own)
        ]
        if elsewhere:
            torch._foreach_copy_([own for own, _ in elsewhere], [there for _, there in elsewhere])


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


def _is(gradient: Tensor | None, own: Tensor) -> bool:
    return gradient is not None and gradient.data_ptr() == own.data_ptr()

"""The Muon optimizer, which orthogonalizes the momentum of hidden matrices.

All other parameters are updated by AdamW.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, StepScalars
from mlperf_bert.optim.muon_plan import (
    NEWTON_SCHULZ_STEPS,
    Stack,
    plan_route,
    split_matrices,
    update_scale,
)

# Coefficients of the polynomial a x + b x^3 + c x^5 that each step applies to the singular values
# (Jordan, "Muon", 2024). Five steps map values between 0.003 and 1 to values between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
LEAST_NORM = 1e-7  # avoids a division by zero
# Elements per batched product on a CPU. Larger results would get new memory pages each time, whose
# first access is slow.
CPU_ELEMENTS = 2**20


def muon_update(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    products: torch.dtype = torch.bfloat16,
) -> None:
    """Update one matrix in place by one step of Muon.

    This function is the readable definition of the update, which the kernels compute faster.

    The function orthogonalizes the Nesterov momentum and scales it to the root mean square of
    AdamW's updates. Weight decay is decoupled. `momentum_buffer` is also updated in place.

    Sources: Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024). The scale and
    the weight decay are from Liu et al., arXiv 2502.16982.

    Args:
        param, grad, momentum_buffer: [rows, columns] of one float dtype.
        lr: learning rate.
        momentum: decay rate of the momentum.
        weight_decay: decoupled weight decay.
        products: dtype in which the momentum is orthogonalized.
    """
    momentum_buffer.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(momentum_buffer, momentum).to(products))
    param.mul_(1 - lr * weight_decay)
    param.add_(update, alpha=-lr * (0.2 * math.sqrt(max(param.shape))))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate U V^T for a matrix with the singular value decomposition U S V^T.

    The function uses Newton-Schulz iterations in the dtype of the matrix, [rows, columns].
    """
    if matrix.size(0) > matrix.size(1):
        return orthogonalize(matrix.T).T
    a, b, c = COEFFICIENTS
    x: Tensor = matrix / matrix.norm().clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_stack(matrices: Tensor) -> Tensor:
    """Run `orthogonalize` on all matrices of a tensor [count, rows, columns] at once."""
    if matrices.size(1) > matrices.size(2):
        return orthogonalize_stack(matrices.mT).mT
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x: Tensor = matrices / norms.clamp(min=LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(FlatOptimizer):
    """The Muon optimizer, which runs `muon_update` on matrices and `adamw_update` on the rest.

    The matrices are the weight matrices of the encoder's layers. A parameter may consist of several
    matrices (`num_matrices`). `exp_avg` contains the momentum of a matrix, and its `exp_avg_sq`
    stays zero. Each matrix is orthogonalized by one of the shards. The computation uses bfloat16 on
    a GPU or if the model's weights have 16 bits, and otherwise the dtype of the master weights.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        layout, masters = self.layout, self.shard.masters
        scales = {tensor.name: update_scale(tensor.name, tensor.shape) for tensor in layout.tensors}
        in_16_bits = masters.is_cuda or self.shard.weights is not None
        self.products = torch.bfloat16 if in_16_bits else masters.dtype
        self.shard = replace(
            self.shard,
            direction=torch.zeros_like(masters, dtype=self.products),
            direction_scale=torch.tensor(list(scales.values()), dtype=torch.float64).to(
                masters.device
            ),
        )
        self.parts = list(self._cut(layout))
        has_matrices = [
            any(scales[tensor.name] for tensor in self._tensors_of(number))
            for number, *_ in self.parts
        ]
        self._first = [part for part, has in zip(self.parts, has_matrices, strict=True) if not has]
        self._last = [part for part, has in zip(self.parts, has_matrices, strict=True) if has]
        matrices = split_matrices(layout)
        self._route = plan_route(matrices, self.others.index)
        self._sent, self._order, self._back = (
            torch.from_numpy(order).to(masters.device)
            for order in (self._route.sent, self._route.order, self._route.order.argsort())
        )

    def update(self, scalars: StepScalars) -> None:
        """Update the shard one bucket at a time.

        Buckets without matrices are updated while the directions of the matrices are sent to their
        owners.
        """
        assert self.shard.direction is not None
        self.kernels.muon_momentum(self.shard, self.constants, scalars)
        blocks = self.shard.direction.view(-1, BLOCK)
        sizes = self._route.sent_to, self._route.received_from
        sent = blocks.index_select(0, self._sent)
        received, wait = self.others.exchange(sent, *sizes)
        self._apply(self._first, scalars)
        wait()
        stacked = received.index_select(0, self._order)
        for stack in self._route.stacks:
            _orthogonalize_blocks(stacked[stack.start : stack.stop], stack)
        sent = stacked.index_select(0, self._back)
        received, wait = self.others.exchange(sent, *reversed(sizes))
        wait()
        blocks.index_copy_(0, self._sent, received)
        self._apply(self._last, scalars)

    def _apply(self, parts: Iterable[Any], scalars: StepScalars) -> None:
        for number, part, whole, piece in parts:
            self.kernels.muon_apply(part, self.constants, scalars)
            self.others.publish(number, whole, piece)


def _orthogonalize_blocks(blocks: Tensor, stack: Stack) -> None:
    """Orthogonalize the matrices of a stack in place.

    `blocks` is [n, BLOCK] and contains the matrices and their padding.
    """
    rows, columns = stack.shape
    flat = blocks.view(stack.count, -1)[:, : rows * columns]
    batch_size = stack.count
    if not blocks.is_cuda:
        batch_size = max(1, CPU_ELEMENTS // (rows * columns))
    for first in range(0, stack.count, batch_size):
        batch = flat[first : first + batch_size]
        update = orthogonalize_stack(batch.reshape(-1, rows, columns))
        batch.copy_(update.reshape(len(batch), -1))

"""The optimizers Muon and NorMuon, which orthogonalize the momentum of hidden matrices.

All other parameters are updated by AdamW.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.distributed.flat_reducer import ShardGroup
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, StepScalars
from mlperf_bert.optim.muon_plan import (
    NEWTON_SCHULZ_STEPS,
    Route,
    plan_routes,
    split_matrices,
    update_scale,
)

# Coefficients of the polynomial a x + b x^3 + c x^5 that each step applies to the singular values
# (Jordan, "Muon", 2024). Five steps map values between 0.003 and 1 to values between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
LEAST_NORM = 1e-7  # avoids a division by zero
# Constants of NorMuon. The paper gives the decay rate, and the authors' program epsilon.
NORMUON_BETA_2 = 0.95
NORMUON_EPSILON = 1e-10
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


def normuon_update(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    row_squares: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    products: torch.dtype = torch.bfloat16,
) -> None:
    """Update one matrix in place by one step of NorMuon.

    This function is the readable definition of the update.

    NorMuon divides each row of Muon's orthogonalized momentum, which contains the weights of one
    neuron, by the root of a running mean of the row's squares. The result is scaled to the root
    mean square of AdamW's updates. The mean has no bias correction, which would cancel out.

    Source: Li et al., "NorMuon" (arXiv 2510.05491), algorithm 1. As in the authors' program, the
    momentum is Nesterov's, so that NorMuon differs from `muon_update` only by its rows.

    Args:
        row_squares: [rows, 1], the running mean of squares, which is also updated in place.
        param, grad, momentum_buffer, lr, momentum, weight_decay, products: see `muon_update`.
    """
    momentum_buffer.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(momentum_buffer, momentum).to(products)).to(param.dtype)
    row_squares.lerp_(update.square().mean(dim=1, keepdim=True), 1 - NORMUON_BETA_2)
    update = update / (row_squares.sqrt() + NORMUON_EPSILON)
    param.mul_(1 - lr * weight_decay)
    param.sub_(update * (lr * 0.2 * math.sqrt(update.numel()) / update.norm().clamp(LEAST_NORM)))


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
        self._routes = plan_routes(split_matrices(layout), self.others.index)
        self._blocks = _Owners(self._routes.blocks, self.others, masters.device)

    def update(self, scalars: StepScalars) -> None:
        """Update the shard one bucket at a time.

        Buckets without matrices are updated while the directions of the matrices are sent to their
        owners.
        """
        assert self.shard.direction is not None
        self.kernels.muon_momentum(self.shard, self.constants, scalars)
        blocks = self.shard.direction.view(-1, BLOCK)
        receive = self._blocks.send(blocks)
        self._apply(self._first, scalars)
        stacks = receive()
        self._orthogonalize(stacks, scalars)
        self._blocks.send_back(stacks, blocks)
        self._apply(self._last, scalars)

    def _orthogonalize(self, blocks: Tensor, scalars: StepScalars) -> None:
        """Replace the matrices that this shard owns by their directions.

        `blocks` is [n, BLOCK] and contains the matrices of all stacks and their padding.
        """
        for matrices in self._matrices_in(blocks):
            matrices.copy_(orthogonalize_stack(matrices))

    def _matrices_in(self, blocks: Tensor) -> Iterator[Tensor]:
        """Yield the matrices in `blocks` as views [count, rows, columns], in their order."""
        for stack in self._routes.stacks:
            rows, columns = stack.shape
            flat = blocks[stack.start : stack.stop].view(stack.count, -1)[:, : rows * columns]
            batch_size = stack.count
            if not blocks.is_cuda:
                batch_size = max(1, CPU_ELEMENTS // (rows * columns))
            for first in range(0, stack.count, batch_size):
                yield flat[first : first + batch_size].view(-1, rows, columns)

    def _apply(self, parts: Iterable[Any], scalars: StepScalars) -> None:
        for number, part, whole, piece in parts:
            self.kernels.muon_apply(part, self.constants, scalars)
            self.others.publish(number, whole, piece)


class NorMuon(Muon):
    """The NorMuon optimizer, which runs `normuon_update` on Muon's matrices.

    The first element of each row's `exp_avg_sq` contains the running mean of the row's squares, and
    the other elements stay zero. The owner of a matrix receives these elements and sends them back.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rows = _Owners(self._routes.rows, self.others, self.shard.masters.device)

    def _orthogonalize(self, blocks: Tensor, scalars: StepScalars) -> None:
        elements = self.shard.exp_avg_sq.view(-1, 1)
        row_squares = self._rows.send(elements)()
        start = 0
        for matrices in self._matrices_in(blocks):
            count, rows, _ = matrices.shape
            squares = row_squares[start : start + count * rows].view(count, rows, 1)
            matrices.copy_(_normalize_rows(orthogonalize_stack(matrices), squares, scalars.skip))
            start += count * rows
        self._rows.send_back(row_squares, elements)


def _normalize_rows(matrices: Tensor, row_squares: Tensor, skip: Tensor) -> Tensor:
    """Return the normalized rows of orthogonalized matrices [count, rows, columns].

    The result has the norm of an orthogonal matrix, so that Muon's scale leads to the same root
    mean square. `row_squares` [count, rows, 1] is updated in place, unless `skip` is 1.0.
    """
    _, rows, columns = matrices.shape
    norms = torch.linalg.vector_norm(matrices, dim=2, keepdim=True, dtype=row_squares.dtype)
    new = row_squares.lerp(norms.square() / columns, 1 - NORMUON_BETA_2)
    row_squares.copy_(torch.where(skip == 1.0, row_squares, new))
    factors = (row_squares.sqrt() + NORMUON_EPSILON).reciprocal()
    norm: Tensor = torch.linalg.vector_norm(norms * factors, dim=1, keepdim=True)
    return matrices * (factors * (math.sqrt(min(rows, columns)) / norm.clamp(min=LEAST_NORM)))


class _Owners:
    """The communication of a shard with the owners of its matrices."""

    def __init__(self, route: Route, others: ShardGroup, device: torch.device) -> None:
        self._others = others
        self._sizes = route.sent_to, route.received_from
        self._sent, self._order, self._back = (
            torch.from_numpy(order).to(device)
            for order in (route.sent, route.order, route.order.argsort())
        )

    def send(self, items: Tensor) -> Callable[[], Tensor]:
        """Start sending items to the owners.

        `items` [n, size] contains all items of the shard. The returned function waits for the items
        that this shard receives as an owner, and returns them in the order of the stacks.
        """
        received, wait = self._others.exchange(items.index_select(0, self._sent), *self._sizes)

        def receive() -> Tensor:
            wait()
            return received.index_select(0, self._order)

        return receive

    def send_back(self, stacks: Tensor, items: Tensor) -> None:
        """Send changed items back to their shards, which write them to `items`."""
        sent = stacks.index_select(0, self._back)
        received, wait = self._others.exchange(sent, *reversed(self._sizes))
        wait()
        items.index_copy_(0, self._sent, received)

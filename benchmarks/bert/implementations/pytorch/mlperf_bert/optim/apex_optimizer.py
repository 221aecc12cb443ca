"""Run the fused AdamW and LAMB of NVIDIA's apex library on the flat buffers.

These adapters are tested against apex's documented interface. The adapters have never run with apex
itself, which needs a GPU and comes with NVIDIA's container images. LAMB uses apex's
`FusedMixedPrecisionLamb`. apex's other implementation, `FusedLAMB`, gets the learning rate and the
step number from the host and requires the host to decide whether to skip a step.
"""

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from mlperf_bert.distributed.flat_reducer import FlatBuffers, views
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.flat_optimizer import (
    Constants,
    FlatOptimizer,
    StepScalars,
    is_exempt,
)


class ApexOptimizer(FlatOptimizer):
    """Base class of the adapters, which run apex's optimizers on views of one shard.

    One apex optimizer updates the tensors with weight decay, and another one the tensors without.
    Both optimizers receive weights, gradients, master weights and moments. Before every step they
    also receive the learning rate and the number of updates. Because apex keeps no other state,
    checkpoints and the warm-up need no extra code. A step overwrites the gradients.

    Raises ConfigError if apex is not installed or cannot create the optimizer.
    """

    def __init__(self, buffers: FlatBuffers, *others: Any) -> None:
        super().__init__(buffers, *others)
        names = [tensor.name for tensor in buffers.layout.tensors]
        masters, rounded = self.shard.masters, self.shard.weights
        weights = masters if rounded is None else rounded
        flats = (weights, self.shard.gradients, masters, *self.flat_state().values())
        decayed: list[tuple[nn.Parameter, Tensor, dict[str, Tensor]]] = []
        exempt: list[tuple[nn.Parameter, Tensor, dict[str, Tensor]]] = []
        columns = (views(flat, buffers.layout) for flat in flats)
        for name, weight, gradient, master, *moments in zip(names, *columns, strict=True):
            parameter = nn.Parameter(weight)
            parameter.grad = gradient
            state = dict(zip(self.flat_state(), moments, strict=True))
            (exempt if is_exempt(name) else decayed).append((parameter, master, state))
        self._fused = []
        for tensors, decay in ((decayed, self.weight_decay), (exempt, 0.0)):
            if tensors:
                parameters = [parameter for parameter, _, _ in tensors]
                fused = self.make_fused(parameters, decay, adapted=tensors is decayed)
                fused.state.update({parameter: state for parameter, _, state in tensors})
                # Otherwise apex would copy the masters from the rounded weights in its first step.
                if rounded is not None:
                    full_precision = [master for _, master, _ in tensors]
                    fused.param_groups_full_precision = [{"params": full_precision}]
                self._fused.append(fused)

    def update(self, scalars: StepScalars) -> None:
        """Run apex's kernels for one update. The kernels read all arguments on the device."""
        scaler = _Scaler(scalars)
        for fused in self._fused:
            fused._dummy_overflow_buf.zero_()  # after a skipped step it would freeze the count
            group = fused.param_groups[0]
            group["lr"] = scalars.learning_rate.float()
            group["step"] = (self._updates - 1).int().reshape(1)  # apex adds 1 unless it skips
            fused.step(grad_scaler=scaler)

    def make_fused(self, parameters: list[nn.Parameter], decay: float, *, adapted: bool) -> Any:
        """Create apex's optimizer for `parameters`, with weight decay `decay`.

        If `adapted` is true, LAMB scales the updates of these parameters by the trust ratio.
        """
        raise NotImplementedError


class ApexAdamW(ApexOptimizer):
    """An implementation of `adamw_update` with apex's FusedAdam.

    FusedAdam updates bfloat16 weights without float32 master weights.
    """

    def make_fused(self, parameters: list[nn.Parameter], decay: float, *, adapted: bool) -> Any:
        """Create apex's FusedAdam for `parameters`. The argument `adapted` is ignored."""
        return _make("FusedAdam", parameters, self.constants, decay, capturable=True)


class ApexLAMB(ApexOptimizer):
    """An implementation of `lamb_update` with apex's FusedMixedPrecisionLamb.

    If the norm of the gradients overflows float32, apex skips the update but counts it. In bf16,
    apex's first kernel passes the updates to the second in place of the bf16 gradients. apex's
    master weights therefore change by updates rounded to 8 significant bits, while the updates of
    this project's `LAMB` are not rounded.
    """

    def make_fused(self, parameters: list[nn.Parameter], decay: float, *, adapted: bool) -> Any:
        """Create apex's LAMB for `parameters`.

        Without `use_nvlamb`, apex scales only the updates of tensors with weight decay.
        """
        return _make(
            "FusedMixedPrecisionLamb",
            parameters,
            self.constants,
            decay,
            grad_averaging=True,
            max_grad_norm=math.inf,  # no clipping here, whereas 0 would clip everything
            use_nvlamb=adapted,
            reduced_precision_dtype=getattr(self.shard.weights, "dtype", None),
        )


class _Scaler:
    """A substitute for `torch.amp.GradScaler`, with only the methods that apex calls."""

    def __init__(self, scalars: StepScalars) -> None:
        self._scalars = scalars

    def _check_inf_per_device(self, _optimizer: Any) -> dict[torch.device, Tensor]:
        """Map the device to the tensor that is 1.0 if the step must be skipped."""
        return {self._scalars.skip.device: self._scalars.skip}

    def _get_scale_async(self) -> Tensor:
        """Return the scale by which apex divides the gradients."""
        return self._scalars.gradient_factor.reciprocal()


def _make(
    name: str, parameters: list[nn.Parameter], constants: Constants, decay: float, **more: object
) -> Any:
    remedy = "set optim.implementation to 'ours', or use a container image with apex"
    try:
        fused = getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        problem = f"'apex' needs {name} from NVIDIA apex, which is not installed ({error})"
        raise ConfigError("optim.implementation", problem, remedy) from None
    try:
        return fused(
            parameters,
            betas=(constants.beta_1, constants.beta_2),
            eps=constants.epsilon,
            weight_decay=decay,
            bias_correction=True,
            adam_w_mode=True,
            **more,
        )
    except RuntimeError as error:  # for example if apex was built without its CUDA extensions
        problem = f"apex cannot create {name} ({' '.join(str(error).split())})"
        raise ConfigError("optim.implementation", problem, remedy) from None

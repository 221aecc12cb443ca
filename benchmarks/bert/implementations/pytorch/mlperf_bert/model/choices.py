"""The choice of a model's attention policy and blocks: the named ones, or those of a rule.

The rules depend on the config, the device and the installed software only, and nothing is measured.
Equal machines therefore choose the same kernels, and so does a run that starts again. Kernels round
differently, so a choice that varied from start to start would change a run's results.
"""

from dataclasses import dataclass

import torch

from mlperf_bert.compiled import why_triton_cannot_compile
from mlperf_bert.config.sections import AttentionName, ModelSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.attention import (
    AttentionPolicy,
    flash,
    grouped,
    reference,
)
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.model.fp8 import Fp8Blocks, Fp8Scales, check_fp8

MOST_CHANNELS = 4096  # longest row that one GPU program normalises in registers
TRITON_HEADS = (16, 32, 64, 128)  # channels a head
MOST_FLASH_CHANNELS = 256  # a head
# The policies that "auto" uses on CUDA, the preferred one first. `triton` drops the elements that
# `reference` drops, whatever the batch is cut into; `flash` draws from torch's generator.
AUTO_ON_CUDA: tuple[AttentionName, ...] = ("triton", "flash")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A policy, and one line that names it and says why."""

    name: AttentionName
    policy: AttentionPolicy
    note: str


def choose_attention(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """The policy that `config.attention` names.

    "auto" is "triton" on CUDA. If that cannot run there it is "flash", and if neither can it is
    "grouped". On every other device "auto" is "grouped".

    Args:
        config: gives the head size and the layers that see a window only.
        device: device of the model.
        dtype: dtype of q, k and v, which is autocast's if that is on.

    Raises:
        ConfigError: the named policy cannot run here.
    """
    name = config.attention
    if name == "auto":
        return _choose_by_rule(config, device, dtype)
    problem = _why_not(name, device, dtype, config)
    if problem is not None:
        raise ConfigError(
            "model.attention",
            f"{name!r} cannot run here: {problem}",
            "use 'auto' or 'grouped'",
        )
    return AttentionChoice(name, _policy(name), f"attention: {name}")


def _choose_by_rule(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """The policy of "auto"; on CUDA its note says why preferred policies were left out."""
    if device.type != "cuda":
        return AttentionChoice("grouped", grouped, "attention: grouped")
    left_out: list[str] = []
    for name in AUTO_ON_CUDA:
        problem = _why_not(name, device, dtype, config)
        if problem is None:
            return AttentionChoice(name, _policy(name), _note(name, left_out))
        left_out.append(f"{name} left out ({problem})")
    return AttentionChoice("grouped", grouped, _note("grouped", left_out))


def _note(name: AttentionName, left_out: list[str]) -> str:
    """The line about a choice: `attention: flash (triton left out (...))`."""
    return f"attention: {name} ({', '.join(left_out)})" if left_out else f"attention: {name}"


def _why_not(
    name: AttentionName, device: torch.device, dtype: torch.dtype, config: ModelSection
) -> str | None:
    """The reason why a policy cannot run; None if it can."""
    if name not in ("flash", "triton"):
        return None
    if device.type != "cuda":
        return f"it needs CUDA, and the model is on {device.type}"
    if dtype != torch.bfloat16:
        return f"it needs bf16, and the model computes in {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if name == "triton":
        return _why_not_triton(config.head_size)
    return _why_not_flash(config)


def _why_not_flash(config: ModelSection) -> str | None:
    if not config.is_global(config.num_layers - 1):
        # Its windows go by a query's number, and this layer computes some queries only.
        return "the last layer is local, and its windows would lie elsewhere there"
    if config.head_size % 8 or config.head_size > MOST_FLASH_CHANNELS:
        most = MOST_FLASH_CHANNELS
        return f"heads have {config.head_size} channels, not a multiple of 8 up to {most}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash kernels"
    return None


def _why_not_triton(head_size: int) -> str | None:
    if head_size not in TRITON_HEADS:
        return f"heads have {head_size} channels, not one of {TRITON_HEADS}"
    return why_triton_cannot_compile()


def _policy(name: AttentionName) -> AttentionPolicy:
    if name == "triton":
        from mlperf_bert.model.triton_attention import attend  # imports triton

        return attend
    policies: dict[str, AttentionPolicy] = {
        "reference": reference,
        "grouped": grouped,
        "flash": flash,
    }
    return policies[name]


def choose_blocks(
    config: ModelSection, device: torch.device, scales: Fp8Scales | None = None
) -> Blocks:
    """The blocks that `config.kernels` names; "auto" is "fused" if that can run.

    Args:
        config: its hidden size is at most 4,096 for fused blocks.
        device: device of the model.
        scales: scales of the encoder's products, if they are in FP8.

    Raises:
        ConfigError: FP8 products or fused blocks cannot run.
    """
    if scales is not None:
        check_fp8(config, device)
    problem = _why_not_fused(config.hidden_size, device)
    if config.kernels == "fused" and problem is not None:
        raise ConfigError(
            "model.kernels", f"'fused' cannot run here: {problem}", "use 'auto' or 'reference'"
        )
    if config.kernels == "reference" or problem is not None:
        return Blocks() if scales is None else Fp8Blocks(scales)
    # Imported here, because elsewhere nothing needs triton.
    from mlperf_bert.model.fused_blocks import FusedBlocks

    return FusedBlocks(scales)


def _why_not_fused(hidden_size: int, device: torch.device) -> str | None:
    """The reason why fused blocks cannot run; None if they can."""
    if device.type != "cuda":
        return f"it needs CUDA, and the model is on {device.type}"
    if hidden_size > MOST_CHANNELS:
        return f"model.hidden_size is {hidden_size}, and it takes {MOST_CHANNELS} at most"
    return why_triton_cannot_compile()

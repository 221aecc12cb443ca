"""Choices of a model's attention policy and blocks, by their names in the config or by rules.

The rules depend only on the config, the device and the installed software. They do not depend on
measurements, so equal machines choose the same kernels, and a resumed run chooses the same kernels
again. This matters because kernels round differently. If the choice varied from start to start, a
run's results would vary too.
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

MOST_CHANNELS = 4096  # longest row that one GPU program normalizes in registers
TRITON_HEADS = (16, 32, 64, 128)  # channels per head
MOST_FLASH_CHANNELS = 256  # per head
# The policies that "auto" tries on CUDA, in order of preference. `triton` is preferred because it
# drops the same elements however the batch is split, whereas `flash` uses torch's generator.
AUTO_ON_CUDA: tuple[AttentionName, ...] = ("triton", "flash")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """An attention policy, and a note of one line with its name and the reason for the choice."""

    name: AttentionName
    policy: AttentionPolicy
    note: str


def choose_attention(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """Choose the attention policy by `config.attention`, which is its name or "auto".

    On CUDA, "auto" selects "triton", or "flash" if "triton" cannot run, or "grouped" if neither can
    run. On every other device, "auto" selects "grouped".

    Args:
        config: defines the head size and which layers are local (have a window).
        device: device of the model.
        dtype: dtype of q, k and v, which is autocast's dtype if autocast is on.

    Raises:
        ConfigError: the policy that the config names cannot run on this device.
    """
    name = config.attention
    if name == "auto":
        return _choose_by_rule(config, device, dtype)
    problem = _why_not(name, device, dtype, config)
    if problem is not None:
        problem = f"{name!r} cannot run on this machine because {problem}"
        raise ConfigError("model.attention", problem, "set model.attention to 'auto' or 'grouped'")
    return AttentionChoice(name, _policy(name), f"attention: {name}")


def _choose_by_rule(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """Choose the policy for "auto".

    On CUDA the note also contains the reasons why preferred policies cannot run.
    """
    if device.type != "cuda":
        return AttentionChoice("grouped", grouped, "attention: grouped")
    rejected: list[str] = []
    for name in AUTO_ON_CUDA:
        problem = _why_not(name, device, dtype, config)
        if problem is None:
            return AttentionChoice(name, _policy(name), _note(name, rejected))
        rejected.append(f"not {name}, because {problem}")
    return AttentionChoice("grouped", grouped, _note("grouped", rejected))


def _note(name: AttentionName, rejected: list[str]) -> str:
    """Describe a choice of attention in one line: `attention: flash (not triton, because ...)`."""
    reasons = ", and ".join(rejected)
    return f"attention: {name} ({reasons})" if rejected else f"attention: {name}"


def _why_not(
    name: AttentionName, device: torch.device, dtype: torch.dtype, config: ModelSection
) -> str | None:
    """Return the reason why an attention policy cannot run on `device`, or None if it can run."""
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
        # Its windows are relative to a query's row number, which differs from the query's position
        # in the last layer, because that layer computes only some queries.
        return "the last layer is local, and its windows would be misplaced"
    if config.head_size % 8 or config.head_size > MOST_FLASH_CHANNELS:
        most = MOST_FLASH_CHANNELS
        return f"heads have {config.head_size} channels instead of a multiple of 8 up to {most}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash kernels"
    return None


def _why_not_triton(head_size: int) -> str | None:
    if head_size not in TRITON_HEADS:
        return f"heads have {head_size} channels instead of one of {TRITON_HEADS}"
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
    """Choose the blocks by `config.kernels`, which is their name or "auto".

    "auto" selects "fused" if the fused blocks can run on `device`, and "reference" otherwise.

    Args:
        config: fused blocks need a hidden size of at most 4,096.
        device: device of the model.
        scales: scales of the encoder's products if the products are in FP8, or None.

    Raises:
        ConfigError: the device cannot run FP8 products, or the fused blocks that the config names.
    """
    if scales is not None:
        check_fp8(config, device)
    problem = _why_not_fused(config.hidden_size, device)
    if config.kernels == "fused" and problem is not None:
        problem = f"'fused' cannot run on this machine because {problem}"
        raise ConfigError("model.kernels", problem, "set model.kernels to 'auto' or 'reference'")
    if config.kernels == "reference" or problem is not None:
        return Blocks() if scales is None else Fp8Blocks(scales)
    # This import is local because it imports triton, which the other choices do not need.
    from mlperf_bert.model.fused_blocks import FusedBlocks

    return FusedBlocks(scales)


def _why_not_fused(hidden_size: int, device: torch.device) -> str | None:
    """Return the reason why the fused blocks cannot run on `device`, or None if they can run."""
    if device.type != "cuda":
        return f"it needs CUDA, and the model is on {device.type}"
    if hidden_size > MOST_CHANNELS:
        return f"model.hidden_size is {hidden_size}, and the kernels need {MOST_CHANNELS} at most"
    return why_triton_cannot_compile()

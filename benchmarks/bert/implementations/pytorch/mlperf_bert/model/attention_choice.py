"""Which attention policy a model gets: the one that is named, or the fastest that is right here."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import AttentionName, ModelSection
from mlperf_bert.model.attention import AttentionPolicy, grouped, packed, reference
from mlperf_bert.model.attention_trial import Timer, Trial, seconds_on_cuda
from mlperf_bert.model.varlen_operators import cudnn, flash

TRITON_HEADS = (16, 32, 64, 128)  # channels of a head
SAFE_CUDNN_SINCE = (2, 14)  # version of torch: see `varlen_operators.cudnn`
# Of the largest element of the context and of each gradient. bf16 itself rounds to 0.004.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A policy, and one line that says which and why."""

    name: str
    policy: AttentionPolicy
    note: str


def choose_attention(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """The policy that `config.attention` names.

    "auto" is "grouped" where the model is not on CUDA; there it is the fastest of the policies with
    kernels for variable lengths, measured now, or "grouped" where none of them can run.

    Args:
        config: its head size, number of heads, longest sequence and dropout are those measured.
        device: where the model lives.
        dtype: of q, k and v, which is autocast's dtype where that is on.

    Raises:
        ConfigError: a policy is named that cannot run here.
    """
    name = config.attention
    if name == "auto":
        return _choose_by_measuring(config, device, dtype)
    problem = _why_not(name, device, dtype, config.head_size)
    if problem is not None:
        raise ConfigError(
            "model.attention",
            f"{name!r} cannot run here: {problem}",
            "use 'auto' or 'grouped'",
        )
    return AttentionChoice(name, _policy(name), f"attention: {name}")


def _choose_by_measuring(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    if device.type != "cuda":
        return AttentionChoice("grouped", grouped, "attention: grouped")
    candidates: dict[str, Callable[[], AttentionPolicy]] = {}
    left_out: dict[str, str] = {}
    names: tuple[AttentionName, ...] = ("triton", "flash", "cudnn")
    for name in names:
        problem = _why_not(name, device, dtype, config.head_size)
        if problem is None:
            candidates[name] = lambda name=name: _policy(name)  # type: ignore[misc]
        else:
            left_out[name] = problem
    trial = Trial(config, device, dtype) if candidates else None
    return choose_fastest(candidates, trial, seconds_on_cuda, left_out)


def choose_fastest(
    candidates: Mapping[str, Callable[[], AttentionPolicy]],
    trial: Trial | None,
    timer: Timer,
    left_out: Mapping[str, str],
) -> AttentionChoice:
    """The candidate whose forward and backward take least time and agree with `reference`.

    Args:
        candidates: by name, a function that brings the policy; it may fail, as the policy may.
        trial: what they are tried on; None where there is no candidate.
        timer: seconds of a call.
        left_out: why others are no candidates, by name.

    Returns:
        `grouped` where no candidate is left.
    """
    reasons = dict(left_out)
    seconds: dict[str, float] = {}
    policies: dict[str, AttentionPolicy] = {"grouped": grouped}
    for name, load in candidates.items():
        assert trial is not None
        try:
            policies[name] = load()
            difference = trial.difference(policies[name])
            if difference <= TOLERANCE:
                seconds[name] = timer(lambda name=name: trial.run(policies[name]))  # type: ignore[misc]
            else:  # also where it is NaN
                reasons[name] = f"differs from reference by {difference:.1e} of the largest"
        except Exception as error:  # every library fails in its own way; the others may run
            reasons[name] = str(error).strip().partition("\n")[0] or type(error).__name__
    chosen = min(seconds, key=seconds.__getitem__) if seconds else "grouped"
    found = [f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items()]
    found += [f"{name} left out ({reason})" for name, reason in reasons.items()]
    size = ""
    if trial is not None:
        size = f"a layer of {trial.num_tokens:,} tokens, its gradients put side by side: "
    note = f"attention: {chosen} ({size}{', '.join(found)})"
    return AttentionChoice(chosen, policies[chosen], note)


def _why_not(
    name: AttentionName, device: torch.device, dtype: torch.dtype, head_size: int
) -> str | None:
    """Why a policy cannot run; None where it can."""
    if name not in ("flash", "cudnn", "triton"):
        return None
    if device.type != "cuda":
        return f"it needs CUDA, and the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, and the model computes in {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if name == "flash":
        return _why_not_flash(head_size)
    return _why_not_cudnn(head_size) if name == "cudnn" else _why_not_triton(head_size)


def _why_not_flash(head_size: int) -> str | None:
    if head_size % 8 or head_size > 256:
        return f"heads have {head_size} channels, not a multiple of 8 up to 256"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash kernels"
    return None


def _why_not_cudnn(head_size: int) -> str | None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < SAFE_CUDNN_SINCE:
        return f"torch {torch.__version__} writes out of bounds in its backward; 2.14 does not"
    if head_size % 8 or head_size > 128:
        return f"heads have {head_size} channels, not a multiple of 8 up to 128"
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no cuDNN"
    return None


def _why_not_triton(head_size: int) -> str | None:
    if head_size not in TRITON_HEADS:
        return f"heads have {head_size} channels, not one of {TRITON_HEADS}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _policy(name: AttentionName) -> AttentionPolicy:
    if name == "triton":
        from mlperf_bert.model.triton_attention import attend  # imports triton

        return attend
    policies: dict[str, AttentionPolicy] = {
        "reference": reference,
        "grouped": grouped,
        "packed": packed,
        "flash": flash,
        "cudnn": cudnn,
    }
    return policies[name]

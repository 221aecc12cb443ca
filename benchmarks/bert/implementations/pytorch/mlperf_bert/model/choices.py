"""The choice of a model's attention policy and blocks: the named ones, or the fastest correct.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import AttentionName, ModelSection
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.model.attention import (
    AttentionPolicy,
    cudnn,
    flash,
    grouped,
    packed,
    reference,
)
from mlperf_bert.model.attention_layout import AttentionLayout, Queries, Rotary
from mlperf_bert.model.blocks import Blocks, side_by_side
from mlperf_bert.model.dropout_keys import DropoutKeys, make_site
from mlperf_bert.model.fp8 import Fp8Blocks, Fp8Scales, check_fp8

MOST_CHANNELS = 4096  # longest row that one GPU program normalises in registers
TRITON_HEADS = (16, 32, 64, 128)  # channels a head
SAFE_CUDNN_SINCE = (2, 14)  # version of torch: see `attention.cudnn`
# Share of the largest element of the context and of each gradient. bf16 itself rounds to 0.004.
TOLERANCE = 0.02
NUM_SEQUENCES = 32  # sequences of a trial
NUM_EMPTY = 2  # padding tokens at the end, as in a batch padded to a capacity
LONGEST = 1024  # tokens of a trial's sequence: the reference keeps their squares
QUERY_SHARE = 0.15  # share of a sequence's tokens that the last layer computes

Timer = Callable[[Callable[[], object]], float]


class Trial:
    """One layer's attention in training, and the last layer's, which has fewer queries.

    Of ModernBERT it is that of a global and of a local layer. Lengths are the published ones,
    scaled if the model's maximum differs, to LONGEST at most. The numbers are always the same, from
    a generator of its own.
    """

    def __init__(self, config: ModelSection, device: torch.device, dtype: torch.dtype) -> None:
        published, longest = wikipedia_lengths(), min(LONGEST, config.max_position_embeddings)
        drawn = -(-published.draw_evenly(NUM_SEQUENCES, seed=0) * longest // published.max_length)
        counts = np.maximum(np.rint(drawn * QUERY_SHARE).astype(np.int64), 1)
        lengths = (*drawn.tolist(), *(0,) * NUM_EMPTY)
        query_lengths = (*counts.tolist(), *(0,) * NUM_EMPTY)
        self.num_tokens = sum(lengths)
        first = np.cumsum(drawn) - drawn
        number = torch.arange(NUM_SEQUENCES).repeat_interleave(torch.from_numpy(drawn))
        places = (torch.arange(self.num_tokens) - torch.from_numpy(first)[number]).to(device)
        layout = AttentionLayout(lengths, _bounds(lengths, device), longest, places)
        self._layouts: tuple[AttentionLayout, ...] = (layout,)
        if config.architecture == "modern":
            rotary = Rotary.of_base(config.rope_base_local, longest, config.head_size).on(device)
            self._layouts = tuple(layout.attending(rotary, each) for each in (None, config.reach))
        rows = [start + np.arange(count) for start, count in zip(first, counts, strict=True)]
        queries = Queries(
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            cu_seqlens=_bounds(query_lengths, device),
            lengths=query_lengths,
            max_length=max(query_lengths),
        )
        self._last_layouts = tuple(each.for_queries(queries) for each in self._layouts)
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_tokens, 4, config.num_heads, config.head_size)
        drawn_values = torch.randn(shape, generator=generator).to(device, dtype)
        # Columns of one product's result, as the fused blocks pass them.
        self._inputs = drawn_values[:, :3].contiguous().unbind(1)
        self._gradient = drawn_values[:, 3].contiguous()
        step = torch.zeros(1, dtype=torch.int64, device=device)
        keys = DropoutKeys(0, step, number.to(device), places)
        self._site = make_site(config.attention_dropout, 0, keys)
        self._expected: list[Tensor] | None = None

    def difference(self, policy: AttentionPolicy) -> float:
        """Largest difference from `reference` in float32, without dropout.

        It covers the context and the gradients of q, k and v in both layouts, each as a share of
        its largest element.
        """
        if self._expected is None:
            self._expected = self._both(reference, [x.float() for x in self._inputs])
        found = self._both(policy, self._inputs)
        shares = [
            (ours.float() - theirs).abs().max() / theirs.abs().max()
            for ours, theirs in zip(found, self._expected, strict=True)
        ]
        return float(torch.stack(shares).max())  # host sync: the model is being built

    def run(self, policy: AttentionPolicy) -> Tensor:
        """Run forward and backward of one layer of each kind, with dropout as in training.

        Returns:
            The last one's gradients of q, k and v side by side, [T, 3 N H], as the product's
            backward needs them; copied unless the policy leaves them so.
        """
        for layout in self._layouts:
            q, k, v = leaves = [x.detach().requires_grad_() for x in self._inputs]
            context = policy(q, k, v, layout, self._site)
            gradients = torch.autograd.grad(context, leaves, self._gradient)
            joined = side_by_side(tuple(gradient.flatten(1) for gradient in gradients))
        return joined

    def _both(self, policy: AttentionPolicy, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = []
        for layout in (*self._layouts, *self._last_layouts):
            q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
            context = policy(layout.select(q), k, v, layout, None)
            gradient = layout.select(self._gradient).to(context.dtype)
            results += [context.detach(), *torch.autograd.grad(context, leaves, gradient)]
        return results


def seconds_on_cuda(run: Callable[[], object], *, warm_up: int = 3, repeats: int = 10) -> float:
    """Mean seconds of a call on the device; torch's generator there is restored."""
    with torch.random.fork_rng([torch.cuda.current_device()], device_type="cuda"):
        for _ in range(warm_up):
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()  # host sync: the model is being built
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A policy, and one line that names it and says why."""

    name: str
    policy: AttentionPolicy
    note: str


def choose_attention(
    config: ModelSection, device: torch.device, dtype: torch.dtype
) -> AttentionChoice:
    """The policy that `config.attention` names.

    "auto" is "grouped" unless the model is on CUDA. On CUDA it is the fastest policy with kernels
    for variable lengths, measured now, or "grouped" if none of them can run.

    Args:
        config: gives the head size, number of heads, longest sequence and dropout to measure.
        device: device of the model.
        dtype: dtype of q, k and v, which is autocast's if that is on.

    Raises:
        ConfigError: the named policy cannot run here.
    """
    name = config.attention
    if name == "auto":
        return _choose_by_measuring(config, device, dtype)
    problem = _why_not(name, device, dtype, config)
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
        problem = _why_not(name, device, dtype, config)
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
    """The candidate with the fastest forward and backward that agree with `reference`.

    Args:
        candidates: by name, a function that returns the policy; both may fail.
        trial: the test case; None if there is no candidate.
        timer: seconds of a call.
        left_out: reasons why other policies are no candidates, by name.

    Returns:
        `grouped` if no candidate is left.
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
            else:  # also true of NaN
                reasons[name] = f"differs from reference by {difference:.1e} of the largest"
        except Exception as error:  # each library has its own errors; others may run
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
    name: AttentionName, device: torch.device, dtype: torch.dtype, config: ModelSection
) -> str | None:
    """The reason why a policy cannot run; None if it can."""
    if name not in ("flash", "cudnn", "triton"):
        return None
    if device.type != "cuda":
        return f"it needs CUDA, and the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, and the model computes in {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if name == "triton":
        return _why_not_triton(config.head_size)
    return _why_not_windows(name, config) or _why_not_torchs(name, config.head_size)


def _why_not_windows(name: AttentionName, config: ModelSection) -> str | None:
    if name == "cudnn" and config.local_share:
        return "it has no windows"
    if name == "flash" and not config.is_global(config.num_layers - 1):
        # Its windows go by a query's number, and this layer computes some queries only.
        return "the last layer is local, and its windows would lie elsewhere there"
    return None


def _why_not_torchs(name: AttentionName, head_size: int) -> str | None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if name == "cudnn" and version < SAFE_CUDNN_SINCE:
        return f"torch {torch.__version__} writes out of bounds in its backward; 2.14 does not"
    most = {"flash": 256, "cudnn": 128}[name]
    if head_size % 8 or head_size > most:
        return f"heads have {head_size} channels, not a multiple of 8 up to {most}"
    if name == "flash" and not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash kernels"
    if name == "cudnn" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
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
    name, hidden_size = config.kernels, config.hidden_size
    has_triton = importlib.util.find_spec("triton") is not None
    can_run_fused = device.type == "cuda" and has_triton and hidden_size <= MOST_CHANNELS
    if name == "fused" and not can_run_fused:
        raise ConfigError(
            "model.kernels",
            f"'fused' cannot run on {device.type} with hidden size {hidden_size}"
            + ("" if has_triton else " and without triton"),
            f"use 'reference' (or a CUDA device with triton, and at most {MOST_CHANNELS} channels)",
        )
    if name == "reference" or not can_run_fused:
        return Blocks() if scales is None else Fp8Blocks(scales)
    # Imported here, because elsewhere nothing needs triton.
    from mlperf_bert.model.fused_blocks import FusedBlocks

    return FusedBlocks(scales)

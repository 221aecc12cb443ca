"""The further opponents of `bench against`: compiled, with fused attention, and without padding."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bert_tools.bench.contenders import Data, peer_step
from bert_tools.bench.out_of_memory import free_memory, reason_of
from bert_tools.bench.peer import autocast, autocast_dtype
from bert_tools.bench.timing import Contender
from bert_tools.bench.unpadded_peer import unpadded_inputs, unpadded_loss, use_nested_attention
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import Precision

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
LossOf = Callable[[int], Tensor]
"""The loss of the batch of this number."""


@dataclass(frozen=True, slots=True)
class OtherPeers:
    """Those that run here, and why the others do not, by name."""

    contenders: dict[str, Contender]
    reasons: dict[str, str]


def make_other_peers(
    make_peer: Callable[[], Any],
    data: Data,
    precision: Precision,
    *,
    device: torch.device,
    with_compile: bool,
    check: Callable[[Tensor], object],
    report: Callable[[str], None],
) -> OtherPeers:
    """Build each of BUILDERS and run it once.

    Args:
        make_peer: a BertForPreTraining of its own for each, in training mode.
        data: the batches of all.
        precision: ours; theirs is `autocast_dtype` of it.
        device: where all is.
        with_compile: whether torch.compile is wanted.
        check: gets the loss of the first batch without dropout, and raises ConfigError where that
            is another model's.
        report: gets lines of progress.
    """
    peers = OtherPeers({}, {})
    for name, build in BUILDERS.items():
        reason = _reason_against(name, device, with_compile)
        if reason is None:
            report(f"preparing {name}")
            # The plain module would be compiled again.
            own_check = None if name == "padded_compiled" else check
            try:
                peers.contenders[name] = _prepared(make_peer(), build, data, precision, own_check)
            except ConfigError:
                raise
            except torch.OutOfMemoryError as error:
                reason = reason_of(error)
            except Exception as error:  # of any kind, out of others' code: a finding, no failure
                lines = str(error).splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0]}"
            free_memory()
        if reason is not None:
            peers.reasons[name] = reason
            report(f"{name}: {reason}")
    return peers


def _prepared(
    peer: Any,
    build: Callable[[Any, Data], LossOf],
    data: Data,
    precision: Precision,
    check: Callable[[Tensor], object] | None,
) -> Contender:
    """A step that has run once. In a function of its own: what fails leaves nothing behind."""
    loss_of = build(peer, data)
    if check is not None:
        _check_loss(peer, loss_of, autocast_dtype(precision), check)
    step = peer_step(peer, loss_of, precision)
    step(0).item()
    return step


def _compiled(peer: Any, data: Data) -> LossOf:
    compiled = torch.compile(peer, dynamic=False)
    return lambda number: compiled(**data.padded[number]).loss  # type: ignore[no-untyped-call]


def _flash(peer: Any, data: Data) -> LossOf:
    peer.set_attn_implementation("sdpa")

    def loss_of(number: int) -> Tensor:
        with sdpa_kernel(FUSED):
            loss: Tensor = peer(**data.padded[number]).loss
        return loss

    return loss_of


def _unpadded(peer: Any, data: Data) -> LossOf:
    use_nested_attention(peer)
    inputs = [unpadded_inputs(batch) for batch in data.batches]
    return lambda number: unpadded_loss(peer, inputs[number])


BUILDERS = MappingProxyType(
    {"padded_compiled": _compiled, "padded_flash": _flash, "unpadded_peer": _unpadded}
)


def _reason_against(name: str, device: torch.device, with_compile: bool) -> str | None:
    if name == "padded_compiled":
        return None if with_compile else "torch.compile was not asked for: --compile"
    if device.type != "cuda":
        return f"its attention kernels are for CUDA; this run is on {device.type}"
    return None


@torch.no_grad()
def _check_loss(
    peer: Any, loss_of: LossOf, dtype: torch.dtype | None, check: Callable[[Tensor], object]
) -> None:
    peer.eval()
    with autocast(peer.device, dtype):
        check(loss_of(0))
    peer.train()

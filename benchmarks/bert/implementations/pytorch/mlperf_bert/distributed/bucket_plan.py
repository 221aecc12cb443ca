"""Which gradients share a bucket under DistributedDataParallel, known before a run: no torch.

DDP (arXiv 2006.15704) runs its first step with one bucket and then rebuilds: parameters in the
order in which their gradients became ready are put into a bucket until it holds the cap or more.
A gradient is never split, and a bucket is sent when its last gradient is ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIB = 2**20
# torch.nn.parallel.DistributedDataParallel's own cap, and its first bucket's under that.
DEFAULT_CAP_MB = 25.0
SMALL_FIRST_CAP_MB = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGradient:
    """A parameter, and when its gradient is whole: a share of backward from 0 to 1."""

    name: str
    numel: int
    ready_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients sent together, in one flat buffer; `offsets` are in elements of it."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    num_bytes: int
    earliest_start: float


def plan_buckets(
    gradients: Iterable[ReadyGradient], element_bytes: int, cap_mb: float
) -> list[Bucket]:
    """DDP's buckets after its rebuild, in the order in which they are sent.

    Args:
        gradients: of all parameters, all of one dtype, in the order in which they become ready.
        element_bytes: size of that dtype.
        cap_mb: `parallel.bucket_cap_mb`, in MiB. A bucket is closed as soon as it holds that much,
            so it may be larger. The first one's cap is smaller where this is DDP's default.
    """
    is_default = ddp_bucket_cap_mb(cap_mb) is None
    limit = _cap_bytes(SMALL_FIRST_CAP_MB if is_default else cap_mb)
    buckets: list[Bucket] = []
    waiting: list[ReadyGradient] = []
    for gradient in gradients:
        waiting.append(gradient)
        if element_bytes * sum(each.numel for each in waiting) >= limit:
            buckets.append(_bucket(waiting, element_bytes))
            waiting, limit = [], _cap_bytes(cap_mb)
    if waiting:
        buckets.append(_bucket(waiting, element_bytes))
    return buckets


def plan_in_reverse(
    numel_by_name: Mapping[str, int], element_bytes: int, cap_mb: float
) -> list[Bucket]:
    """`plan_buckets` where nothing is known but the order of the parameters.

    Gradients are taken to become ready in the reverse order, all at the end.
    """
    ready = [
        ReadyGradient(name=name, numel=numel_by_name[name], ready_at=1.0)
        for name in reversed(list(numel_by_name))
    ]
    return plan_buckets(ready, element_bytes, cap_mb)


def ddp_bucket_cap_mb(cap_mb: float) -> float | None:
    """What to hand DDP as `bucket_cap_mb`: None for its default.

    Only then does DDP close the first bucket at 1 MiB, so that communication starts early; a cap
    that is given holds for the first bucket too, even one of 25 MiB.
    """
    return None if cap_mb == DEFAULT_CAP_MB else cap_mb


def _cap_bytes(cap_mb: float) -> int:
    return int(cap_mb * MIB)


def _bucket(gradients: list[ReadyGradient], element_bytes: int) -> Bucket:
    offsets = [0]
    for gradient in gradients:
        offsets.append(offsets[-1] + gradient.numel)
    numel = offsets.pop()
    return Bucket(
        names=tuple(gradient.name for gradient in gradients),
        offsets=tuple(offsets),
        numel=numel,
        num_bytes=element_bytes * numel,
        earliest_start=gradients[-1].ready_at,
    )

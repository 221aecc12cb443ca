"""Buckets by the rule of DistributedDataParallel, on made-up gradients."""

from hypothesis import given
from hypothesis import strategies as st

from mlperf_bert.distributed.bucket_plan import (
    MIB,
    Bucket,
    ReadyGradient,
    ddp_bucket_cap_mb,
    plan_buckets,
)


def gradients(numels: list[int]) -> list[ReadyGradient]:
    return [
        ReadyGradient(name=f"p{n}", numel=numel, ready_at=(n + 1) / len(numels))
        for n, numel in enumerate(numels)
    ]


def test_a_bucket_is_closed_once_it_holds_the_cap() -> None:
    buckets = plan_buckets(gradients([100, 156, 300, 1, 2]), 4, 1024 / MIB)
    assert buckets == [
        Bucket(
            names=("p0", "p1"), offsets=(0, 100), numel=256, num_bytes=1024, earliest_start=2 / 5
        ),
        Bucket(names=("p2",), offsets=(0,), numel=300, num_bytes=1200, earliest_start=3 / 5),
        Bucket(names=("p3", "p4"), offsets=(0, 1), numel=3, num_bytes=12, earliest_start=1.0),
    ]


def test_ddps_default_cap_has_a_small_first_bucket() -> None:
    quarter_mib = gradients([MIB // 16] * 200)
    assert [len(bucket.names) for bucket in plan_buckets(quarter_mib, 4, 25.0)] == [4, 100, 96]
    assert [len(bucket.names) for bucket in plan_buckets(quarter_mib, 4, 24.0)] == [96, 96, 8]
    assert ddp_bucket_cap_mb(25.0) is None
    assert ddp_bucket_cap_mb(24.0) == 24.0


@given(
    numels=st.lists(st.integers(1, 1000), max_size=30),
    element_bytes=st.sampled_from((2, 4)),
    cap_bytes=st.integers(1, 4000),
)
def test_every_gradient_is_in_one_bucket_and_only_the_last_may_be_short(
    numels: list[int], element_bytes: int, cap_bytes: int
) -> None:
    ready = gradients(numels)
    buckets = plan_buckets(ready, element_bytes, cap_bytes / MIB)
    assert [name for bucket in buckets for name in bucket.names] == [each.name for each in ready]
    sizes = {each.name: each.numel for each in ready}
    for bucket in buckets:
        ends = [*bucket.offsets[1:], bucket.numel]
        lengths = [end - start for start, end in zip(bucket.offsets, ends, strict=True)]
        assert lengths == [sizes[name] for name in bucket.names]
        assert bucket.num_bytes == element_bytes * bucket.numel
        assert element_bytes * bucket.offsets[-1] < cap_bytes
    assert all(bucket.num_bytes >= cap_bytes for bucket in buckets[:-1])

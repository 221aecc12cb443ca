"""Token packets: what is packed comes out again, whole, in parts and in any order."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.token_packets import (
    gathered_bytes,
    join,
    pack,
    packet_bytes,
    to_packet,
    token_dtype,
    unpack,
)

SMALL, LARGE = token_dtype(30_522), token_dtype(120_000)


def make_samples(lengths: list[int], vocab_size: int = 30_000) -> Samples:
    rng = np.random.default_rng(len(lengths) + sum(lengths))
    counts = np.array([rng.integers(1, length + 1) for length in lengths], dtype=np.int64)
    pairs = zip(lengths, counts, strict=True)
    positions = [np.sort(rng.choice(length, count, replace=False)) for length, count in pairs]
    return Samples(
        input_ids=rng.integers(0, vocab_size, sum(lengths)),
        lengths=np.array(lengths, dtype=np.int64),
        segment_b_start=np.array([rng.integers(0, n + 1) for n in lengths], dtype=np.int64),
        masked_positions=np.concatenate([*positions, np.zeros(0, dtype=np.int64)]),
        masked_ids=rng.integers(0, vocab_size, counts.sum()),
        masked_counts=counts,
        next_sentence_label=rng.integers(0, 2, len(lengths)),
    )


def assert_equal(found: Samples, expected: Samples) -> None:
    for field in fields(Samples):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.dtype == np.int64
        assert one.tolist() == other.tolist(), field.name


RAGGED = st.lists(st.lists(st.integers(1, 200), max_size=6), min_size=1, max_size=4)


@given(RAGGED, st.sampled_from([(SMALL, 30_522), (LARGE, 120_000)]))
def test_packets_that_follow_each_other_come_out_as_they_went_in(
    ragged: list[list[int]], token: tuple[str, int]
) -> None:
    samples = [make_samples(lengths, token[1]) for lengths in ragged]
    packets = unpack(np.concatenate([pack(each, token[0]) for each in samples]))
    assert len(packets) == len(samples)
    for packet, expected in zip(packets, samples, strict=True):
        assert_equal(packet.samples(), expected)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_samples_are_taken_whole(lengths: list[int], data: st.DataObject) -> None:
    packet = to_packet(make_samples(lengths), SMALL)
    places = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    taken = packet.take(np.array(places, dtype=np.int64))
    one_by_one = [packet.take(np.array([place])) for place in places]
    alone = packet.split(np.ones(len(lengths), dtype=np.int64))
    for place, single in zip(places, one_by_one, strict=True):
        start = sum(lengths[:place])
        assert single.lengths.tolist() == [lengths[place]]
        ids = packet.input_ids[start : start + lengths[place]]
        assert single.input_ids.tolist() == ids.tolist()
        assert_equal(single.samples(), alone[place].samples())
    if places:
        assert_equal(taken.samples(), join(one_by_one).samples())
    assert_equal(join(alone).samples(), packet.samples())


@pytest.mark.parametrize("token", [SMALL, LARGE])
def test_bytes_are_told_from_the_index(synthetic_data: Path, token: str) -> None:
    index = LengthIndex.open(synthetic_data / "train")
    reader = SampleReader(synthetic_data / "train", index.manifest)
    ids = np.random.default_rng(1).choice(index.manifest.num_samples, (3, 2, 4), replace=False)
    lengths, masked_counts = index.lengths[ids], index.masked_counts[ids]
    packets = [[len(pack(reader.read(forward), token)) for forward in rank] for rank in ids]
    assert packet_bytes(lengths, masked_counts, token).tolist() == packets
    largest = max(sum(rank) for rank in packets)
    assert gathered_bytes(lengths, masked_counts, token) == 2 * (largest + 8)


def test_a_token_takes_two_bytes_where_the_vocabulary_allows() -> None:
    assert np.dtype(token_dtype(2**16)).itemsize == 2
    assert np.dtype(token_dtype(2**16 + 1)).itemsize == 4

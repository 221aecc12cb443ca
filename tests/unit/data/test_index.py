"""The index of a prepared set: round trip, order, and refusal of anything incomplete."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mlperf_bert.config.files import load_config
from mlperf_bert.data.index import Baseline, LengthIndex, Manifest, ShardEntry, write_index
from mlperf_bert.data.set_checks import check_batch_fits
from mlperf_bert.errors import ConfigError, DataError
from shard_sets import manifest_of

LENGTHS = np.array([9, 16, 5, 9, 16, 7], dtype=np.uint16)
COUNTS = np.array([1, 2, 1, 1, 3, 1], dtype=np.uint8)


def manifest(**changes):
    shards = (
        ShardEntry("a.hdf5", 4, "b" * 64, "d" * 64),
        ShardEntry("b.hdf5", 2, "c" * 64, "e" * 64),
    )
    return manifest_of(shards, vocab_size=100, max_seq_length=16, max_predictions=3, **changes)


def test_a_batch_may_be_the_whole_set(tmp_path, tiny_config):
    config = load_config(tiny_config)  # of 16 samples
    for num_samples in (17, 16):
        index = Mock(manifest=Mock(num_samples=num_samples))
        check_batch_fits(config, index, tmp_path)
    index = Mock(manifest=Mock(num_samples=15))
    with pytest.raises(ConfigError, match="15 training examples, but a global batch needs 16"):
        check_batch_fits(config, index, tmp_path)


def test_round_trip(tmp_path):
    with pytest.raises(DataError, match="got 5 lengths and 6 masked counts"):
        write_index(tmp_path, manifest(), LENGTHS[:5], COUNTS)
    baseline = Baseline(
        context_free_accuracy=0.25, mask_only_accuracy=0.125, masked_tokens=9, mask_inputs=8
    )
    corpus = {"python_version": "3.11.7"}
    written = write_index(tmp_path, manifest(baseline=baseline, corpus=corpus), LENGTHS, COUNTS)
    index = LengthIndex.open(tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        index.lengths[0] = 1
    assert index.manifest == written == Manifest.load(tmp_path)
    assert index.manifest.baseline == baseline
    assert index.manifest.corpus == corpus
    np.testing.assert_array_equal(index.lengths, LENGTHS)
    np.testing.assert_array_equal(index.masked_counts, COUNTS)
    assert (index.lengths.dtype, index.masked_counts.dtype) == (np.uint16, np.uint8)
    assert index.order_by_length.dtype == np.uint32
    assert index.order_by_length.tolist() == [2, 5, 0, 3, 1, 4]
    assert {i: n for i, n in enumerate(written.length_histogram) if n} == {5: 1, 7: 1, 9: 2, 16: 2}
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "dataset.json",
        "lengths.u16",
        "masked_counts.u8",
        "order_by_length.u32",
    ]


@pytest.mark.parametrize(
    ("most", "digest"),
    [
        (3, "ab16d060ec446be87c0e2b6e04b353625ee68b6dd8eaaa84a2ab4d76c2372f82"),
        (255, "afe0475ac31972a5da8d8acce81cf97026e028867b0e9d2d6e4344ca5e2f3dea"),
        (256, None),  # a format of its own
    ],
)
def test_up_to_255_masked_positions_are_written_as_ever(tmp_path, most, digest):
    """As the first program of format 2 wrote them."""
    counts = COUNTS if digest else np.array([1, most, 255, 2, 1, 3], dtype=np.uint16)
    written = write_index(tmp_path, replace(manifest(), max_predictions=most), LENGTHS, counts)
    assert written.format_version == (2 if digest else 3)
    name = "masked_counts.u8" if digest else "masked_counts.u16"
    assert (tmp_path / "index" / name).read_bytes() == counts.tobytes()
    found = hashlib.sha256((tmp_path / "index" / "dataset.json").read_bytes()).hexdigest()
    assert digest in (None, found)


def test_an_interrupted_rewrite_leaves_no_manifest(tmp_path, monkeypatch):
    write_index(tmp_path, manifest(), LENGTHS, COUNTS)
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=[None, no_space]))  # at the second
    with pytest.raises(DataError, match="No space left"):
        write_index(tmp_path, manifest(), LENGTHS[::-1], COUNTS)
    with pytest.raises(DataError, match=r"not a prepared set; .*mlperf_bert prepare"):
        LengthIndex.open(tmp_path)
    assert not list((tmp_path / "index").glob(".*"))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("format_version", 9, "format_version is 9"),
        (
            "format_version",
            1,
            "but this program reads 2 or 3; delete index/dataset.json .* prepare",
        ),
        ("vocab_size", None, "manifest_sha256 does not match the contents"),
        ("mask_id", 99, "manifest_sha256 does not match the contents"),
        ("manifest_sha256", None, "has no key 'manifest_sha256'"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path, key, value, problem):
    write_index(tmp_path, manifest(), LENGTHS, COUNTS)
    path = tmp_path / "index" / "dataset.json"
    values = json.loads(path.read_bytes())
    if value is None:
        del values[key]
    else:
        values[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=problem) as caught:
        Manifest.load(tmp_path)
    assert "dataset.json" in str(caught.value)
    assert "\n" not in str(caught.value)

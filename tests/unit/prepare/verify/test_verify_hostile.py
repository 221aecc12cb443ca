"""Manifests and sidecars that were forged to bring `verify` down are refused in plain words."""

import hashlib
import json
from pathlib import Path

from mlperf_bert.common.records import write_json
from mlperf_bert.data.index import INDEX_ARRAYS, sidecar_path
from verify_cases import check, failed, shard, write_signed

MANIFEST = "train/index/dataset.json"


def test_all_samples_of_no_token(pair: Path) -> None:
    values = json.loads((pair / MANIFEST).read_bytes())
    histogram = values["length_histogram"]
    values["length_histogram"] = [sum(histogram)] + [0] * (len(histogram) - 1)
    write_signed(pair / MANIFEST, values)
    report = check(pair)
    assert "does not count the lengths" in failed(report)["index files"]
    assert "mean length 0.0" in report.to_text()


def test_far_more_samples_than_the_shard_has_room_for(pair: Path) -> None:
    count = 2**32 - 1000
    path = sidecar_path(shard(pair))
    sidecar = json.loads(path.read_bytes())
    sidecar |= {"num_samples": count, "shard_bytes": 2**55}
    for name, place in sidecar["datasets"].items():
        place["count"] = count + name.endswith("offsets")
    path.write_bytes(write_json(sidecar))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    values = json.loads((pair / MANIFEST).read_bytes())
    (entry,) = (one for one in values["shards"] if one["file"] == "b.hdf5")
    values["shards"] = [{**entry, "num_samples": count, "sidecar_sha256": digest}]
    values["num_samples"] = count
    values["length_histogram"] = [0] * values["max_seq_length"] + [count]
    for file, (_, dtype) in zip(values["index_files"], INDEX_ARRAYS, strict=True):
        file["size_bytes"] = count * int(dtype[-1])
    write_signed(pair / MANIFEST, values)
    report = check(pair, full=True)
    assert f"where {2**55} belong" in failed(report)["shard sizes"]
    found = {one.name: one for one in report.sets[0].checks}
    assert "not read: b.hdf5" in found["shard contents"].summary


def test_an_unknown_key_nested_to_any_depth(pair: Path) -> None:
    path = pair / MANIFEST
    text = path.read_text()
    problems = []
    for depth in range(900, 1000):
        nested = "[" * depth + "]" * depth
        path.write_text(text.replace("{", '{"x": ' + nested + ",", 1))
        problems.append(failed(check(pair))["manifest"])
    assert any("nested too deeply" in problem for problem in problems)

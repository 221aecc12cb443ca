"""Reading shards: any ids in any order, nothing mapped early, and no damaged file trusted."""

import json
import mmap
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import map_file
from mlperf_bert.data import shards
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import Manifest, ShardSettings, read_sidecar
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.prepare.build import write_shard
from mlperf_bert.prepare.examples import make_examples
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, Vocabulary
from plain_examples import as_documents
from support import prepare_small

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Manifest]:
    """A set of three shards, fresh for each test, as some tests damage it."""
    documents = (GOLDEN / "own_sentences.txt").read_text(encoding="utf-8").split("\n\n")
    texts = [tmp_path / f"part-{number}.txt" for number in range(3)]
    for number, path in enumerate(texts):
        path.write_text("\n\n".join(documents[number::3]), encoding="utf-8")
    manifest = prepare_small(
        texts,
        GOLDEN / "own_vocab.txt",
        tmp_path / "set",
        max_seq_length=64,
        max_predictions=10,
        dupe_factor=3,
        seed=1,
    )
    return tmp_path / "set", manifest


def test_samples_come_in_the_order_of_the_ids(prepared: tuple[Path, Manifest]) -> None:
    set_dir, manifest = prepared
    reader = SampleReader(set_dir, manifest)
    ids = np.random.default_rng(0).permutation(manifest.num_samples)
    together = reader.read(ids)
    alone = [reader.read(np.array([number])) for number in ids]
    for name in together.__slots__:
        values = getattr(together, name)
        assert values.dtype == np.int64
        np.testing.assert_array_equal(values, np.concatenate([getattr(one, name) for one in alone]))
    assert together.lengths.sum() == len(together.input_ids)
    assert (
        together.masked_counts.sum() == len(together.masked_ids) == len(together.masked_positions)
    )


def test_the_same_id_twice_is_read_twice(prepared: tuple[Path, Manifest]) -> None:
    samples = SampleReader(*prepared).read(np.array([5, 5]))
    first, second = np.split(samples.input_ids, 2)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
def test_ids_out_of_range(prepared: tuple[Path, Manifest], ids: list[int]) -> None:
    with pytest.raises(DataError, match="ask for ids of 0 "):
        SampleReader(*prepared).read(np.array(ids, dtype=np.int64))


def test_no_shard_is_mapped_before_the_first_read(
    prepared: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[str] = []

    def spy(path: Path, size: int, remedy: str) -> mmap.mmap:
        mapped.append(path.name)
        return map_file(path, size, remedy)

    monkeypatch.setattr(shards, "map_file", spy)
    reader = SampleReader(*prepared)
    assert mapped == []
    reader.read(np.array([0]))
    reader.read(np.array([1, 0]))
    assert mapped == ["part-0.hdf5"]


def test_a_pickled_reader_maps_the_files_itself(prepared: tuple[Path, Manifest]) -> None:
    reader = SampleReader(*prepared)
    everything = np.arange(prepared[1].num_samples)
    before = reader.read(everything)
    pickled = pickle.dumps(reader)
    assert len(pickled) < 5000
    np.testing.assert_array_equal(
        pickle.loads(pickled).read(everything).input_ids, before.input_ids
    )


def test_hdf5_readers_see_the_same_arrays(prepared: tuple[Path, Manifest]) -> None:
    import h5py

    path = prepared[0] / "shards" / "part-1.hdf5"
    arrays = Shard(path).arrays()
    with h5py.File(path) as file:
        assert set(file) == set(arrays.__slots__)
        for name in file:
            assert file[name].chunks is None
            np.testing.assert_array_equal(file[name][:], getattr(arrays, name))
            assert getattr(arrays, name).flags.aligned
            assert not getattr(arrays, name).flags.writeable


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    tokens = (*SPECIAL_TOKENS, *(f"w{i}" for i in range(70_000)))
    vocabulary = Vocabulary(tokens, {token: i for i, token in enumerate(tokens)}, "0" * 64, b"")
    settings = ShardSettings(
        vocabulary_sha256="0" * 64, max_seq_length=16, max_predictions=3, seed=0, dupe_factor=1
    )
    documents = as_documents([[[69_999, 8, 9]] * 9, [[70_001, 11]] * 9], len(tokens))
    examples = make_examples(documents, vocabulary, settings)
    path = tmp_path / "wide.hdf5"
    write_shard(path, examples, source_name="t", source_sha256="1" * 64, settings=settings)
    assert read_sidecar(path).datasets["input_ids"].dtype == "<u4"
    np.testing.assert_array_equal(Shard(path).arrays().input_ids, examples.input_ids)


@pytest.mark.parametrize("size", ["shorter", "longer", "missing", "pipe"])
def test_a_shard_of_another_size_is_refused(prepared: tuple[Path, Manifest], size: str) -> None:
    path = prepared[0] / "shards" / "part-1.hdf5"
    contents = path.read_bytes()
    if size in ("missing", "pipe"):
        path.unlink()
        if size == "pipe":
            os.mkfifo(path)
    else:
        path.write_bytes(contents[:-1] if size == "shorter" else contents + b"\0")
    with pytest.raises(DataError, match=r"part-1\.hdf5"):
        SampleReader(*prepared)


def test_a_shard_cut_short_after_opening_is_refused(prepared: tuple[Path, Manifest]) -> None:
    reader = SampleReader(*prepared)
    path = prepared[0] / "shards" / "part-0.hdf5"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="is 100 bytes"):
        reader.read(np.array([0]))


def test_advice_covers_the_pages_of_the_elements(
    prepared: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(prepared[0] / "shards" / "part-0.hdf5")
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(shards.mmap, "mmap", spied_map(advised))
    for name, place in shard.sidecar.datasets.items():
        shard.will_need(name, 1, place.count)
        option, start, length = advised.pop()
        assert option == mmap.MADV_WILLNEED
        assert start % mmap.PAGESIZE == 0
        assert start <= place.offset + np.dtype(place.dtype).itemsize
        assert start + length == place.end <= shard.sidecar.shard_bytes
    assert advised == []


def spied_map(advised: list[tuple[int, int, int]]) -> type[mmap.mmap]:
    class SpiedMap(mmap.mmap):
        def madvise(self, option: int, start: int, length: int) -> None:
            advised.append((option, start, length))
            super().madvise(option, start, length)

    return SpiedMap


def poke(path: Path, name: str, index: int, value: int) -> None:
    """Overwrite one element of a shard in place."""
    place = read_sidecar(path).datasets[name]
    array = np.memmap(path, place.dtype, mode="r+", offset=place.offset, shape=(place.count,))
    array[index] = value
    array.flush()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("input_ids", 0, 65_535),
        ("masked_lm_ids", 0, 60_000),
        ("masked_lm_positions", 0, 64),
        ("segment_b_start", 0, 65),
        ("next_sentence_label", 0, 2),
        ("offsets", 0, 1),
        ("offsets", 1, -1),
        ("offsets", 1, 0),
        ("offsets", 1, 2**62),
        ("offsets", 1, 65),
        ("offsets", -1, 2**40),
        ("masked_lm_offsets", 1, 11),
        ("masked_lm_offsets", 1, -(2**63)),
        ("masked_lm_offsets", -1, 0),
    ],
)
def test_damaged_values_are_refused(
    prepared: tuple[Path, Manifest], name: str, index: int, value: int
) -> None:
    poke(prepared[0] / "shards" / "part-0.hdf5", name, index, value)
    with pytest.raises(DataError, match="prepare") as read:
        SampleReader(*prepared).read(np.array([0, 1]))
    gatherer = Gatherer(SampleReader(*prepared))
    with pytest.raises(DataError) as gathered:
        gatherer.batch(np.array([0, 1]), mlm_denominator=1.0, nsp_denominator=1.0)
    assert str(gathered.value) == str(read.value)


def change(key: str, value: object) -> Callable[[dict], None]:
    def apply(sidecar: dict) -> None:
        *outer, last = key.split(".")
        for name in outer:
            sidecar = sidecar[name]
        if value is None:
            del sidecar[last]
        else:
            sidecar[last] = value

    return apply


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("format_version", 2, "format_version: is 2, this program reads 1"),
        ("num_samples", None, "num_samples: is missing"),
        ("num_samples", "5", "num_samples: is '5'"),
        ("num_samples", 3, "elements where"),
        ("datasets.offsets", None, "offsets: is missing"),
        ("datasets.offsets.offset", 10**9, "ends at byte"),
        ("datasets.offsets.offset", -8, "offset: is -8"),
        ("datasets.input_ids.count", 2**60, "count: is"),
        ("datasets.input_ids.count", True, "count: is True"),
        ("datasets.input_ids.dtype", "<f8", "dtype: is '<f8'"),
        ("datasets.input_ids.dtype", "|O", "dtype: is"),
        ("settings.seed", 7.5, "seed: is 7.5"),
        ("shard_sha256", "f" * 64, "where the set's manifest says"),
        ("settings.vocabulary_sha256", "f" * 64, "vocabulary_sha256"),
    ],
)
def test_wrong_sidecars_are_refused(
    prepared: tuple[Path, Manifest], key: str, value: object, problem: str
) -> None:
    path = prepared[0] / "shards" / "part-2.hdf5.json"
    sidecar = json.loads(path.read_bytes())
    change(key, value)(sidecar)
    path.write_text(json.dumps(sidecar))
    with pytest.raises(DataError, match=problem):
        SampleReader(*prepared)


@pytest.mark.parametrize("contents", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_sidecars_that_are_no_object_are_refused(
    prepared: tuple[Path, Manifest], contents: bytes
) -> None:
    (prepared[0] / "shards" / "part-0.hdf5.json").write_bytes(contents)
    with pytest.raises(DataError, match=r"part-0\.hdf5\.json"):
        SampleReader(*prepared)

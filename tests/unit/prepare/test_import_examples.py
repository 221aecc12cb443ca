"""Examples of others: the same ones give the same shard, whatever the format they come in."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from foreign_files import WRITERS, examples_of
from import_cases import GOLDEN, NAMES, ROOM, SMALL, VOCAB, WIDTH, bring, shard_of
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.data.index import LengthIndex, Manifest, examples_digest, read_sidecar
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.prepare.verify.check import verify
from support import contents, prepare_small, run_cli

OF_TENSORFLOW = Path(__file__).parents[2] / "data" / "tensorflow"


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_shards_of_the_text(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path, ending: str
) -> None:
    # Processes take their time to start: one format has two.
    workers = 2 if ending == "packed.hdf5" else 1
    manifest = bring(foreign[ending][::-1], tmp_path / "set", workers=workers)
    assert [entry.num_samples for entry in manifest.shards] == [
        entry.num_samples for entry in Manifest.load(from_text).shards
    ]
    for path, name in zip(foreign[ending], NAMES, strict=True):
        ours = shard_of(tmp_path / "set", path.stem)
        # Equal arrays give equal bytes, and unequal ones do not.
        assert ours.read_bytes() == shard_of(from_text, name).read_bytes()
    digests = {
        examples_digest(read_sidecar(path) for path in sorted(each.glob("shards/*.hdf5")))
        for each in (tmp_path / "set", from_text)
    }
    assert len(digests) == 1 and None not in digests
    found, expected = (LengthIndex.open(each) for each in (tmp_path / "set", from_text))
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.masked_counts, expected.masked_counts)


@pytest.mark.parametrize("ending", ["tfrecord", "tfrecord.gz"])
def test_what_tensorflow_wrote_is_read_equal(tmp_path: Path, ending: str) -> None:
    path = OF_TENSORFLOW / f"own_seq64_dupe3_seed12345.{ending}"
    bring([path], tmp_path / "set")
    arrays = Shard(shard_of(tmp_path / "set", path.stem)).arrays()
    golden = np.load(GOLDEN / "own_seq64_dupe3_seed12345.npz")
    assert len(golden["input_ids"]) > 6000
    for name in golden:
        np.testing.assert_array_equal(getattr(arrays, name), golden[name])


def test_a_restart_keeps_finished_shards(foreign: dict[str, list[Path]], tmp_path: Path) -> None:
    files, set_dir = foreign["tfrecord"], tmp_path / "set"
    bring(files, set_dir)
    before = contents(set_dir)
    kept, lost = (shard_of(set_dir, name) for name in NAMES)
    kept_since = kept.stat().st_mtime_ns
    shutil.rmtree(set_dir / "index")
    os.truncate(lost, lost.stat().st_size - 1)
    (set_dir / "shards" / f".{NAMES[1]}.hdf5.1.tmp").write_bytes(b"left by a killed run")
    bring(files, set_dir)
    assert contents(set_dir) == before
    assert kept.stat().st_mtime_ns == kept_since


def test_other_limits_or_files_in_the_same_directory_are_refused(
    foreign: dict[str, list[Path]], tmp_path: Path
) -> None:
    files = [Path(shutil.copy(path, tmp_path)) for path in foreign["tfrecord"]]
    bring(files, tmp_path / "set")
    before = contents(tmp_path / "set")
    with pytest.raises(DataError, match="max_seq_length = 64, now it is 128"):
        bring(files, tmp_path / "set", max_seq_length=128)
    shutil.copy(files[1], files[0])
    with pytest.raises(DataError, match=r"part-0.*text sha256"):
        bring(files, tmp_path / "set")
    assert contents(tmp_path / "set") == before


def test_a_file_that_is_there_twice_is_found_by_the_check_at_the_end(
    foreign: dict[str, list[Path]], tmp_path: Path
) -> None:
    path = foreign["tfrecord"][0]
    twin = Path(shutil.copy(path, tmp_path / "twin.tfrecord"))
    with pytest.raises(DataError, match="was made from the same text as part-0"):
        bring([path, twin], tmp_path / "set")


def test_pick_eval_takes_evenly_and_stores_the_baseline(
    foreign: dict[str, list[Path]], from_text: Path, tmp_path: Path
) -> None:
    (path, _) = foreign["fixed.hdf5"]
    picked = bring([path], tmp_path / "set", pick_eval=7)
    everything = Manifest.load(from_text)
    total = everything.shards[0].num_samples
    expected = SampleReader(from_text, everything).read(
        np.array([int(i * total / 7) for i in range(7)])
    )
    found = SampleReader(tmp_path / "set", picked).read(np.arange(7))
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)
    assert picked.baseline is not None
    assert picked.baseline.masked_tokens == len(found.masked_ids)
    with pytest.raises(DataError, match=f"holds {total} examples where 5000 are to be picked"):
        bring([path], tmp_path / "more", pick_eval=5000)


def with_more_words(directory: Path, number: int) -> Path:
    words = VOCAB.read_text(encoding="utf-8").splitlines()
    words += [f"more{each}" for each in range(number)]
    vocab = directory / "vocab.txt"
    vocab.write_text("\n".join(words) + "\n", encoding="utf-8")
    return vocab


def test_a_vocabulary_of_more_than_sixteen_bits(from_text: Path, tmp_path: Path) -> None:
    vocab = with_more_words(tmp_path, 70_000)
    text = from_text.parent / f"{NAMES[0]}.txt"
    prepare_small([text], vocab, tmp_path / "made", **SMALL, dupe_factor=1)
    expected = Shard(shard_of(tmp_path / "made", NAMES[0])).arrays()
    path = tmp_path / f"{NAMES[0]}.tfrecord"
    WRITERS["tfrecord"](path, examples_of(shard_of(tmp_path / "made", NAMES[0])), WIDTH, ROOM)
    bring([path], tmp_path / "set", vocab=vocab)
    found = Shard(shard_of(tmp_path / "set", NAMES[0])).arrays()
    assert found.input_ids.dtype == np.uint32
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)


@pytest.mark.parametrize("number", [200, 70_000])
def test_a_vocabulary_with_words_behind_that_no_random_token_is_of(
    foreign: dict[str, list[Path]], tmp_path: Path, number: int
) -> None:
    vocab = with_more_words(tmp_path, number)
    with pytest.raises(DataError, match="is larger than the one it was made with"):
        bring(foreign["tfrecord"][:1], tmp_path / "set", vocab=vocab)
    assert not (tmp_path / "set" / "index").exists()


def test_a_tokenizer_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab.*give the vocab\.txt"):
        bring([tmp_path / "none.tfrecord"], tmp_path / "set", vocab=tmp_path / "tokenizer.json")


def test_the_same_examples_in_another_form_are_found(
    foreign: dict[str, list[Path]], tmp_path: Path
) -> None:
    kinds = ("tfrecord", "tfrecord.gz")
    twins = [Path(shutil.copy(foreign[kind][0], tmp_path / f"{kind}.tfrecord")) for kind in kinds]
    with pytest.raises(DataError, match=r"holds the same examples as tfrecord\.hdf5"):
        bring(twins, tmp_path / "set")
    for kind, part in zip(kinds, ("train", "eval"), strict=True):
        bring(foreign[kind][:1], tmp_path / "pair" / part)
    (problem,) = verify(tmp_path / "pair", full=False, workers=1, quiet=True).problems()
    assert "holds the same examples as train's part-0" in str(problem)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"max_seq_length": 63}, "more tokens than --max-seq-length"),
        ({"max_predictions": 9}, "more masked positions than --max-predictions"),
        ({"max_seq_length": 128, "max_predictions": 20}, None),  # the limit of ten did not bind
        ({"max_seq_length": 7}, "max_seq_length: is 7"),
        ({"workers": 0}, "workers: is 0"),
    ],
)
def test_limits(
    foreign: dict[str, list[Path]], tmp_path: Path, limits: dict[str, int], problem: str | None
) -> None:
    (path, _) = foreign["tfrecord"]
    if problem is None:
        assert bring([path], tmp_path / "set", **limits).num_samples > 0
        return
    with pytest.raises((DataError, ConfigError), match=problem):
        bring([path], tmp_path / "set", **limits)


def test_command_line(foreign: dict[str, list[Path]], tmp_path: Path) -> None:
    words = ("--vocab", VOCAB, "--max-seq-length", WIDTH, "--max-predictions", ROOM)
    words = (*words, "--workers", 1)
    files = foreign["packed.hdf5"]
    done = run_cli("prepare", "--hdf5", *files, "--out", tmp_path / "set", *words)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "set")
    assert f"{manifest.num_samples} examples in 2 shards" in done.stdout
    assert manifest.corpus == {"examples": "imported from HDF5 files"}
    done = run_cli("prepare", "--tfrecord", *files, "--out", tmp_path / "other", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "part-0.packed.hdf5: record 0: has a length that differs" in done.stderr

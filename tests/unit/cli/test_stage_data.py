"""Staged data: the same losses from a copy, only what a node reads, nothing half-written."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.cli import stage_data
from mlperf_bert.cli.stage_data import PAGE_BYTES, copy_samples, planned_samples
from mlperf_bert.common.errors import TARGET_MISSED, DataError
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import LengthIndex, Manifest, sidecar_path
from mlperf_bert.data.shards import SampleReader, Shard
from support import contents, metrics_losses, refusal

Command = Callable[..., int]


@pytest.fixture
def words(tiny_config: Path, synthetic_data: Path) -> Callable[..., list[str]]:
    """`NAME ...` on the tiny config and the synthetic data, unless told otherwise."""

    def of(name: str, *extra: object, data: Path = synthetic_data, sets: str = "") -> list[str]:
        settings = (word for setting in sets.split() for word in ("--set", setting))
        places = ["--config", str(tiny_config), "--data", str(data)]
        return [name, *places, *settings, *map(str, extra)]

    return of


@pytest.fixture
def command(words: Callable[..., list[str]]) -> Command:
    """The status of such a command."""
    return lambda *given, **options: main(words(*given, **options))


@pytest.fixture
def refused(
    words: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The one line of such a command, which is refused."""
    return lambda *given, **options: refusal(capsys, *words(*given, **options))


@pytest.fixture
def staged(command: Command, tmp_path: Path) -> Path:
    """A node's part, of four steps."""
    assert command("stage-data", "--out", tmp_path / "stage", sets="run.max_steps=4") == 0
    return tmp_path / "stage"


@pytest.mark.parametrize("balance", ["none", "presort_global"])
def test_training_on_a_stage_gives_the_losses_of_the_source(
    command: Command, tmp_path: Path, balance: str
) -> None:
    sets = f"run.max_steps=4 data.balance={balance}"
    assert command("stage-data", "--out", tmp_path / "stage", sets=sets) == 0
    assert command("train", "--run-dir", tmp_path / "a", sets=sets) == TARGET_MISSED
    staged = command("train", "--run-dir", tmp_path / "b", sets=sets, data=tmp_path / "stage")
    assert staged == TARGET_MISSED
    assert metrics_losses(tmp_path / "a") == metrics_losses(tmp_path / "b")


@pytest.mark.parametrize("setting", ["run.seed=random", "run.max_steps=4"])
def test_a_whole_copy_is_the_source_byte_for_byte(
    command: Command, synthetic_data: Path, tmp_path: Path, setting: str
) -> None:
    extra = ["--whole"] if "steps" in setting else []
    assert command("stage-data", "--out", tmp_path / "stage", *extra, sets=setting) == 0
    for name in ("train", "eval"):
        copy = contents(tmp_path / "stage" / name)
        assert json.loads(copy.pop("stage.json"))["part"] is None
        assert copy == contents(synthetic_data / name)
    assert main(["verify", str(tmp_path / "stage"), "--full", "--workers", "1"]) == 0


@pytest.mark.parametrize("balance", ["presort_global", "exchange_global"])
def test_what_a_node_reads_is_planned(
    tiny_config: Path, synthetic_data: Path, balance: str
) -> None:
    sets = ["parallel.nodes=2", "parallel.ranks_per_node=2", "parallel.local_batch_size=4"]
    config = load_config(tiny_config, [*sets, f"data.balance={balance}", "run.max_steps=3"])
    index = LengthIndex.open(synthetic_data / "train")
    planner = make_planner(config, index, seed=11)
    nodes = [planned_samples(config, index, node) for node in (0, 1)]
    for step in (1, 2, 3):
        plan = planner.plan(step)
        for rank in range(4):
            # Ranks that exchange read what was drawn for them, the others what they compute.
            reads = plan.drawn_ids[rank].ravel() if "exchange" in balance else plan.ids_of(rank, 0)
            assert nodes[rank // 2][reads].all()
    # 3 steps of 8 samples a node, and the steps that loaders and readers run ahead.
    assert not (nodes[0] & nodes[1]).any()  # within an epoch
    assert all(3 * 8 <= node.sum() < len(index.lengths) / 2 for node in nodes)


def test_another_run_on_a_partial_stage_is_refused(
    refused: Callable[..., str], staged: Path, tmp_path: Path
) -> None:
    for setting, problem in (
        ("run.seed=12", "run.seed: is 12.*holds the samples of 11 only"),
        ("run.seed=random", "run.seed: is 'random'"),
        ("data.skip_samples=16", "data.skip_samples: is 16.*holds the samples of 0 only"),
        ("run.max_steps=5", "run.max_steps: is 5.*holds 4 steps"),
        ("data.sampler=quantile", "data.sampler: is 'quantile'"),
        ("parallel.local_batch_size=8", "parallel.local_batch_size: is 8"),
        ("data.exchange_window_steps=64", "data.exchange_window_steps: is 64"),
    ):
        sets = f"run.max_steps=4 {setting}"
        error = refused("train", "--run-dir", tmp_path / "run", data=staged, sets=sets)
        assert re.search(problem, error), error
        assert not (tmp_path / "run").exists()


def test_the_part_of_another_node_is_refused(
    command: Command, refused: Callable[..., str], tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    sets = "run.max_steps=2 parallel.nodes=2 parallel.local_batch_size=8"
    assert command("stage-data", "--out", stage, "--node", 1, sets=sets) == 0
    record = stage / "train" / "stage.json"
    as_one_rank = record.read_text().replace('"parallel.nodes": 2', '"parallel.nodes": 1')
    record.write_text(as_one_rank)  # one process can only be rank 0 of a job of one
    sets = "run.max_steps=2 parallel.local_batch_size=8"
    error = refused("train", "--run-dir", tmp_path / "run", data=stage, sets=sets)
    assert "part of node 1, rank 0 runs on node 0; run `mlperf_bert stage-data --node 0`" in error


def test_a_stage_of_another_set_is_refused(
    refused: Callable[..., str], staged: Path, tmp_path: Path
) -> None:
    other = json.loads((staged / "eval/stage.json").read_text())["manifest_sha256"]
    record = staged / "train/stage.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "manifest_sha256": other}))
    error = refused("train", "--run-dir", tmp_path / "run", data=staged, sets="run.max_steps=4")
    assert "stage.json: was written for another set" in error


def test_wrong_options_are_one_line_and_write_nothing(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    for extra, sets, problem in (
        ("", "parallel.nodes=2", r"--node: is missing.*0 \.\. 1"),
        ("--node 2", "parallel.nodes=2", r"--node: is 2.*0 \.\. 1"),
        ("--node -1", "", "--node: is -1"),
        ("", "data.sampler=strata_4_2_2_4", "data.sampler.*'quantile'"),
        ("", "model.vocab_size=70", "model.vocab_size"),
        ("", "parallel.local_batch_size=9999", "too few examples: .* a global batch needs 9,999; "),
    ):
        error = refused("stage-data", "--out", tmp_path / "stage", *extra.split(), sets=sets)
        assert re.search(problem, error), error
        assert not (tmp_path / "stage").exists()


def test_other_contents_are_left_alone(
    refused: Callable[..., str], staged: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes" / "train").mkdir(parents=True)
    (tmp_path / "notes" / "train" / "precious.txt").write_text("precious\n")
    (tmp_path / "loop").symlink_to("loop")
    before = contents(tmp_path)
    refused("stage-data", "--out", tmp_path / "loop")
    for out, extra, words in (
        ("notes", [], "holds files but no stage"),
        ("stage", ["--whole"], "holds another stage"),
        ("stage", ["--set", "run.seed=12"], "holds another stage"),
    ):
        error = refused("stage-data", "--out", tmp_path / out, *extra, sets="run.max_steps=4")
        assert words in error and "new directory" in error
    error = refused("stage-data", "--out", tmp_path / "notes", "--replace", sets="run.max_steps=4")
    assert "holds files but no stage" in error
    for out in (synthetic_data, synthetic_data / "train"):
        assert "is the source" in refused("stage-data", "--out", out)
    error = refused("stage-data", "--out", tmp_path / "second", data=staged)
    assert "is a partial stage itself" in error
    assert contents(tmp_path) == before


def test_a_part_takes_the_place_of_another(
    command: Command, staged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the copy of a run with another seed, also where it was cut short."""
    kept = [staged / "train/index/order_by_length.u32", staged / "eval/shards/eval.hdf5"]
    inodes = [path.stat().st_ino for path in kept]
    options = ["--out", staged, "--replace"]
    with monkeypatch.context() as cut:
        cut.setattr(stage_data, "write_file", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command("stage-data", *options, sets="run.max_steps=4 run.seed=12")
    assert not (staged / "train/index/dataset.json").exists()  # nothing trains on it
    assert not list(staged.glob("train/shards/*"))  # nor takes it for a finished copy
    assert command("stage-data", *options, sets="run.max_steps=4 run.seed=12") == 0
    assert [path.stat().st_ino for path in kept] == inodes  # the same for both
    anew = tmp_path / "anew"
    assert command("stage-data", "--out", anew, sets="run.max_steps=4 run.seed=12") == 0
    assert contents(staged) == contents(anew)


def test_a_whole_copy_serves_every_seed_and_stays_whole(
    command: Command, refused: Callable[..., str], tmp_path: Path
) -> None:
    out, sets = ["--out", tmp_path / "stage"], "run.max_steps=4 run.seed=12"
    assert command("stage-data", *out, "--whole") == 0
    before = contents(tmp_path)
    (tmp_path / "stage" / "train" / "shards" / "train.hdf5").unlink()
    assert command("stage-data", *out, "--replace", sets=sets) == 0
    assert contents(tmp_path) == before
    mark = tmp_path / "stage" / "train" / "stage.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "manifest_sha256": "0" * 64}))
    before = contents(tmp_path)
    error = refused("stage-data", *out, "--replace", sets=sets)
    assert "holds a whole copy of another set" in error and contents(tmp_path) == before


@pytest.mark.parametrize("extra", [(), ("--whole",)])
def test_a_restart_makes_what_is_missing_or_damaged(
    command: Command, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    out = ["--out", tmp_path / "stage", *extra]
    assert command("stage-data", *out, sets="run.max_steps=4") == 0
    before = contents(tmp_path)
    shard = tmp_path / "stage" / "train" / "shards" / "train.hdf5"
    inode = shard.stat().st_ino
    (tmp_path / "stage" / "train" / "index" / "dataset.json").unlink()
    (shard.parent / ".train.hdf5.1234.tmp").write_bytes(b"left by a killed process")
    assert command("stage-data", *out, sets="run.max_steps=4") == 0
    assert shard.stat().st_ino == inode  # finished ones are not copied again
    assert contents(tmp_path) == before
    if extra:  # of a part the digest is not known
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
        assert command("stage-data", *out, sets="run.max_steps=4") == 0
        assert contents(tmp_path) == before


def unreadable(*_: object) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("extra", [(), ("--whole",)])
def test_an_unreadable_source_leaves_no_half_shard(
    command: Command,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: tuple[str, ...],
) -> None:
    class Broken(FileIO):
        read = unreadable

    monkeypatch.setattr(stage_data, "_opened", lambda path: Broken(path, "rb"))
    out = tmp_path / "stage"
    error = refused("stage-data", "--out", out, *extra, sets="run.max_steps=4")
    assert "train.hdf5: Input/output error; check the source" in error
    assert contents(out).keys() == {"train/stage.json"}
    monkeypatch.undo()
    assert command("stage-data", "--out", out, *extra, sets="run.max_steps=4") == 0


def test_a_full_disk_leaves_no_half_shard(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    error = refused("stage-data", "--out", tmp_path / "stage", "--whole")
    assert "No space left on device; check the directory" in error
    assert contents(tmp_path) == {}


def test_a_source_that_is_not_its_sidecars_is_refused(
    refused: Callable[..., str], synthetic_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(synthetic_data, tmp_path / "data")
    shard = tmp_path / "data" / "train" / "shards" / "train.hdf5"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    out = ["--out", tmp_path / "stage", "--whole"]
    assert "its sha256 differs" in refused("stage-data", *out, data=tmp_path / "data")
    assert not (tmp_path / "stage" / "train" / "shards" / "train.hdf5").exists()


def test_verify_says_that_a_stage_is_partial(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(staged), "--full", "--workers", "1"]) == 0
    report = capsys.readouterr().out
    assert "not read: a partial stage" in report and "WRONG" not in report


def test_a_partial_stage_holds_the_wanted_samples_and_refuses_the_others(
    synthetic_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(synthetic_data / "train", tmp_path / "set")
    manifest = Manifest.load(tmp_path / "set")
    shard = Shard(synthetic_data / "train" / "shards" / "train.hdf5")
    is_wanted = np.zeros(manifest.num_samples, dtype=np.bool_)
    is_wanted[[0, 17, manifest.num_samples - 1]] = True
    copy = tmp_path / "set" / "shards" / "train.hdf5"
    copy.unlink()
    copy_samples(shard, is_wanted, copy)
    assert copy.stat().st_size == shard.path.stat().st_size
    whole = SampleReader(synthetic_data / "train", manifest)
    part = SampleReader(tmp_path / "set", manifest)
    for number in np.flatnonzero(is_wanted):
        ids = np.array([number])
        assert np.array_equal(part.read(ids).input_ids, whole.read(ids).input_ids)
        assert np.array_equal(part.read(ids).masked_ids, whole.read(ids).masked_ids)
    for number in np.flatnonzero(~is_wanted):
        with pytest.raises(DataError, match="next_sentence_label"):
            part.read(np.array([number]))


def test_only_the_pages_of_wanted_samples_are_copied(synthetic_data: Path, tmp_path: Path) -> None:
    shard = Shard(synthetic_data / "train" / "shards" / "train.hdf5")
    place, offsets = shard.sidecar.datasets["input_ids"], shard.arrays().offsets
    starts = place.offset + offsets[:-1] * np.dtype(place.dtype).itemsize
    stops = place.offset + offsets[1:] * np.dtype(place.dtype).itemsize
    on_two_pages = np.flatnonzero(starts // PAGE_BYTES != (stops - 1) // PAGE_BYTES)
    number = on_two_pages[len(on_two_pages) // 2]
    is_wanted = np.zeros(len(starts), dtype=np.bool_)
    copy_samples(shard, is_wanted, tmp_path / "none.hdf5")
    is_wanted[number] = True
    copy_samples(shard, is_wanted, tmp_path / "one.hdf5")
    source = shard.path.read_bytes()
    none, one = ((tmp_path / f"{name}.hdf5").read_bytes() for name in ("none", "one"))
    touched = {starts[number] // PAGE_BYTES, starts[number] // PAGE_BYTES + 1}
    of_tokens_only = range(-(-place.offset // PAGE_BYTES), place.end // PAGE_BYTES)
    assert touched < set(of_tokens_only)
    for page in of_tokens_only:
        span = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
        assert none[span] == bytes(PAGE_BYTES)
        assert one[span] == (source[span] if page in touched else bytes(PAGE_BYTES))


@pytest.mark.parametrize("value", [-1, 0, 2**40])
def test_damaged_offsets_are_refused(synthetic_data: Path, tmp_path: Path, value: int) -> None:
    damaged = tmp_path / "train.hdf5"
    shutil.copy(synthetic_data / "train" / "shards" / "train.hdf5", damaged)
    shutil.copy(sidecar_path(synthetic_data / "train" / "shards" / "train.hdf5"), tmp_path)
    shard = Shard(damaged)
    place = shard.sidecar.datasets["offsets"]
    array = np.memmap(damaged, place.dtype, mode="r+", offset=place.offset, shape=(place.count,))
    array[5] = value
    array.flush()
    is_wanted = np.zeros(shard.sidecar.num_samples, dtype=np.bool_)
    is_wanted[4] = True
    with pytest.raises(DataError, match="offsets: does not ascend; check the source"):
        copy_samples(shard, is_wanted, tmp_path / "copy.hdf5")
    assert not list(tmp_path.glob("*copy*"))

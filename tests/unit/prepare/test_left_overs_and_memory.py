"""What `prepare` may delete in its directory, and what it says when memory does not suffice."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlperf_bert.common.atomic import remove_temporaries, replaced_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import Manifest
from support import run_process

Prepare = Callable[..., Manifest]
OWN_VOCAB = Path(__file__).parents[2] / "golden" / "data" / "own_vocab.txt"
LEFT_BY_KILLED_RUNS = [
    ".vocab.txt.77.tmp",
    "shards/.part-00000.hdf5.77.tmp",
    "shards/.part-00001.hdf5.json.77.tmp",
    "index/.lengths.u16.77.tmp",
    "index/.dataset.json.77.tmp",
    "index/.dataset.json.77-0123abcd.tmp",
]
OF_THE_USER = [".notes.tmp", ".notes.77.tmp", "index/.vocab.txt.77.tmp", "shards/.part.x.tmp"]

# Leaves argv[4] bytes to grow by, once everything is loaded and compiled.
WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from mlperf_bert.prepare import build
def compile_and_limit(segments, vocabulary, compile_maker=build.compile_maker):
    compile_maker(segments, vocabulary)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[4]),) * 2)
build.compile_maker = compile_and_limit
text, vocab, out = map(Path, sys.argv[1:4])
try:
    settings = build.ShardSettings(
        max_seq_length=64, max_predictions=10, dupe_factor=10_000, seed=1
    )
    build.prepare_text([text], vocab, out, settings, workers=1, quiet=True)
except build.DataError as error:
    print(error)
"""


def test_left_overs_go_and_files_of_the_user_stay(
    prepare: Prepare, texts: list[Path], tmp_path: Path
) -> None:
    set_dir = tmp_path / "set"
    prepare(texts)
    for name in LEFT_BY_KILLED_RUNS + OF_THE_USER:
        (set_dir / name).write_text("something")
    with pytest.raises(DataError, match="seed = 12345"):
        prepare(texts, seed=1)
    assert all((set_dir / name).exists() for name in LEFT_BY_KILLED_RUNS)  # nothing touched
    prepare(texts)
    found = {path.relative_to(set_dir).as_posix() for path in set_dir.rglob(".*")}
    assert found == set(OF_THE_USER)


def test_files_that_another_machine_is_writing_stay(tmp_path: Path) -> None:
    with replaced_file(tmp_path / "a.hdf5") as ours:
        ours.touch()
        there = ours.name.removesuffix(".tmp").rpartition("-")[0] + "-0123abcd.tmp"
        theirs = ours.with_name(there)
        theirs.touch()
        remove_temporaries(tmp_path, {"a.hdf5"}, of="this machine")
        assert not ours.exists()
        assert theirs.exists()
        remove_temporaries(tmp_path, {"a.hdf5"})
        assert not theirs.exists()
        ours.touch()


def test_shards_of_files_that_are_not_given_now_are_no_left_overs_to_replace(
    prepare: Prepare, texts: list[Path], tmp_path: Path
) -> None:
    prepare(texts)
    index = tmp_path / "set" / "index" / "dataset.json"
    before = index.read_bytes()
    with pytest.raises(DataError, match=r"part-00001\.hdf5: is the shard of a file that is not"):
        prepare(texts[:1])
    assert index.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_too_little_memory_is_one_line(texts: list[Path], tmp_path: Path) -> None:
    arguments = (texts[0], OWN_VOCAB, tmp_path / "set", 2**25)
    done = run_process(sys.executable, "-c", WITH_LITTLE_MEMORY, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{texts[0]}: needs more memory than there is; " in done.stdout
    assert done.stdout.count("\n") == 1
    assert list((tmp_path / "set" / "shards").iterdir()) == []

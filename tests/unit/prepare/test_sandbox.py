"""The sandbox: whatever a file makes of its reader, the asking process goes on."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hostile_readers import DEEDS
from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare.sandbox import Limits, Sandbox, sandbox
from support import run_process

LIMITS = Limits(memory_bytes=2**28, cpu_seconds=1, wall_seconds=3, answer_bytes=2**20)
REMEDY = "get another file"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox("hostile_readers:obey", LIMITS) as running:
        yield running


def file_with(directory: Path, deed: str) -> Path:
    path = directory / f"{deed}.hdf5"
    path.write_text(deed)
    return path


def refused(box: Sandbox, path: Path) -> str:
    with pytest.raises(DataError) as raised:
        box.read_record(path, REMEDY)
    line = str(raised.value)
    assert line.startswith(str(path)) and line.endswith(REMEDY)
    assert line.isprintable() and len(line) < 1000
    return line


def test_an_answer_comes_back(box: Sandbox, tmp_path: Path) -> None:
    path = file_with(tmp_path, "answer")
    assert box.read_record(path, REMEDY).values == {"path": str(path)}
    copy: Sandbox = pickle.loads(pickle.dumps(box))
    assert copy.read_bytes(path, REMEDY) == f'{{"path": "{path}"}}'.encode()


def test_a_long_answer_comes_in_pieces(tmp_path: Path) -> None:
    poured = b"".join(bytes([number]) * 2**20 for number in range(5))
    with sandbox("hostile_readers:obey", Limits(answer_bytes=8 * 2**20)) as running:
        path = file_with(tmp_path, "pour")
        pieces = list(running.read_pieces(path, REMEDY))
        assert len(pieces) > 2 and max(map(len, pieces)) < 3 * 2**20
        assert b"".join(pieces) == poured
        # The next process is asked as if nothing had been, also where an answer is not heard out.
        assert poured.startswith(next(running.read_pieces(path, REMEDY)))
        failing = running.read_pieces(file_with(tmp_path, "pour_and_fail"), REMEDY)
        heard = bytearray()
        with pytest.raises(DataError, match=r"cannot be read .the rest is missing"):
            for piece in failing:
                heard += piece
        assert heard and poured.startswith(heard)
        with pytest.raises(DataError, match="answer more than 8,388,608 bytes"):
            list(running.read_pieces(file_with(tmp_path, "flood"), REMEDY))


def test_names_of_any_kind(box: Sandbox, tmp_path: Path) -> None:
    for name in ("line\nend", "blank and ü", "\udcff"):
        path = tmp_path / name
        path.write_text("answer")
        assert box.read_record(path, REMEDY).values == {"path": str(path)}


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("crash", "ends its reader process with SIGSEGV"),
        ("sleep", "not read within 3 s"),
        ("grow", "needs more than 256 MiB to be read"),
        ("write", "File too large"),
        ("open_many", "Too many open files"),
        ("flood", "answer more than 1,048,576 bytes"),
        ("fail", r"cannot be read (odd\n\x1b[31mxxx"),
        ("babble", "answer no JSON object"),
        ("nest", "answer no JSON object"),
    ],
)
def test_a_hostile_file_is_an_error_of_one_line(
    box: Sandbox, tmp_path: Path, deed: str, words: str
) -> None:
    assert words in refused(box, file_with(tmp_path, deed))
    # The next one is answered as if nothing had been, and nothing was written.
    assert box.read_record(file_with(tmp_path, "answer"), REMEDY).values
    assert not any(path.stat().st_size for path in tmp_path.glob("*.written"))


def test_a_pickle_is_bytes_and_no_more(box: Sandbox, tmp_path: Path) -> None:
    path = file_with(tmp_path, "pickled")
    trap = path.with_suffix(".unpickled")
    assert "answer no JSON object" in refused(box, path)
    answer = box.read_bytes(path, REMEDY)
    assert not trap.exists()
    pickle.loads(answer)
    assert trap.exists()  # so it would have been


def test_a_file_that_keeps_its_reader_busy(tmp_path: Path) -> None:
    with sandbox("hostile_readers:obey", Limits(cpu_seconds=1)) as running:
        line = refused(running, file_with(tmp_path, "spin"))
    assert "not read within 1 s of processor time" in line


def test_time_is_given_by_the_piece(tmp_path: Path) -> None:
    limits = Limits(cpu_seconds=60, piece_cpu_seconds=1, answer_bytes=8 * 2**20)
    with sandbox("hostile_readers:obey", limits) as running:
        heard = bytearray()
        with pytest.raises(DataError, match="takes its reader 1 s of processor time at one place"):
            for piece in running.read_pieces(file_with(tmp_path, "pour_and_spin"), REMEDY):
                heard += piece
    assert len(heard) > 3 * 2**20  # more pieces than one piece's time is for


def test_every_deed_of_the_hostile_reader_is_tried() -> None:
    (mark,) = test_a_hostile_file_is_an_error_of_one_line.pytestmark
    elsewhere = {"answer", "look_around", "spin", "pour", "pour_and_fail"}
    elsewhere |= {"pour_and_spin", "pickled"}
    assert {deed for deed, _ in mark.args[1]} | elsewhere == set(DEEDS)


def test_the_child_has_neither_torch_nor_open_files_of_ours(box: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w"):
        around = box.read_record(file_with(tmp_path, "look_around"), REMEDY).values
    assert not {"torch", "numba", "mlperf_bert.data"} & set(around["modules"])
    own = [name for name in around["files"] if not name.startswith(("/dev/null", "/proc/"))]
    assert len(own) == 1 and own[0].startswith("socket:")


def test_a_file_that_hangs_keeps_no_other_waiting_and_ends_with_the_sandbox(tmp_path: Path) -> None:
    hanging, good = file_with(tmp_path, "sleep"), file_with(tmp_path, "answer")
    with (
        ThreadPoolExecutor(1) as pool,
        sandbox("hostile_readers:obey", Limits(wall_seconds=3600)) as running,
    ):
        stuck = pool.submit(refused, running, hanging)
        for _ in range(20):
            assert running.read_record(good, REMEDY).values
        assert not stuck.done()
    line = stuck.result()
    assert "reader process is gone" in line or "does not answer" in line
    assert "does not answer" in refused(running, good)


def test_a_reader_that_cannot_be_imported_is_no_hang(tmp_path: Path) -> None:
    with sandbox("no_such_module:read") as running:
        line = refused(running, file_with(tmp_path, "answer"))
    assert "is gone" in line or "does not answer" in line


OWNER = """
import sys, time
from mlperf_bert.prepare.sandbox import sandbox
from pathlib import Path
with sandbox("hostile_readers:obey") as running:
    running.read_bytes(Path(sys.argv[1]), "")
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are listed by /proc")
def test_a_killed_owner_takes_the_server_with_it(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", OWNER, str(file_with(tmp_path, "answer"))]
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        owner.send_signal(signal.SIGKILL)
    assert len(children) == 1
    deadline = time.monotonic() + 60
    while Path(f"/proc/{children[0]}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{children[0]}/stat").read_text().split()[2]:
            break  # dead; whoever inherits it may not reap it soon
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{children[0]}").exists()


def test_verify_imports_no_hdf5_and_its_child_no_torch(synthetic_data: Path) -> None:
    code = (
        "import sys; from mlperf_bert.__main__ import main; "
        f"assert main(['verify', {str(synthetic_data)!r}, '--full', '--workers', '1']) == 0; "
        "assert 'h5py' not in sys.modules; "
        "import mlperf_bert.prepare.hdf5_reader; "
        "assert 'h5py' in sys.modules; assert 'torch' not in sys.modules"
    )
    done = run_process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "HDF5 structure" in done.stdout

"""What another local user can read, write, stop or inject while root trains in a shared place.

    .venv/bin/python logs/2026-11-28-edges/other_user.py OUT
    .venv/bin/python logs/2026-11-28-edges/other_user.py table

The second prints the outcomes in this folder. The first needs root. Two CPU ranks train below /tmp,
in a directory that everybody may enter, and a process with the user id OTHER tries one thing after
the other. OUT gets a JSON line for each attempt: what was tried, what came of it ("refused" or
"done"), and whether the run still went on afterwards.
"""

import encodings.idna  # noqa: F401  # loaded before the rights to read it are given up
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB, lockf
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from bert_tools.common.tables import markdown  # noqa: E402
from support import TINY_CONFIG, make_synthetic_data  # noqa: E402

OTHER = 64_321  # nobody's user id
OURS = "mlperf_bert"
Attempt = Callable[[], object]


def as_other(attempt: Attempt) -> str:
    """The outcome of `attempt`, made in a child without any right of root's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        try:
            found = attempt()
            said = "done" if found is None else f"done: {found}"
        except OSError as error:
            said = f"refused: {error.strerror or error}"
        except Exception as error:  # of this script
            said = f"not tried: {error!r}"
        os.write(write, said[:200].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def processes_of(run: Path) -> list[int]:
    """The launcher and its ranks, by what stands in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and b"train" in words:
            found.append(int(folder.name))
    return sorted(found)


def loopback_ports() -> list[int]:
    """Ports of root's that listen on this machine, as anybody may list them."""
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[7] == "0":
            ports.append(int(words[1].split(":")[1], base=16))
    return ports


def speak_to(ports: list[int]) -> str:
    """Send bytes that mean nothing to every port."""
    reached = 0
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(os.urandom(4096))
                reached += 1
        except OSError:
            pass
    return f"{reached} of {len(ports)} ports took bytes"


def append(path: Path) -> None:
    """Write a line at the end of a file."""
    with path.open("ab") as file:
        file.write(b"forged\n")


def take_lock(path: Path) -> None:
    """Lock a file as a run does."""
    with path.open("rb+") as file:
        lockf(file, LOCK_EX | LOCK_NB)


def first(pattern: str, below: Path) -> Path:
    """A path of that pattern."""
    return next(iter(below.glob(pattern)), below / "missing")


def attempts(place: Path, run: Path) -> dict[str, Attempt]:
    """What is tried while the run goes on."""
    launcher, *ranks = processes_of(run)
    own = run / "run_0"
    temporary = Path(tempfile.gettempdir())
    meeting = first("mlperf_bert-*", temporary)
    cache = Path.home() / ".cache/mlperf_bert"
    return {
        "read: the environment of a rank": lambda: Path(f"/proc/{ranks[0]}/environ").read_bytes(),
        "read: the file where ranks meet": lambda: (meeting / "store").read_bytes() and None,
        "read: the metrics of the run": lambda: (own / "metrics.jsonl").read_bytes() and None,
        "read: the lock of the run": lambda: (run / ".run_0.lock").read_bytes() and None,
        "write: a line into the metrics": lambda: append(own / "metrics.jsonl"),
        "write: a file among the checkpoints": lambda: (own / "checkpoints/LATEST.x").touch(),
        "write: a file where ranks meet": lambda: (meeting / "more").touch(),
        "write: a file among compiled code": lambda: (cache / "numba/more").touch(),
        "write: a new name for the run": lambda: run.rename(place / "mine"),
        "stop: take the lock of the run": lambda: take_lock(run / ".run_0.lock"),
        "stop: SIGTERM to the launcher": lambda: os.kill(launcher, signal.SIGTERM),
        "stop: SIGKILL to a rank": lambda: os.kill(ranks[0], signal.SIGKILL),
        "stop: bytes into every listening port": lambda: speak_to(loopback_ports()),
    }


def plant(folder: Path, found: Path) -> None:
    """Modules of the other user's in the place of ours and of the standard library's."""
    folder.mkdir()
    for name in ("mlperf_bert", "json", "argparse", "torch", "multiprocessing"):
        module = folder / f"{name}.py"
        module.write_text(f"import os; os.system('id -un >>{found}')\n")
        os.chown(module, OTHER, OTHER)
    os.chown(folder, OTHER, OTHER)


def inject(place: Path, data: Path) -> dict[str, str]:
    """What runs of the other user's code where root starts a command in a folder of his."""
    outcomes = {}
    python, script = sys.executable, ROOT / "run_and_time.sh"
    sets = " ".join(f"--set {each}" for each in ("run.max_steps=2", "parallel.ranks_per_node=2"))
    variables = f"PYTHON={python} CONFIG={place}/tiny.toml DATADIR={data} LOGDIR={place}/script"
    command = Path(python).with_name(OURS)
    prepare = f"prepare --text {data}/train.txt {data}/eval.txt --vocab {data}/words.txt"
    prepare += f" --max-seq-length 64 --workers 2 --out {place}/set"
    trained = f"{command} train --config {place}/tiny.toml --data {data} --run-dir {place}/direct"
    for name, line in {
        "inject: run_and_time.sh in a folder of his": f"{variables} {script} -- {sets}",
        "inject: mlperf_bert train in a folder of his": f"{trained} {sets}",
        "inject: mlperf_bert prepare in a folder of his": f"{command} {prepare}",
    }.items():
        folder, found = place / "his", place / "found"
        plant(folder, found)
        subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, timeout=300)
        came = found.read_text().splitlines() if found.exists() else []
        outcomes[name] = f"done: his code ran as {came[0]}" if came else "refused: it was not run"
        shutil.rmtree(folder)
        found.unlink(missing_ok=True)
    victim = place / "victim"
    victim.mkdir()
    (victim / "kept").touch()
    os.utime(victim, (0, 0))
    link = Path(tempfile.gettempdir()) / "mlperf_bert-own-planted"
    as_other(lambda: link.symlink_to(victim))
    subprocess.run(["bash", "-c", f"{trained}-2 {sets}"], cwd=place, capture_output=True)
    is_there = (victim / "kept").exists()
    link.unlink(missing_ok=True)
    name = "inject: a link where temporary directories are swept"
    outcomes[name] = "refused: its target stays" if is_there else "done: its target is gone"
    return outcomes


def table() -> str:
    """What came of each attempt, with the code before and after."""
    before, after = (
        [json.loads(line) for line in (HERE / name).read_text().splitlines()]
        for name in ("other_user_before.jsonl", "other_user.jsonl")
    )
    goes_on = {True: "yes", False: "no", None: ""}
    rows = [
        (new["attempt"], old["outcome"], new["outcome"], goes_on[new["run"]])
        for old, new in zip(before, after, strict=True)
    ]
    return "\n".join(markdown(("what he tries", "before", "after", "run goes on"), rows))


def main() -> None:
    """Start the run, try everything, write the outcomes."""
    if sys.argv[1:] == ["table"]:
        print(table())
        return
    place = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    place.chmod(0o755)
    (place / "data").mkdir()
    data = make_synthetic_data(place / "data")
    (place / "tiny.toml").write_text(TINY_CONFIG)
    run = place / "a run"
    words = ("train", "--config", place / "tiny.toml", "--data", data, "--run-dir", run)
    sets = ("run.max_steps=20000", "schedule.decay_steps=20000", "parallel.ranks_per_node=2")
    sets += ("eval.interval_samples=100000000", "eval.target_accuracy=none")
    command = [Path(sys.executable).with_name(OURS), *words]
    command += [word for each in sets for word in ("--set", each)]
    with Path(sys.argv[1]).open("w") as out, subprocess.Popen(command) as job:
        while not (run / "run_0/metrics.jsonl").exists() or len(processes_of(run)) < 3:
            time.sleep(0.2)
        time.sleep(2)
        for name, attempt in attempts(place, run).items():
            said = as_other(attempt)
            time.sleep(1)
            goes_on = job.poll() is None and len(processes_of(run)) == 3
            print(
                json.dumps({"attempt": name, "outcome": said, "run": goes_on}), file=out, flush=True
            )
        job.terminate()
        job.wait()
        for name, said in inject(place, data).items():
            print(json.dumps({"attempt": name, "outcome": said, "run": None}), file=out, flush=True)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()

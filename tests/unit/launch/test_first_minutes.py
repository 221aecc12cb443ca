"""The first minutes: a bad start is one line and status 2, and nothing is silent for long.

Installations are those of a stand-in for .venv's interpreter: it has the real standard library, and
its pip says what it is told to.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.run import console
from support import REPOSITORY, write_program

RECORDER = REPOSITORY / "logs" / "2026-11-23-first-run" / "record.py"
LAUNCH = REPOSITORY / "benchmarks/bert/implementations/pytorch/launch"
PYTHON = shlex.quote(sys.executable)
LOCKED = re.search(  # the version of torch in the lock
    r"(?m)^torch==(\S+)", (REPOSITORY / "requirements" / "pinned.txt").read_text()
)[1]
INTERPRETER = f"""#!/bin/sh
case "$*" in
*" versions --timeout 5 --retries 1 "*) echo "Available: ${{OFFERED:-9.9.9, {LOCKED}}}" ;;
*" install "*)
    echo "$*" >>"$ASKED"; echo "$PIP_SAYS"
    [ -z "$CTRL_C" ] || kill -s INT 0 # as a terminal does, to all of the session
    exit ${{PIP_STATUS:-0}} ;;
*) exec {PYTHON} "$@" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$ASKED"
case "$*" in *--dry-run*) [ $UV_HTTP_TIMEOUT$UV_HTTP_RETRIES = 51 ] && exit $DRY ;; esac
echo "  error: no such index"; exit 1
"""


@pytest.fixture
def tree(tmp_path):
    """The files of a bare clone that a start reads."""
    implementation = LAUNCH.parent.relative_to(REPOSITORY)
    for name in (implementation / "launch", implementation / "mlperf_bert/configs", "requirements"):
        shutil.copytree(REPOSITORY / name, tmp_path / "tree" / name)
    (tmp_path / "tree" / "tools").mkdir()
    scripts = ("run_and_time.sh", "run_tests.sh", "tools/venv.sh", "tools/lock.py")
    for name in (*scripts, "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


@pytest.fixture
def programs(tmp_path):
    """A directory that is first on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def start(*command, **variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    kept["PATH"] = kept["PATH"].removeprefix(f"{Path(sys.executable).parent}:")
    environ = kept | {name: str(value) for name, value in variables.items()}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)


def one_line(done):
    """The only line on stderr, of a start that left with status 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and ": error: " in done.stderr, done.stderr
    return done.stderr


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="needs unshare -rm",
)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("tools/venv.sh", "no permission to write to {tree}, where the package is installed; "),
        ("run_tests.sh", "{tree}: not writable; make it writable, or test a copy"),
    ],
)
def test_a_read_only_tree_is_one_line(tree, command, said):
    private = ("unshare", "-rm", "sh", "-c", READ_ONLY, tree)
    assert said.format(tree=tree) in one_line(start(*private, tree / command))


def test_no_python_to_make_the_environment_of(tree, programs):
    for name in ("python3", "python3.11", "python3.12"):
        write_program(programs / name, "#!/bin/sh\nexit 1\n")
    done = start(tree / "run_tests.sh", PATH=f"{programs}:{os.environ['PATH']}")
    assert "no Python 3.11 or newer with venv and ensurepip on PATH; install" in one_line(done)
    assert not (tree / ".venv").exists()


@pytest.fixture
def install(tree, programs):
    """Runs tools/venv.sh by the stand-in: what came of it, and what it asked of pip and uv."""
    for name in ("bin", "lib/python3/site-packages"):
        (tree / ".venv" / name).mkdir(parents=True)
    python = write_program(programs / "python", INTERPRETER)
    (tree / ".venv" / "bin" / "python").symlink_to(python)
    asked = tree.parent / "asked"

    def call(**variables):
        path = f"{programs}:{os.environ['PATH']}" if "DRY" in variables else "/usr/bin:/bin"
        done = start(tree / "tools/venv.sh", PATH=path, ASKED=asked, **variables)
        return done, asked.read_text().splitlines() if asked.exists() else []

    return call


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"PIP_SAYS": "[Errno 28] No space left on device"},
            "the disk of .venv or of temporary files (TMPDIR) is full",
        ),
        ({"PIP_SAYS": "NewConnectionError(name)"}, "the package index cannot be reached"),
        ({"TMPDIR": "none"}, "set TMPDIR to another"),
    ],
)
def test_an_installation_that_cannot_be_says_why(install, tree, given, said):
    done, _ = install(PIP_STATUS=1, **given)
    assert said in one_line(done)
    assert not (tree / ".venv" / "installed").exists()


@pytest.mark.parametrize(("asked", "resume"), [({}, "auto"), ({"RESUME": "/"}, "/")])
def test_ctrl_c_during_the_installation_says_how_to_go_on(install, tree, asked, resume):
    """A run without a directory has nothing to resume, so it is started as it was."""
    own_session = ("setsid", "--wait", "env", "--default-signal=INT")
    given = {"CTRL_C": 1, "ASKED": "/dev/null", "LOGDIR": tree / "a", **asked}
    done = start(*own_session, tree / "run_and_time.sh", **given)
    assert (done.returncode, done.stderr) == (130, ""), done.stdout
    *_, fact, hint = done.stdout.splitlines()
    assert fact == "interrupted before the first run, so no training was lost"
    assert hint == f"to start again: RESUME={resume} LOGDIR={tree}/a {tree}/run_and_time.sh"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="of a machine without a GPU")
def test_which_torch_and_by_what(install, programs, tree):
    stamp = tree / ".venv" / "installed"
    of_cpu, asked = install(OFFERED=f"9.9.9, {LOCKED}+cpu, {LOCKED}", TORCH_INDEX="file:///more")
    assert of_cpu.stdout.splitlines()[0].endswith(
        f"torch {LOCKED} for CPUs, because there is no GPU, with pip"
    )
    locked, pinned, own = asked
    assert "--require-hashes --no-deps --only-binary :all:" in locked and "///more" not in locked
    assert "--only-binary :all:" in pinned
    assert "--extra-index-url file:///more" in pinned and own.endswith(f"--editable {tree}")
    assert start(tree / "tools/venv.sh").stdout == ""  # at once, the second time
    stamp.unlink()
    of_cuda, _ = install()
    assert "no package index here has a CPU build (TORCH_INDEX can add one)" in of_cuda.stdout
    assert of_cuda.stdout.startswith("installing packages into .venv (once), about 3,100 MB")
    stamp.unlink()
    chosen, asked = install(OFFERED=f"9.9.9, {LOCKED}+cpu, {LOCKED}", TORCH="cuda")
    assert f"; torch {LOCKED} for GPUs, because TORCH is cuda, with pip" in chosen.stdout
    assert not any(f"torch=={LOCKED}+cpu" in line for line in asked)
    version = tree / ".venv/lib/python3/site-packages/torch/version.py"
    version.parent.mkdir()
    version.write_text("cuda: Optional[str] = None\n")
    assert ".venv has torch for CPUs; remove it with" in one_line(install(TORCH="cuda")[0])
    assert "TORCH: 'rocm' is not a known build" in one_line(install(TORCH="rocm")[0])
    stamp.unlink()
    write_program(programs / "uv", UV)
    by_both, asked = install(DRY="0")
    first, second, *_ = by_both.stdout.splitlines()
    assert first.endswith(f"torch {LOCKED} for CPUs, because there is no GPU, with uv")
    assert (
        second == "uv cannot install the locked packages (error: no such index); using pip instead"
    )
    assert any(line.startswith("uv ") and "--require-hashes" in line for line in asked)
    assert "--require-hashes" in asked[-3] and not asked[-3].startswith("uv")


def test_a_quiet_command_ticks_on_a_terminal(programs, tmp_path):
    quiet = '*"config get"*) echo embedded text open 1 1 ;; *prepare*) sleep 6 ;;'
    quiet += " *train*) echo step 1/9; echo RESULT,bert,7; exit 75 ;;"
    python = write_program(programs / "python", f'#!/bin/sh\ncase "$*" in {quiet} esac\n')
    given = {"PYTHON": python, "LOGDIR": tmp_path / "run"}
    script = REPOSITORY / "run_and_time.sh"
    done = start(sys.executable, RECORDER, tmp_path / "a.cast", script, **given)
    assert done.returncode == 75, done.stderr
    _, *events = map(json.loads, (tmp_path / "a.cast").read_text().splitlines())
    # One read of the terminal may hold several lines.
    assert events[0][1] == "o"
    assert events[0][2].startswith("cpu_tiny, 3 steps: text, train, check\r\n")
    assert any(re.search(r"0:0\d preparing the text", event[2]) for event in events)
    silence = float(re.search(r"longest silence: (\S+)", done.stdout)[1])
    times = [0.0, *(event[0] for event in events)]
    assert silence == pytest.approx(max(np.diff(times)), abs=0.06)


def test_a_line_says_what_goes_on_where_nothing_was_said(monkeypatch, capsys):
    monkeypatch.setattr(console, "TICK_S", 0.01)
    monkeypatch.setattr(console, "SILENCE_S", (0.02, 0.1))
    doing, begun = ["start-up", "step 1", *["step 2"] * 999], time.monotonic()
    with console.ProgressLines(stderr=False).never_silent(lambda: doing.pop(0)) as shown:
        ticks = [thread for thread in threading.enumerate() if thread.name == "ticks"][-1]
        while len(doing) > 999 and ticks.is_alive():
            time.sleep(0.01)
        shown.line("a line")
    ticks.join()
    assert time.monotonic() - begun > 0.2  # a line for each silence, not for each tick
    printed = capsys.readouterr().out
    assert re.match(r"\.{3} start-up \(0:00:0\d\)\n\.{3} step 1 \(0:00:0\d\)\n", printed)
    assert "\na line\n" in printed


def test_without_words_the_latest_activity_is_repeated(monkeypatch, capsys):
    monkeypatch.setattr(console, "TICK_S", 0.01)
    monkeypatch.setattr(console, "SILENCE_S", (0.02, 0.02))
    said, end = "", time.monotonic() + 30
    with console.ProgressLines().never_silent() as shown:
        shown.line("loading")
        for words in ("... loading (", "... measuring ("):
            while words not in said:
                assert time.monotonic() < end, said
                said += capsys.readouterr().err
                time.sleep(0.01)
            shown.counted("measuring", "steps", 0, 5)
    assert said.startswith("loading\n")


def test_a_ticker_that_is_ended_as_it_begins_says_and_removes_nothing(tmp_path):
    """The trap of tools/venv.sh is inherited by its ticker, which must not run it."""
    (trap,) = re.findall(
        r"^trap .* EXIT$", (REPOSITORY / "tools/venv.sh").read_text(), re.MULTILINE
    )
    script = f"""set -euo pipefail
    . '{LAUNCH}/ticking.sh'
    work='{tmp_path}/work'; mkdir "$work"
    {trap}
    for i in $(seq 60); do ticking "echo x" true; [ -d "$work" ] || {{ echo gone; exit 1; }}; done
    """
    done = start("bash", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "work").exists()

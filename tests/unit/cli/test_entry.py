"""The program's exit: ranks skip the interpreter's end; output without a reader."""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys

import pytest

from mlperf_bert import git_commit, package_version
from mlperf_bert.__main__ import COMMANDS
from support import CONFIGS, run_process

ENTRY = "import atexit, os, sys\nimport mlperf_bert.__main__ as program\n{}\nprogram.entry()\n"
STEPS = ("config", "get", CONFIGS / "cpu_tiny.toml", "run.max_steps")


def enter(code, *words):
    """Run the program with these words after this code."""
    return run_process(sys.executable, "-c", ENTRY.format(code), *words)


def run_into(stdout, *command):
    """Run Python with this stdout, buffered as it usually is."""
    environ = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
        timeout=280,
        check=False,
    )


def run_unread(*command):
    """Run Python writing into a pipe that nobody reads, as before a `head` that has ended."""
    read, write = os.pipe()
    os.close(read)
    try:
        return run_into(write, *command)
    finally:
        os.close(write)


@pytest.mark.parametrize(("module", "ends"), [("distributed.session", False), ("config", True)])
def test_only_ranks_skip_the_interpreters_end(module, ends):
    code = f"import mlperf_bert.{module}\natexit.register(print, 'the interpreter ends')"
    done = enter(code, *STEPS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3000\n")  # nothing buffered is lost
    assert ("the interpreter ends" in done.stdout) == ends


@pytest.mark.parametrize("words", ["--help", "config show cpu_tiny", "watch --once ."])
def test_a_reader_who_goes_is_no_fault(words):
    done = run_unread("-m", "mlperf_bert", *words.split())
    assert (done.returncode, done.stderr) == (141, "")  # 128 and the number of SIGPIPE


def test_a_rank_leaves_with_the_status_of_its_run_whoever_reads_of_it():
    code = "sys.modules['mlperf_bert.distributed.session'] = sys\n"  # what every rank has loaded
    code += "program.main = lambda: print('seen') or 3"
    done = run_unread("-c", ENTRY.format(code))
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("options", [("-m",), ("-u", "-m")])  # found at the end, or at once
def test_output_that_finds_no_room_is_one_line(options):
    with open("/dev/full", "w") as full:
        done = run_into(full.fileno(), *options, "mlperf_bert", *STEPS)
    assert done.returncode == 2
    assert done.stderr.startswith("mlperf_bert: error: stdout")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_training_goes_on_when_nobody_reads_what_it_says(tmp_path):
    log = tmp_path / "stdout.log"
    code = (
        "import sys\nfrom pathlib import Path\nfrom mlperf_bert.run.console import Reporter\n"
        f"with Reporter(Path({str(log)!r}), None) as reporter:\n"
        "    for number in range(3):\n        reporter.line(f'line {number}')\n"
    )
    assert "Traceback" not in run_unread("-c", code).stderr
    said = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert said == ["line 0", "line 1", "line 2"]


def test_the_version_is_said():
    done = run_process(sys.executable, "-m", "mlperf_bert", "--version", COLUMNS="20")
    torch = importlib.metadata.version("torch")
    line = f"mlperf_bert {package_version()} (commit {git_commit()}), torch {torch}\n"
    assert (done.returncode, done.stdout) == (0, line)


def test_help_names_all_commands_and_loads_none():
    done = enter("atexit.register(lambda: print(sorted(sys.modules)))", "-h")
    shown, loaded = done.stdout.rsplit("\n[", 1)
    for name, (module, text) in COMMANDS.items():
        assert re.search(rf"^    {name}\s+{re.escape(text)}$", shown, re.MULTILINE)
        assert f"'{module}'" not in loaded


def test_without_the_tools_their_commands_are_not_offered():
    without = "sys.modules['bert_tools'] = None"
    shown = enter(without, "--help")
    named = set(re.findall(r"^    ([a-z-]+)\s", shown.stdout, re.MULTILINE))
    own = {name for name, (module, _) in COMMANDS.items() if module.startswith("mlperf_bert.")}
    assert (shown.returncode, named) == (0, own)
    typed = enter(without, "report")
    assert typed.returncode == 2
    assert typed.stderr.startswith("mlperf_bert: error: report: belongs to the tools")
    assert typed.stderr.count("\n") == 1


ASKED_TO_END = """
import signal, time
from bert_tools.huggingface import fill
number, before, others = int(sys.argv[1]), sys.argv[2], sys.argv[3]
signal.signal(number, getattr(signal, before))
def run(args):
    try:
        os.kill(os.getpid(), number)
        time.sleep(1)
    finally:
        for other in others.split(","):  # no second end of what cleans up
            os.kill(os.getpid(), int(other))
    return 0
fill.run = run
sys.argv[1:] = ["fill", "--checkpoint", "x", "a [MASK]"]
"""


@pytest.mark.parametrize(
    ("code", "number", "before", "said"),
    [
        ("program.make_parser = lambda _: os.kill(os.getpid(), 1)", 1, "SIG_DFL", "SIGHUP"),
        (ASKED_TO_END, signal.SIGTERM, "SIG_DFL", "SIGTERM"),
        (ASKED_TO_END, signal.SIGUSR1, "SIG_DFL", "SIGUSR1"),
        (ASKED_TO_END, signal.SIGHUP, "SIG_DFL", "SIGHUP"),
        (ASKED_TO_END, signal.SIGHUP, "SIG_IGN", ""),  # under nohup
    ],
)
def test_a_signal_ends_a_command_in_order(code, number, before, said):
    done = enter(code, int(number), before, "15,1" if said else "1")
    expected = (75, f"mlperf_bert: interrupted by {said}\n") if said else (0, "")
    assert (done.returncode, done.stderr) == expected

"""The program's exit: ranks skip the interpreter's end; output without a reader."""

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from mlperf_bert import git_commit, package_version
from mlperf_bert.__main__ import COMMANDS
from support import CONFIGS, run_process

CODE = """
import atexit, sys
atexit.register(print, "the interpreter ends")
from mlperf_bert.__main__ import entry
import mlperf_bert.{module}
sys.argv = ["mlperf_bert", "config", "get", {config!r}, "run.max_steps"]
entry()
"""


@pytest.mark.parametrize(("module", "ends"), [("distributed.session", False), ("config", True)])
def test_only_ranks_skip_the_interpreters_end(module, ends):
    code = CODE.format(module=module, config=str(CONFIGS / "cpu_tiny.toml"))
    done = run_process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6000\n")  # nothing buffered is lost
    assert ("the interpreter ends" in done.stdout) == ends


ENDED_WHILE_SAYING = """
import os, signal, sys
import mlperf_bert.__main__ as program
from mlperf_bert.__main__ import entry
from mlperf_bert.errors import ConfigError

def refuse():
    try:
        raise ConfigError("the shard", "is cut", "prepare it again")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

program.set_code_caches = refuse
sys.argv = ["mlperf_bert", "config", "get", {config!r}, "run.max_steps"]
entry()
"""


def test_a_rank_that_is_ended_while_it_says_its_error_says_it():
    code = ENDED_WHILE_SAYING.format(config=str(CONFIGS / "cpu_tiny.toml"))
    done = run_process(sys.executable, "-c", code)
    assert done.returncode == 2
    assert done.stderr == "mlperf_bert: error: the shard: is cut; prepare it again\n"


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


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "config show cpu_tiny",
        "watch --once .",
    ],
)
def test_a_reader_who_goes_is_no_fault(words):
    done = run_unread("-m", "mlperf_bert", *shlex.split(words))
    assert (done.returncode, done.stderr) == (141, "")  # 128 and the number of SIGPIPE


ENTRY = "import sys\nimport mlperf_bert.__main__ as program\n{}\nprogram.entry()\n"


def test_a_rank_leaves_with_the_status_of_its_run_whoever_reads_of_it():
    code = "sys.modules['mlperf_bert.distributed.session'] = sys\n"  # what every rank has loaded
    code += "program.main = lambda: print('seen') or 3"
    done = run_unread("-c", ENTRY.format(code))
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("options", [("-m",), ("-u", "-m")])  # found at the end, or at once
def test_output_that_finds_no_room_is_one_line(options):
    words = ("config", "get", CONFIGS / "cpu_tiny.toml", "run.max_steps")
    with open("/dev/full", "w") as full:
        done = run_into(full.fileno(), *options, "mlperf_bert", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("mlperf_bert: error: stdout")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mistake_keeps_its_status_where_nothing_can_be_printed():
    command = [sys.executable, "-m", "mlperf_bert", "config", "show", "missing.toml"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, timeout=280, check=False)
    assert done.returncode == 2  # the interpreter's own would be 120


def test_a_training_goes_on_when_nobody_reads_what_it_says(tmp_path):
    log = tmp_path / "stdout.log"
    code = (
        "import sys\nfrom pathlib import Path\nfrom mlperf_bert.run.console import Reporter\n"
        f"with Reporter(Path({str(log)!r}), 10) as reporter:\n"
        "    for number in range(3):\n        reporter.line(f'line {number}')\n"
    )
    assert "Traceback" not in run_unread("-c", code).stderr
    said = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert said == ["line 0", "line 1", "line 2"]


ASKED_TO_END = """
import os, signal, sys, time
from mlperf_bert import __main__ as program
from bert_tools.huggingface import fill
number, before = int(sys.argv[1]), sys.argv[2]
signal.signal(number, getattr(signal, before))
def run(args):
    try:
        os.kill(os.getpid(), number)
        time.sleep(1)
    finally:
        for other in (signal.SIGTERM, signal.SIGHUP):  # no second end of what cleans up
            os.kill(os.getpid(), other)
    return 0
fill.run = run
sys.argv[1:] = ["fill", "--checkpoint", "x", "a [MASK]"]
program.entry()
"""


def test_the_version_is_said():
    done = run_process(sys.executable, "-m", "mlperf_bert", "--version", COLUMNS="20")
    torch = importlib.metadata.version("torch")
    line = f"mlperf_bert {package_version()} (commit {git_commit()}), torch {torch}\n"
    assert (done.returncode, done.stdout) == (0, line)


def test_help_names_all_commands_and_loads_none():
    code = (
        "import atexit\natexit.register(lambda: print(sorted(sys.modules)))\nsys.argv[1:] = ['-h']"
    )
    done = run_process(sys.executable, "-c", ENTRY.format(code))
    shown, loaded = done.stdout.rsplit("\n[", 1)
    for name, (module, text) in COMMANDS.items():
        assert re.search(rf"^    {name}\s+{re.escape(text)}$", shown, re.MULTILINE)
        assert f"'{module}'" not in loaded


def test_without_the_tools_their_commands_are_not_offered():
    blocked = "sys.modules['bert_tools'] = None\nsys.argv[1:] = [{!r}]"
    shown = run_process(sys.executable, "-c", ENTRY.format(blocked.format("--help")))
    named = set(re.findall(r"^    ([a-z-]+)\s", shown.stdout, re.MULTILINE))
    own = {name for name, (module, _) in COMMANDS.items() if module.startswith("mlperf_bert.")}
    assert (shown.returncode, named) == (0, own)
    typed = run_process(sys.executable, "-c", ENTRY.format(blocked.format("report")))
    assert typed.returncode == 2
    assert typed.stderr.startswith("mlperf_bert: error: report: is one of the tools, which are not")
    assert typed.stderr.count("\n") == 1


def test_a_signal_ends_a_command_in_order():
    earlier = ENTRY.format("program._parser = lambda words: os.kill(os.getpid(), 1)")
    codes = [(earlier.replace("import sys", "import os, sys"), "SIGHUP")]  # while options are read
    codes += [(ASKED_TO_END, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP")]
    for code, name in codes:
        done = run_process(sys.executable, "-c", code, getattr(signal, name).value, "SIG_DFL")
        assert (done.returncode, done.stderr) == (75, f"mlperf_bert: interrupted by {name}\n")


def test_under_nohup_the_terminal_does_not_count():
    code = ASKED_TO_END.replace("(signal.SIGTERM, signal.SIGHUP)", "(signal.SIGHUP,)")
    done = run_process(sys.executable, "-c", code, signal.SIGHUP.value, "SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")

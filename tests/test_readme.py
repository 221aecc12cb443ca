"""Every command of the README runs in one copy of the repository.

Commands are in ```sh blocks and in the table "What you can do". Those that train do so to a reduced
target. All except the first one, and others that take long, run in `make test-slow`. Left out:
`./run_tests.sh`, a block behind `<!-- not tested: long -->`, and the rows that need a cluster, a
study, labels, or published weights. The rows of the image are in `tests/container/test_image.py`.
"""

import json
import re
import shlex

import pytest

from mlperf_bert.__main__ import main
from support import REDUCED, REPOSITORY, copy_checkout, run_shell

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- not tested: (\w+) -->\n)?```sh\n(.*?)```", re.DOTALL)
ROW = re.compile(r"^\| [^|]+ \| `([^`]+)`[^|]* \| \[", re.MULTILINE)
FULL_RUN = "./run_and_time.sh"
NEEDS_MORE = (
    "sbatch ",
    "docker build ",
    "benchmarks/bert/implementations/pytorch/launch/docker.sh",
    *(f"mlperf_bert {name} " for name in ("tune", "pretrain", "score", "phases")),
)
PROGRAM = "mlperf_bert "
LONG = ("bench ", "squad ", "verify ", "doctor", "package ")


def table():
    return ROW.findall(README)


def rows():
    return [row for row in table() if not row.startswith(NEEDS_MORE)]


def commands():
    blocks = [block for reason, block in BLOCK.findall(README) if not reason]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [row.replace(PROGRAM, f".venv/bin/{PROGRAM}", 1) for row in rows()]
    return [line for line in lines if line != "./run_tests.sh"]


def run_reduced(command, directory):
    if "run_and_time.sh" in command:
        command += (" --" if " -- " not in command else "") + REDUCED
    elif " bench " in command:
        command += " --steps 1 --set model.num_layers=1 --set model.hidden_size=64"
        command += " --set parallel.local_batch_size=2 --no-compile"
    return run_shell(command, directory, timeout=600)


def has_worked(command, done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if "RESUME" in command:
        assert "had ended before" in done.stdout
    elif "run_and_time.sh" in command:
        results = re.findall(r"^RESULT,bert,(\d+),\d+,\w+,.+$", done.stdout, re.MULTILINE)
        expected = re.search(r"NEXP=(\d+)", command)
        assert len(set(results)) == (int(expected[1]) if expected else 1)
        assert done.stdout.count("accepted") == len(results)
        assert "target reached" in done.stdout


@pytest.mark.timeout(900)
def test_the_first_command(cpu_tiny_run):
    has_worked(FULL_RUN, cpu_tiny_run)


@pytest.mark.timeout(900)
def test_the_tables_quick_commands(cpu_tiny_run, checkout, monkeypatch):
    """In this process, one after the other; of the first command's run in place of `runs/two`."""
    (log,) = re.findall(r"ruleset [\d.]+: (.+)/result_0.txt$", cpu_tiny_run.stdout, re.MULTILINE)
    monkeypatch.chdir(checkout)
    asked = [row.removeprefix(PROGRAM) for row in rows() if row.startswith(PROGRAM)]
    quick = [words for words in asked if not words.startswith(LONG)]
    assert len(quick) >= 9
    for words in quick:
        assert main(shlex.split(re.sub(r"runs/two\b", log, words))) == 0, words


@pytest.mark.longest
@pytest.mark.timeout(1800)
def test_every_command_in_its_order(tmp_path):
    tree = copy_checkout(tmp_path / "tree")
    for command in commands():
        has_worked(command, run_reduced(command, tree))


RECORDING = REPOSITORY / "logs" / "2026-11-30-first-run"


def test_what_you_see_is_what_was_recorded():
    shown = re.search(r"```text\n(.*?)```.*?recording\]\((.+?)README\.md\)", README, re.DOTALL)
    assert shown is not None and REPOSITORY / shown[2] == RECORDING
    events = [json.loads(line) for line in (RECORDING / "first.cast").read_text().splitlines()[1:]]
    lines = re.split(r"(?:\x1b\[[\d?]*[A-Za-z]|[\r\n])+", "".join(data for _, _, data in events))
    quoted = [line for line in shown[1].splitlines() if line != "..."]
    assert [line for line in lines if line in quoted] == quoted


def test_the_first_and_second_runs_times_are_those_recorded():
    words = " ".join(README.split("## Train on your own text")[0].split())
    said = "the first training step starts after {} s, and the result appears after {} s"
    again = f"If everything is already installed, {said}"
    for name, text in (("first", said), ("second", again)):
        figures = (RECORDING / f"{name}.txt").read_text()
        times = re.findall(r"^(?:first step|result): ([\d.]+) s$", figures, re.MULTILINE)
        assert text.format(*times) in words
        longest = re.search(r"^longest silence: ([\d.]+) s", figures, re.MULTILINE)
        assert longest and float(longest[1]) <= 3 and "never pauses for more than 3 s" in words
